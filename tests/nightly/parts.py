"""The parts of the nightly run. Each test marked ``nightly`` is in one of them: a part is a test file, except that the
longest tests have parts of their own, which the part of their file leaves out, and that one part has all files in which
nothing is marked but what support/pairwise.py leaves over."""

from __future__ import annotations

import ast
import functools
import re
import shutil
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
# Tests that take more than some minutes, and into how many parts their cases are divided.
LONG = {
    "tests/hf/test_against_transformers.py::test_a_bias_is_found": 1,
    "tests/kernels/test_chi_square.py::test_ten_million_draws": 9,
    "tests/kernels/test_texts.py::test_whole_texts": 4,
    "tests/loop/test_equality.py::test_a_thousand_prompts": 10,
    "tests/loop/test_equality_of_trees.py::test_two_hundred_prompts": 4,
    "tests/serving/server/test_server_fuzz.py::test_requests_of_the_schema": 4,
    "tests/serving/server/test_server_fuzz.py::test_spoilt_values": 2,
    "tests/serving/server/test_server_memory.py::test_memory_is_flat": 1,
}
# Files with nightly tests: tests/conftest.py marks most cases of a test for every backend that run on Triton.
NIGHTLY = re.compile(r"mark\.nightly|def \w+\([^)]*\b(fast_)?backend\b")
REAL = re.compile(r"mark\.real\b")  # files with tests of real models, which are skipped where there are none
OPERATIONS = ("csrc", "specdec_kernels", "python/specdec_layers", "setup.py", "tests/conftest.py")
KERNELS = (*OPERATIONS, "python/specdec/evaluation/verify/chi_square.py")
ALL = (*KERNELS, "python/specdec")
# What depends on torch and transformers most, on other versions than those of every day.
SLICE = (
    "tests/models/test_kv_cache.py", "tests/models/test_loading.py", "tests/models/test_model_types.py",
    "tests/models/test_adapters.py", "tests/models/test_quantised.py",
    "tests/models/test_attention_models.py",
    "tests/hf/test_speculate.py", "tests/hf/test_generation_config.py", "tests/hf/test_convert_processors.py",
    "tests/hf/test_criteria.py", "tests/loop/test_decoder.py", "tests/drafters/test_universal.py",
    "tests/loop/test_on_a_gpu.py", "tests/loop/test_step_operations.py", "tests/test_library_calls.py",
    "tests/kernels/test_ops.py", "tests/kernels/test_triton.py",
)  # fmt: skip
# Libraries that are too heavy for every day, and the tests that need them.
EXTRAS = {
    "harness": ("lm_eval==0.4.13", "tests/cli/test_harness.py", "tests/cli/harness"),
    "speculators": ("speculators==0.9.0", "tests/drafters/test_against_speculators.py"),
    "trl": ("trl==1.16.0", "tests/training/test_in_trl.py", "examples/rollouts_in_trl.py"),
}
VERSIONS = {
    "oldest": ("torch==2.11.0", "triton==3.6.0", "transformers==5.17.0", "numpy<2.4"),
    "newest": ("torch", "triton", "transformers"),
}


class Part(NamedTuple):
    name: str
    arguments: tuple[str, ...]  # of pytest
    paths: tuple[str, ...]  # what the result depends on
    requirements: tuple[str, ...] = ()  # of an environment of its own; none: the present one


def parts() -> list[Part]:
    """All that can run on this machine."""
    all_files = sorted((ROOT / "tests").rglob("test_*.py"))
    found = [part for file in all_files for part in _of_file(file)]
    others = tuple(file.relative_to(ROOT).as_posix() for file in all_files if not NIGHTLY.search(file.read_text()))
    found.append(Part("products", ("-m", "nightly", *others), (*ALL, "tests/support", *others)))
    real = [file for file in all_files if REAL.search(file.read_text())]
    files = tuple(file.relative_to(ROOT).as_posix() for file in real)
    helpers = dict.fromkeys(helper for file in real for helper in _helpers(file))
    found.append(Part("real", ("-m", "real", *files), (*ALL, *helpers, "tools/real_models.py")))
    if shutil.which("nvcc"):
        found.append(Part("nvcc", ("-m", "nvcc", "tests"), KERNELS))
    for name, requirements in VERSIONS.items():
        found.append(Part(f"versions/{name}", SLICE, (*ALL, "tests/support", *SLICE), requirements))
    for name, (requirement, file, *data) in EXTRAS.items():
        paths = (*ALL, *_helpers(ROOT / file), *data)
        found.append(Part(f"extras/{name}", (file,), paths, (requirement, VERSIONS["newest"][-1])))
    return found


def _of_file(file: Path) -> list[Part]:
    if not NIGHTLY.search(file.read_text()):
        return []
    path, room = file.relative_to(ROOT).as_posix(), file.parent.name
    paths = (*(KERNELS if room in ("kernels", "fuzz") else ALL), *_helpers(file))
    long = [test for test in LONG if test.startswith(f"{path}::")]
    name, nightly = f"{room}/{file.stem.removeprefix('test_')}", ("-m", "nightly")
    found = [Part(name, (*nightly, path, *(f"--deselect={test}" for test in long)), paths)]
    for test in long:
        count, short = LONG[test], test.partition("::test_")[2]
        for i in range(1, count + 1):
            found.append(Part(f"{name}/{short}/{i}", (*nightly, f"--shard={i}/{count}", test), paths))
    return found


def _helpers(file: Path) -> list[str]:
    """The file, and what it imports of tests/, and what that imports in turn."""
    found = [file]
    for reading in found:
        found += [helper for helper in _imported(reading) if helper not in found]
    return [helper.relative_to(ROOT).as_posix() for helper in found]


@functools.cache
def _imported(file: Path) -> tuple[Path, ...]:
    helpers = []
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom):
            module = (file.parent if node.level else ROOT / "tests").joinpath(*(node.module or "").split("."))
            helpers += [module.with_suffix(".py"), *(module / f"{name.name}.py" for name in node.names)]
    return tuple(helper for helper in dict.fromkeys(helpers) if helper.is_file())

"""The simulated machine on which the CUDA kernels run without a GPU: which faults it finds; and the kernels under
sanitizers.

Every test with backend "cuda" checks that the kernels' tokens are the reference's and that no fault is found."""

from __future__ import annotations

import ctypes
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import simt.kernels
import torch

from specdec_kernels import SamplingParams, draft_step
from specdec_kernels.testing import assert_same_step, random_step
from specdec_kernels.types import SpeculativeStep

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU the kernels themselves run")
SIMT = Path(__file__).parent


@pytest.fixture(scope="module")
def kernels(tmp_path_factory):
    """The kernels of machine_test.cpp by name: each takes a bug and a seed, and returns (fault, result)."""
    built = tmp_path_factory.mktemp("machine") / "machine_test.so"
    command = ["g++", "-std=c++20", "-O1", "-shared", "-fPIC", SIMT / "machine_test.cpp", SIMT / "machine.cpp"]
    subprocess.run([*command, "-o", built], check=True)
    library = ctypes.CDLL(str(built))

    def run(name: str, bug: int, seed: int) -> tuple[str, float]:
        function, result = getattr(library, f"run_{name}"), ctypes.c_float(-1.0)
        function.restype = ctypes.c_char_p
        return function(bug, ctypes.c_uint64(seed), ctypes.byref(result)).decode(), result.value

    return run


def test_a_right_kernel_has_no_fault(kernels):
    assert {kernels("max", 0, seed) for seed in range(20)} == {("", 4095.0)}


@pytest.mark.parametrize(
    ("bug", "words"),
    [
        (1, ("race", "never written")),  # a missing barrier; which fault is seen depends on the order
        (2, ("race",)),
        (3, ("deadlock",)),
        (4, ("outside",)),
        (5, ("never written",)),
        (6, ("aligned",)),
        (7, ("another block",)),
        (8, ("another block", "never written")),
        (9, ("never written",)),
    ],
)
def test_a_bug_is_found_in_every_order(kernels, bug, words):
    for seed in range(20):
        fault, _ = kernels("max", bug, seed)
        assert any(word in fault for word in words), (seed, fault)


FLAT_ROWS = {
    "normal": lambda x: x,
    "narrow": lambda x: 20 + 1e-4 * x,
    "three_values": lambda x: 20 + x.clamp(-1, 1).round() / 8,
    "constant": lambda x: 0 * x + 0.7,
}


@pytest.mark.parametrize("kind", FLAT_ROWS)
@pytest.mark.parametrize("setting", [{"top_p": 0.9}, {"top_k": 6000}, {"top_k": 6000, "top_p": 0.9}])
def test_filters_read_flat_rows_few_times(kind, setting):
    """However flat a row whose 8192 logits exceed the list: the row is measured and its kept tokens are summed, and in
    between each filter reads it three times at most. Nor do all lanes add to one word."""
    logits = FLAT_ROWS[kind](torch.randn(1, 8192, generator=torch.Generator().manual_seed(7)))
    simt.kernels.take_counts()
    drawn, expected = (
        draft_step(logits, SamplingParams(**setting), seed=1, position=3, offset=0, backend=backend)
        for backend in ("cuda", "reference")
    )
    work = simt.kernels.take_counts()
    assert torch.equal(drawn.cutoff, expected.cutoff)
    reads = work.loads / (8192 / 4)
    between = len(setting) * (1 if kind == "constant" else 3)
    assert 2 + between <= reads < 3 + between  # what is kept is read to be summed
    assert work.most <= 8192 / 8 and work.additions < 2.2 * 8192 * len(setting)


@pytest.mark.parametrize("vocabulary", [2050, 3083])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_begin_and_end_anywhere(vocabulary, dtype):
    """Nothing around them counts, and they have the statistics of rows that begin with whole vectors."""

    def spoiled(t: torch.Tensor) -> torch.Tensor:
        wide = torch.full((*t.shape[:2], vocabulary + 3 + vocabulary % 2), math.nan, dtype=t.dtype)
        return wide[..., 1 : vocabulary + 1].copy_(t)

    inputs = random_step(2, 3, vocabulary, dtype=dtype, draft_dtype=dtype)
    inputs.target_logits -= 40.0  # beside these, a 0 behind the row would have all the mass
    inputs.draft_logits -= 40.0
    want, margin = inputs.reference()
    target, tokens, draft, *others = inputs.operands()
    got = simt.kernels.speculative_step(spoiled(target), tokens, spoiled(draft), *others, threads=64)
    assert_same_step(SpeculativeStep(*got), want, margin)


def test_tokens_of_a_reduced_vocabulary_race_with_the_ids_of_the_target():
    """Rule `coupled`, whose noise draft and target share."""
    generator = torch.Generator().manual_seed(4)
    logits, d2t = torch.randn(6, 1500, generator=generator), torch.randperm(4000, generator=generator)[:1500].sort()[0]
    settings = {"seed": torch.arange(6), "position": 3, "offset": 0, "rule": "coupled", "d2t": d2t}
    drawn, expected = (draft_step(logits, SamplingParams(1.0), **settings, backend=b) for b in ("cuda", "reference"))
    assert torch.equal(drawn.tokens, expected.tokens)


@pytest.mark.parametrize("rule", ["token", "block"])
def test_a_draft_row_with_a_fault_has_no_cutoff(rule):
    """Filters compute none for it, so none may be read."""
    inputs = random_step(2, 3, 2048, top_k=20, rule=rule)
    inputs.draft_logits[:, 1] = math.nan
    want, margin = inputs.reference()
    got = simt.kernels.speculative_step(*inputs.operands(), threads=64)
    assert_same_step(SpeculativeStep(*got), want, margin)


@pytest.mark.nvcc  # compiles all kernels once more
def test_sanitizers():
    """No sanitizer, of addresses or undefined behaviour, reports a fault in steps of every rule, form of q and
    setting, nor in products of any size."""
    preloaded = subprocess.run(["g++", "-print-file-name=libasan.so"], capture_output=True, text=True, check=True)
    environment = {
        "LD_PRELOAD": preloaded.stdout.strip(),
        "ASAN_OPTIONS": "detect_leaks=0",
        "UBSAN_OPTIONS": "halt_on_error=1",
        "SPECDEC_SIMT_FLAGS": "-O1 -g1 -fsanitize=address,undefined -fno-sanitize-recover=undefined",
        "PYTHONPATH": os.pathsep.join([str(SIMT.parent), *sys.path]),
    }
    done = subprocess.run(
        [sys.executable, str(SIMT / "under_sanitizers.py")],
        env=os.environ | environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.splitlines() == ["80 steps, 90 products"]

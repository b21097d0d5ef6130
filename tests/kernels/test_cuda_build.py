"""Builds the CUDA extensions, without a GPU, for every architecture of setup.py, or for those that TORCH_CUDA_ARCH_LIST
names, as in .ci/run, which has less time. Checks ptxas' report on each kernel, undefined symbols, and that the packages
import with a torch without CUDA. Takes minutes: ``pytest -m nvcc``."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from support import ROOT
from support.ptxas import NVCC, ptxas_report

ASKED = os.environ.get("TORCH_CUDA_ARCH_LIST", "").replace(";", " ").split()
ARCHITECTURES = {f"sm_{each.removesuffix('+PTX').replace('.', '')}" for each in ASKED} or {
    "sm_80", "sm_86", "sm_89", "sm_90a", "sm_100", "sm_120",
}  # fmt: skip
NAMES = ("measure", "select", "sums", "race", "decide", "draft", "linear")
KERNELS = {f"{name}_kernel" for name in NAMES}
PACKAGES = ("specdec_kernels", "specdec_layers")

pytestmark = [pytest.mark.nvcc, pytest.mark.skipif(NVCC is None, reason="nvcc is not there")]


BUILD = """
import runpy, setuptools, sys
whole = setuptools.setup
setuptools.setup = lambda ext_modules, **more: whole(ext_modules=ext_modules[2:], **more)
sys.argv = ["setup.py", "build_ext", "--inplace"]
runpy.run_path("setup.py", run_name="__main__")
"""


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> tuple[Path, str]:
    """(a copy of the packages with the extensions, the output of the build). The C++ extensions, the first two of
    setup.py's, are copied as they were built."""
    copy = tmp_path_factory.mktemp("cuda")
    shutil.copy2(ROOT / "setup.py", copy)
    for folder in ("csrc", "specdec_kernels", "python/specdec_layers"):
        shutil.copytree(
            ROOT / folder, copy / Path(folder).name, ignore=shutil.ignore_patterns("__pycache__", "_C_cuda*")
        )
    done = subprocess.run(
        [sys.executable, "-c", BUILD],
        cwd=copy,
        env=os.environ | {"SPECDEC_CUDA": "1", "NVCC_APPEND_FLAGS": "-Xptxas -v --threads 2"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return copy, done.stdout + done.stderr


def test_registers_and_memory(built):
    """No kernel spills, has a stack or static shared memory; all architectures have the same ones."""
    reports = ptxas_report(built[1])
    names = {
        architecture: {str(k["kernel"]) for k in reports if k["architecture"] == architecture}
        for architecture in ARCHITECTURES
    }
    every = names[next(iter(ARCHITECTURES))]
    assert all(found == every for found in names.values())
    assert {re.sub(r"<.*", "", name).split("::")[-1].split()[-1] for name in every} == KERNELS
    for report in reports:
        for name in ("stack", "spill_stores", "spill_loads", "static_shared"):
            assert report[name] == 0, report


def test_no_warnings(built):
    assert not re.findall(r".*(?:ptxas warning|csrc/\S*cuda\S*: warning|csrc/\S*cuda\S* warning).*", built[1])


@pytest.mark.parametrize("package", PACKAGES)
def test_open_symbols(built, package):
    """Undefined symbols are torch's C functions, Python's and the system's only: the CUDA runtime is linked
    statically."""
    (library,) = (built[0] / package).glob("_C_cuda*.so")
    listed = subprocess.run(["nm", "-DC", "--undefined-only", library], capture_output=True, text=True, check=True)
    symbols = [line.split(maxsplit=1) for line in listed.stdout.splitlines()]
    known = re.compile(
        r"(aoti_)?torch_|_?Py|.*@(GLIBC|GLIBCXX|CXXABI|GCC)_|"  # and what of C++ has no version:
        r"((vtable|VTT|typeinfo|typeinfo name) for )?(std::|__cxxabiv1::)|__cxa_|__gxx_|operator (new|delete)"
    )
    foreign = [name for kind, name in symbols if kind != "w" and not known.match(name)]
    assert symbols and not foreign
    assert any("cuda_stream" in name for _, name in symbols)


@pytest.mark.skipif(bool(ASKED), reason="the default architectures have PTX")
@pytest.mark.parametrize("package", PACKAGES)
def test_the_ptx_serves_every_later_gpu(built, package):
    """A GPU for which there is no machine code, such as 11.0, compiles the PTX of an older one."""
    from triton.knobs import nvidia

    (library,) = (built[0] / package).glob("_C_cuda*.so")
    listed = subprocess.run([nvidia.cuobjdump.path, "-lptx", library], capture_output=True, text=True, check=True)
    assert set(re.findall(r"sm_\w+(?=\.ptx)", listed.stdout)) == {"sm_100"}, listed.stdout
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([nvidia.cuobjdump.path, "-xptx", "all", library], cwd=folder, check=True, capture_output=True)
        for source in Path(folder).iterdir():
            command = [Path(NVCC).with_name("ptxas"), "-v", "-arch=sm_110", source, "-o", os.devnull]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            for report in ptxas_report(done.stdout + done.stderr):
                assert report["stack"] == 0, report


def test_a_torch_without_cuda_imports_the_packages(built):
    import torch

    if torch.version.cuda is not None:
        pytest.skip("this torch has CUDA")
    script = """
import torch
from specdec_kernels import SamplingParams, speculative_step
import specdec_kernels.backends, specdec_layers.backends
for package in (specdec_kernels, specdec_layers):
    assert "has no CUDA" in package.backends.unavailable("cuda", "cuda")
row, drafts = torch.zeros(1, 1, 5), torch.zeros(1, 0).long()
step = speculative_step(row, drafts, None, params=SamplingParams(), seed=0, position=0)
assert 0 <= step.tokens.item() < 5
"""
    environment = os.environ | {"PYTHONPATH": str(built[0])}
    done = subprocess.run([sys.executable, "-c", script], env=environment, cwd=built[0], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr

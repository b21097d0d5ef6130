"""The stage `build` of bench/gpu.sh: what is built, when it is built again, and what the compiler reports."""

from __future__ import annotations

import time

import gpu_build
import pytest
from steps import Run


@pytest.mark.parametrize(
    "capability, built",
    [("8.0", "8.0"), ("8.7", "8.6"), ("8.9", "8.9"), ("9.0", "9.0a"), ("10.0", "10.0"), ("10.3", "10.0"),
     ("12.1", "12.0"), ("7.5", None), ("11.0", None)],
)  # fmt: skip
def test_the_device_decides_what_is_built(monkeypatch, capability, built):
    monkeypatch.delenv("TORCH_CUDA_ARCH_LIST", raising=False)
    monkeypatch.setattr(gpu_build, "gpu_query", lambda field: capability)
    assert gpu_build.architectures() == built  # of setup.py's list
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "8.6+PTX")
    assert gpu_build.architectures() == "8.6+PTX"


def test_without_a_gpu_setup_decides_what_is_built(monkeypatch):
    monkeypatch.delenv("TORCH_CUDA_ARCH_LIST", raising=False)
    for said in (None, "[N/A]"):
        monkeypatch.setattr(gpu_build, "gpu_query", lambda field, said=said: said)
        assert gpu_build.architectures() is None


PTXAS = """
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function '_ZN7specdec4cuda4stepENS0_4WorkE' for 'sm_90a'
ptxas info    : Function properties for _ZN7specdec4cuda4stepENS0_4WorkE
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 244 registers, used 1 barriers
ptxas info    : Compiling entry function 'other' for 'sm_80'
ptxas info    : Function properties for other
    64 bytes stack frame, 8 bytes spill stores, 12 bytes spill loads
ptxas info    : Function properties for _Z6helperv
    16 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 255 registers, used 1 barriers, 64 bytes cumulative stack size, 400 bytes smem, 736 bytes cmem[0]
"""


def test_ptxas_report():
    first, second = gpu_build.ptxas_report(PTXAS)
    assert "specdec" in first.pop("kernel") and second.pop("kernel") == "other"
    numbers = {"stack": 0, "spill_stores": 0, "spill_loads": 0, "registers": 244, "static_shared": 0}
    assert first == {"architecture": "sm_90a", **numbers}
    numbers = {"stack": 64, "spill_stores": 8, "spill_loads": 12, "registers": 255, "static_shared": 400}
    assert second == {"architecture": "sm_80", **numbers}
    assert gpu_build.ptxas_report("c++ -c module.cpp") == []


@pytest.fixture
def built(monkeypatch, tmp_path):
    """Builds into a folder of its own, without a compiler."""
    folder, compiled = tmp_path / "specdec_kernels", []
    folder.mkdir()

    def compile_and_copy(run, name, environment):
        compiled.append((name, environment))
        (folder / "_C.abi3.so").write_text(f"built {len(compiled)} times")
        return name not in failing

    failing: list[str] = []
    for name, value in {
        "FOLDER": folder,
        "MARK": tmp_path / "build" / "gpu.json",
        "compile_and_copy": compile_and_copy,
        "extension_problem": lambda: None,
        "gpu_query": lambda field: "9.0",
    }.items():
        monkeypatch.setattr(gpu_build, name, value)
    monkeypatch.delenv("TORCH_CUDA_ARCH_LIST", raising=False)
    monkeypatch.delenv("SPECDEC_CUDA", raising=False)
    run = Run(tmp_path / "out", time.monotonic() + 60, dry=False)
    return run, compiled, failing, folder


def test_nothing_is_built_twice_from_the_same_sources(built, monkeypatch):
    run, compiled, _, folder = built
    gpu_build.build(run)
    assert len(compiled) == 1 and compiled[0][1]["TORCH_CUDA_ARCH_LIST"] == "9.0a"
    assert "-Xptxas=-v" in compiled[0][1]["NVCC_APPEND_FLAGS"]
    gpu_build.build(run)
    assert len(compiled) == 1 and "stays" in run.record["stages"]["build"]["reason"]
    (folder / "_C.abi3.so").write_text("another one, by hand")
    gpu_build.build(run)
    assert len(compiled) == 2
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "8.0")
    gpu_build.build(run)
    assert len(compiled) == 3
    monkeypatch.setattr(gpu_build, "extension_problem", lambda: "undefined symbol")
    gpu_build.build(run)
    assert len(compiled) == 4 and "undefined symbol" in run.record["stages"]["build"]["reason"]
    assert run.failed == ["build"]


def test_without_cuda_kernels_the_rest_is_built(built):
    run, compiled, failing, _ = built
    failing.append("build")
    gpu_build.build(run)
    assert [name for name, _ in compiled] == ["build", "build without cuda"]
    assert compiled[1][1] == {"SPECDEC_CUDA": "0"} and not gpu_build.MARK.exists()


def test_the_digest_is_of_every_source(monkeypatch, tmp_path):
    for folder in ("csrc/cuda", "specdec_kernels"):
        (tmp_path / folder).mkdir(parents=True)
    source = tmp_path / "csrc" / "cuda" / "launch.h"
    source.write_text("a"), (tmp_path / "setup.py").write_text("b")
    monkeypatch.setattr(gpu_build, "ROOT", tmp_path)
    before = gpu_build.digest({})
    assert gpu_build.digest({}) == before != gpu_build.digest({"TORCH_CUDA_ARCH_LIST": "8.0"})
    source.write_text("c")
    changed = gpu_build.digest({})
    (tmp_path / "csrc" / "more.h").write_text("")
    assert len({before, changed, gpu_build.digest({})}) == 3

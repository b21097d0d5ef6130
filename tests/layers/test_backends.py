"""What ``import specdec_layers`` brings along, what is said where a backend cannot run, how kernels are launched."""

from __future__ import annotations

import inspect
import subprocess
import sys
import types

import pytest
import torch
from specdec_layers import backends, build_info, linear
from specdec_layers.backends import native, operation

from specdec_kernels.backends import native as native_of_kernels


def run(program: str) -> str:
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_import_is_light():
    """Nothing heavy comes along but torch, and nothing of sampling or models; the native operations need no Triton."""
    heavy = ("triton", "transformers", "numpy.testing", "scipy", "specdec", "specdec_kernels", "pytest")
    program = (
        "import torch, sys; before = set(sys.modules); import specdec_layers\n"
        "specdec_layers.linear(torch.zeros(1, 1, 2), torch.zeros(3, 2))\n"
        f"print([m for m in {heavy} if m in sys.modules and m not in before])"
    )
    assert run(program) == "[]"


def test_works_without_native_code():
    program = """
import sys
sys.modules["specdec_layers._C"] = None  # import raises ImportError
import torch
from specdec_layers import Program, attend, build_info, linear
q, k, seen = torch.zeros(1, 1, 1, 4), torch.ones(1, 1, 2, 4), torch.tensor([[[0, 2]]])
assert torch.equal(attend(q, k, k, seen), torch.ones(1, 1, 1, 4))
for call in (lambda: linear(q[0], k[0, 0]), Program):
    try:
        call()
    except RuntimeError as error:
        assert "the C++ extension of layers is not built" in str(error), error
    else:
        raise AssertionError("fell back")
assert "missing" in build_info()["native"]
print("fine")
"""
    assert run(program) == "fine"


def test_what_was_built():
    built = build_info()
    assert built["native"]["instruction_set"] in built["native"]["instruction_sets"]
    assert "missing" in built["native_cuda"] or built["native_cuda"]["architectures"]


def test_an_instruction_set_that_is_not_there_is_refused(monkeypatch):
    monkeypatch.setenv("SPECDEC_CPU_ISA", "sse9")
    with pytest.raises(ValueError, match="SPECDEC_CPU_ISA: got 'sse9', allowed on this machine: baseline"):
        native.missing.__wrapped__()


def test_why_there_are_no_cuda_kernels(monkeypatch):
    missing = native.missing_cuda.__wrapped__
    monkeypatch.setitem(sys.modules, "specdec_layers._C_cuda", None)  # import raises ImportError
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert missing().startswith("the CUDA extension of layers is not built or does not load")
    loaded = types.SimpleNamespace(build=lambda: "runtime=13000;architectures=9.0a")
    monkeypatch.setitem(sys.modules, "specdec_layers._C_cuda", loaded)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    for gpu, serves in (((9, 0), True), ((10, 0), False)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda i, gpu=gpu: gpu)
        assert (missing() is None) == serves
    assert "this machine has 10.0; reinstall" in missing()
    monkeypatch.setattr(torch.version, "cuda", None)
    assert missing().endswith("has no CUDA")


def test_which_gpus_kernels_serve_is_the_same_as_of_sampling():
    """The one function that stands in both packages, as neither imports the other."""
    assert inspect.getsource(native.serves) == inspect.getsource(native_of_kernels.serves)


@pytest.mark.parametrize(
    ("stem", "backend", "told"),
    [
        ("linear", "reference", "backend 'reference' has no linear"),
        (
            "rms_norm",
            "cuda",
            "backend 'cuda' has no rms_norm, only linear, norm_linear, add_linear; use 'triton' or 'auto'",
        ),
        ("linear", "cuda", "backend 'cuda' cannot run here: it runs on NVIDIA GPUs, not on cpu"),
    ],
)
def test_what_a_backend_lacks_is_named(stem, backend, told):
    with pytest.raises(RuntimeError) as raised:
        operation(stem, backend, "cpu")
    assert str(raised.value) == told


def test_tensors_without_numbers_are_refused():
    with pytest.raises(RuntimeError, match="cannot run here: it runs on CPU tensors, not meta"):
        linear(torch.zeros(1, 1, 2, device="meta"), torch.zeros(3, 2, device="meta"))
    assert backends.unavailable("reference", "meta") == "tensors on meta have no numbers"


@pytest.mark.parametrize(("hip", "family"), [(None, "nvidia"), ("6.4", "amd")])
def test_each_gpu_has_its_launches(monkeypatch, hip, family):
    from specdec_layers.backends.triton import launch

    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(launch, "family", launch.family.__wrapped__)  # without what it remembers
    device = torch.device("cuda", 0)
    for kernel, numbers in launch.WARPS.items():
        chosen, warps = launch.options(kernel, device), numbers[family]
        assert warps in (1, 2, 4, 8) and warps * (64 if family == "amd" else 32) <= 1024
        many = kernel in launch.MANY_REGISTERS and family == "nvidia"
        assert chosen == {"num_warps": warps, **({"maxnreg": 255} if many else {})}
    assert launch.registers(device, 16) == ({"maxnreg": 128} if family == "nvidia" else {})

"""What ``import specdec_kernels`` and the reference bring along, what works without the compiled extension (both in
fresh processes), and what ``auto`` chooses."""

from __future__ import annotations

import subprocess
import sys
import types

import pytest
import torch

from specdec_kernels import backends, build_info
from specdec_kernels.backends import native, operation


def run(program: str) -> str:
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


NO_NETWORK = """
import socket
def refuse(*arguments, **named): raise AssertionError("network")
socket.socket.connect = socket.getaddrinfo = socket.create_connection = refuse
"""

WITHOUT_NATIVE = """
import sys
sys.modules["specdec_kernels._C"] = None  # import raises ImportError
"""


def test_import_and_the_reference_are_light():
    """Importing brings nothing heavy along but torch, and opens no connection. Neither ``reference`` nor the operation
    that ``auto`` chooses on a CPU imports Triton."""
    heavy = ("triton", "transformers", "numpy.testing", "scipy", "specdec", "pytest", "specdec_kernels.testing")
    program = NO_NETWORK + (
        "import os; os.environ['SPECDEC_CPU_ISA'] = 'unknown'\n"  # which the first operation refuses
        "import torch, sys; before = set(sys.modules); import specdec_kernels\n"
        "del os.environ['SPECDEC_CPU_ISA']\n"
        f"print([m for m in {heavy} if m in sys.modules and m not in before])\n"
        "from specdec_kernels import SamplingParams, draft_step\n"
        "arguments = dict(seed=0, position=0, offset=0)\n"
        "draft_step(torch.zeros(2, 5), SamplingParams(), **arguments, backend='reference')\n"
        "draft_step(torch.zeros(2, 5), SamplingParams(), **arguments)\n"
        "print('triton' in sys.modules)"
    )
    assert run(program).splitlines() == ["[]", "False"]


def test_works_without_native_code():
    """``reference`` runs, ``auto`` falls back to it, and an explicit ``cpu`` and build_info say what is missing."""
    program = (
        WITHOUT_NATIVE
        + """
import torch
from specdec_kernels import SamplingParams, build_info, draft_step
arguments = dict(seed=torch.arange(2), position=0, offset=0)
wanted = draft_step(torch.zeros(2, 5), SamplingParams(), **arguments, backend="reference").tokens
assert torch.equal(draft_step(torch.zeros(2, 5), SamplingParams(), **arguments).tokens, wanted)
try:
    draft_step(torch.zeros(2, 5), SamplingParams(), **arguments, backend="cpu")
except RuntimeError as error:
    assert "'cpu'" in str(error) and "not built" in str(error), error
else:
    raise AssertionError("fell back")
assert "missing" in build_info()["native"]
print("fine")
"""
    )
    assert run(program) == "fine"


def test_a_checkout_that_hides_an_installed_extension_is_named(tmp_path, monkeypatch):
    checkout, installed = (tmp_path / name / "specdec_kernels" for name in ("checkout", "installed"))
    monkeypatch.setitem(sys.modules, "specdec_kernels._C", None)  # import raises ImportError
    monkeypatch.setattr(native, "__file__", str(checkout / "backends" / "native.py"))
    monkeypatch.setattr(sys, "path", [str(checkout.parent), str(installed.parent)])
    missing = native.missing.__wrapped__
    for folder in (installed, checkout):
        folder.mkdir(parents=True)
    assert missing().startswith("the C++ extension is not built or does not load")
    (installed / "_C.abi3.so").touch()
    told = missing()
    assert told.startswith(
        f"the C++ extension is not built in {checkout}, which hides the installed {installed}/_C.abi3"
    )
    (checkout / "_C.abi3.so").touch()  # it is built here, and does not load
    assert missing().startswith("the C++ extension is not built or does not load")


ALL = "8.0:8.6:8.9:9.0a:10.0+PTX:12.0"  # as setup.py has them


@pytest.mark.parametrize(
    ("architectures", "served", "refused"),
    [
        (ALL, ["8.0", "8.7", "9.0", "10.0", "10.3", "11.0", "12.0", "12.1", "13.0"], ["7.5"]),
        ("8.6:9.0a:10.0:12.0+PTX", ["8.6", "8.7", "9.0", "10.3", "12.1", "13.0"], ["8.0", "9.1", "11.0"]),
        ("9.0a+PTX", ["9.0"], ["8.9", "9.1", "10.0"]),
    ],
)
def test_a_gpu_that_the_kernels_were_not_built_for_is_named(monkeypatch, architectures, served, refused):
    """Then ``auto`` goes on to Triton, where a launch would have failed."""
    built = types.SimpleNamespace(build=lambda: f"runtime=13000;architectures={architectures}")
    monkeypatch.setitem(sys.modules, "specdec_kernels._C_cuda", built)
    monkeypatch.setattr(torch.version, "cuda", "13.0")

    def missing(*gpus: str) -> str | None:
        monkeypatch.setattr(torch.cuda, "device_count", lambda: len(gpus))
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda i: tuple(map(int, gpus[i].split("."))))
        return native.missing_cuda.__wrapped__()

    assert [gpu for gpu in (*served, *refused) if missing(gpu) is None] == served
    assert missing() is None and missing(*refused, served[0]) is None
    told = missing(*refused)
    assert f"this machine has {', '.join(refused)}; reinstall" in told and architectures.split(":")[0] in told


def test_auto_prefers_native_code():
    """The dispatcher says that the native operation runs."""
    assert operation("draft_step", "auto", "cpu").name() == "specdec_kernels::draft_step"


@pytest.mark.parametrize(
    ("able", "chosen"),
    [(("cuda", "triton"), ""), (("triton",), "_triton"), ((), "_reference"), (("cpu",), "_reference")],
)
def test_auto_on_a_gpu(monkeypatch, able, chosen):
    able = (*able, "reference")
    monkeypatch.setattr(backends, "unavailable", lambda name, device: None if name in able else f"no {name}, {device}")
    choose = backends._suffix
    assert choose("draft_step", "auto", "cuda") == chosen
    assert choose("verify_tree", "auto", "cuda") == (chosen or "_triton")  # CUDA has no trees
    with pytest.raises(RuntimeError, match="'cuda' has no verify_tree, only draft_step, speculative_step;"):
        choose("verify_tree", "cuda", "cuda")
    if "cuda" not in able:
        with pytest.raises(RuntimeError, match="backend 'cuda' cannot run here: no cuda, cuda"):
            choose("draft_step", "cuda", "cuda")


def test_why_there_are_no_cuda_kernels(monkeypatch):
    missing = native.missing_cuda.__wrapped__
    monkeypatch.setitem(sys.modules, "specdec_kernels._C_cuda", None)  # import raises ImportError
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert missing().startswith("the CUDA extension is not built or does not load")
    loaded = types.SimpleNamespace(build=lambda: "architectures=9.0a")
    monkeypatch.setitem(sys.modules, "specdec_kernels._C_cuda", loaded)
    assert missing() is None
    monkeypatch.setattr(torch.version, "cuda", None)
    assert missing().endswith("has no CUDA")


def test_build_info_lists_every_backend():
    info = build_info()
    listed = sorted(b["backend"] for b in info["backends"] if b["device"] == "cpu")
    assert listed == ["cpu", "cuda", "reference", "triton"]
    assert info["torch"] and info["python"]

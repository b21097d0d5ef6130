"""What ``import specdec_kernels`` brings along, and what works without the compiled extension: in fresh processes."""

from __future__ import annotations

import subprocess
import sys


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


def test_import_is_light():
    heavy = ("triton", "transformers", "numpy.testing", "scipy", "specdec", "pytest", "specdec_kernels.testing")
    program = NO_NETWORK + (
        "import os; os.environ['SPECDEC_CPU_ISA'] = 'unknown'; "  # which the first operation refuses
        "import torch, sys; before = set(sys.modules); import specdec_kernels; "
        f"print([m for m in {heavy} if m in sys.modules and m not in before])"
    )
    assert run(program) == "[]"


def test_reference_imports_no_triton():
    program = """
import sys, torch
from specdec_kernels import SamplingParams, draft_step
draft_step(torch.zeros(2, 5), SamplingParams(), seed=0, position=0, offset=0, backend="reference")
draft_step(torch.zeros(2, 5), SamplingParams(), seed=0, position=0, offset=0)
print("triton" in sys.modules)
"""
    assert run(program) == "False"


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


def test_auto_prefers_native_code():
    """The dispatcher says that the native operation runs."""
    program = """
import torch
from specdec_kernels.backends import operation
print(operation("draft_step", "auto", "cpu").name())
"""
    assert run(program) == "specdec_kernels::draft_step"


def test_build_info_lists_every_backend():
    program = """
from specdec_kernels import build_info
info = build_info()
print(sorted(b["backend"] for b in info["backends"] if b["device"] == "cpu"), all(info[k] for k in ("torch", "python")))
"""
    assert run(program) == "['cpu', 'cuda', 'reference', 'triton'] True"

"""What only Triton has: it compiles ahead of time for every GPU that it serves, and launches as often as it says.

Its numerics are in every other test, in the interpreter where there is no GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from specdec_kernels import draft_step
from specdec_kernels.testing import device_of, random_step

TARGETS = {"sm_80": "cuda 80 32", "sm_90": "cuda 90 32", "sm_100": "cuda 100 32", "gfx942": "hip gfx942 64"}
KERNELS = ("draft_stats_kernel", "draft_draw_kernel", "row_stats_kernel", "residual_kernel", "draw_kernel")


@pytest.mark.parametrize("target", TARGETS)
def test_compiles_ahead_of_time(target, tmp_path):
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("compile_triton.py")), *TARGETS[target].split()],
        env=environment | {"TRITON_CACHE_DIR": str(tmp_path)}, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    assert {line.split()[0] for line in done.stdout.splitlines()} == set(KERNELS)


def test_launches(monkeypatch):
    """draft_step 2, speculative_step 3, whatever B, K and V; none for an empty batch."""
    from specdec_kernels.backends.triton import draft_step as draft_module
    from specdec_kernels.backends.triton import speculative_step as step_module

    launched: list[str] = []

    class Counting:
        def __init__(self, name, kernel):
            self.name, self.kernel = name, kernel

        def __getitem__(self, grid):
            launched.append(self.name)
            return self.kernel[grid]

    for name in KERNELS:
        module = draft_module if name.startswith("draft") else step_module
        monkeypatch.setattr(module, name, Counting(name, getattr(module, name)))

    inputs = random_step(2, 2, 1300, temperature=(0.0, 1.0))
    device = device_of("triton")
    logits, seed, position = (t.to(device) for t in (inputs.draft_logits[:, 0], inputs.seed, inputs.position))
    draft_step(logits, inputs.params, seed=seed, position=position, offset=0, backend="triton")
    assert launched == list(KERNELS[:2])
    inputs.run("triton")
    assert launched[2:] == list(KERNELS[2:])
    inputs.map(lambda t: t[:0]).run("triton")
    assert len(launched) == 5


def test_auto_does_not_interpret():
    """The interpreter serves tests; ``auto`` on CPU tensors never takes it."""
    from specdec_kernels.backends import operation

    assert "triton" not in str(operation("draft_step", "auto", "cpu"))

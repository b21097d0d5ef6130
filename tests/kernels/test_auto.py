"""``auto`` takes what was measured to be the fastest."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from specdec_kernels.backends import OF_CUDA

GOALS = Path(__file__).resolve().parents[2] / "bench" / "results" / "h200" / "goals.json"
ROWS = json.loads(GOALS.read_text())["rows"]


@pytest.mark.parametrize("row", ROWS, ids=[f"{row['goal']}-{row['drafts']}" for row in ROWS])
def test_steps_on_an_nvidia_gpu(row):
    """Of the backends that a GPU has, in every case with a goal; where nothing was measured, it is Triton."""
    medians = {backend: row["seconds"][f"{backend}+stats [cold]"]["median"] for backend in ("cuda", "triton")}
    fastest = min(medians, key=lambda backend: medians[backend])
    assert (fastest == "cuda") == ("speculative_step" in OF_CUDA)

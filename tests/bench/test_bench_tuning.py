"""bench/tune_triton.py: what it times and proposes."""

from __future__ import annotations

import pytest
import torch
import tune_triton
from cases import Shape, StepInputs
from support.benches import run_main

CPU = torch.device("cpu")


@pytest.mark.skipif(torch.cuda.is_available(), reason="it says so where there is no GPU")
def test_tuning_needs_a_gpu():
    done = run_main(tune_triton)
    assert done.exit_code == 2 and "finds no GPU" in done.output


def test_tuning_times_candidates_beside_the_table():
    inputs = StepInputs(Shape(1, 1, 30, "float32"), "typical", 1.0, CPU, 1)
    row = tune_triton.measure_kernel("decide_draft_kernel", inputs, (2,), 0.0)
    assert row["seconds"].keys() == row["ratios"].keys() == {"2", str(row["usual"])} and row["unavailable"] == {}
    assert row["ratios"][str(row["usual"])]["median"] == 1


def test_tuning_proposes_what_is_fastest_over_all_shapes():
    rows = [
        {"kernel": "race_kernel", "ratios": {name: {"median": value} for name, value in medians.items()}}
        for medians in ({"2": 0.5, "4": 1.0, "8": 0.9}, {"2": 3.0, "4": 1.0, "8": 0.9}, {"4": 1.0, "8": 1.1, "16": 0.1})
    ]
    assert tune_triton.proposal(rows) == {"race_kernel": 8}

"""Counts what the goals' steps do: the CUDA kernels run on a CPU, their threads as fibers (tests/simt/), in the launch
that a GPU would get."""

from __future__ import annotations

import dataclasses
import math
import sys
from functools import cache

import report
import torch
from cases import GOALS, Case, StepInputs
from predicted_times import BYTES, Launch, Work, step_seconds
from specdec.evaluation.gpus import Gpu

from specdec_kernels import testing

# As tests/simt/plans.py names the machines that launches are planned for.
MACHINE_OF = {"sm_80": "A100", "sm_90a": "H200", "sm_100": "B200", "sm_120": "sm_120"}

SPLIT_WARPS, SPLIT_RESIDENT = 8, 1 << 30  # of a split launch, whose blocks wait for no others

SETS = 8  # of logits, of which a typical one is chosen
CASES = {case.name: case for case in GOALS if case.launches == "planned"}


@cache
def typical(goal: str) -> testing.StepInputs:
    """One sequence of the goal, of whose drafts one is rejected, and about as many are accepted as of all."""
    case = CASES[goal]
    shape = dataclasses.replace(case.shape, B=1)
    inputs = StepInputs(shape, "typical", case.temperature, torch.device("cpu"), SETS)
    inputs = inputs.with_settings(case.filters, case.rule)
    accepted = inputs.num_accepted("cpu").tolist()
    mean = sum(accepted) / len(accepted)
    rejecting = [i for i in range(len(accepted)) if accepted[i] < shape.K]
    call = min(rejecting, key=lambda i: abs(accepted[i] - mean))
    n = call % inputs.sets
    return testing.StepInputs(
        inputs.target[n], inputs.tokens[n], inputs.draft[n], inputs.params, inputs.seed[n], inputs.position[call],
        draft_stats=(inputs.cutoff[n], inputs.lse[n]), rule=case.rule,
    )  # fmt: skip


def launch_of(case: Case, gpu: Gpu) -> tuple[Launch, dict[str, int]]:
    """(the launch, what tells the fibers of it)."""
    from simt.plans import MACHINES, plan

    machine, (B, K, V) = MACHINES[MACHINE_OF[gpu.architecture]], (case.shape.B, case.shape.K, case.shape.V)
    rule = {"token": 0, "block": 1}[case.rule]
    made = plan(MACHINE_OF[gpu.architecture], B, K, V, case.shape.dtype, rule, filters=int(bool(case.filters)))
    if made.blocks == 0:
        items = (K + 1) * math.ceil(V / 1024)
        blocks = min(math.ceil(machine.multiprocessors / B), math.ceil(items / SPLIT_WARPS))
        launch = Launch(2, blocks, 1, SPLIT_WARPS, SPLIT_RESIDENT, 1)
        return launch, {"blocks": -blocks, "threads": 32 * SPLIT_WARPS, "slots": 0}
    sharing = 2 if B > machine.multiprocessors else 1
    launch = Launch(1, made.blocks, made.blocks, made.threads // 32, sharing * machine.places[made.blocks], sharing)
    grid = {"blocks": made.blocks, "threads": made.threads}
    if made.by_rows:  # the fibers are told the slots beyond those that a decision needs
        near = (2 if case.rule == "block" else 1) * math.ceil(math.ceil(V / 1024) / (made.blocks * launch.warps))
        return launch, {**grid, "ahead": made.num_slots - near}
    return launch, {**grid, "slots": made.num_slots}


@cache
def work_of(goal: str, split: bool, **grid: int) -> Work:
    """Runs a sequence. All that it reads counts as measured if it is decided row by row."""
    from simt import kernels

    kernels.take_counts()
    kernels.speculative_step(*typical(goal).operands(), **grid)
    counts, shape = kernels.take_counts(), CASES[goal].shape
    measured, measured_bytes = (shape.K + 1) * math.ceil(shape.V / 1024), (shape.K + 1) * shape.row_bytes
    read, looked_at = counts.copied + counts.from_device, (counts.from_device + counts.from_shared) // BYTES
    if "ahead" in grid:
        measured, measured_bytes = looked_at, read
    return Work(
        measured,
        measured_bytes,
        max(0, read - measured_bytes),
        max(0, looked_at - measured),
        0 if split else counts.cluster_barriers,  # without clusters they are of a block
        counts.block_barriers + (counts.cluster_barriers if split else 0),
        counts.additions,
    )


def predictions(gpu: Gpu, instructions: dict[str, int]) -> list[dict[str, object]]:
    """A row for each goal. ``instructions``: for a block of logits, by where it comes from."""
    sys.path.append(str(report.ROOT / "tests"))  # where the fibers are
    rows = []
    for case in CASES.values():
        launch, grid = launch_of(case, gpu)
        work = work_of(case.name, launch.launches == 2, **grid)
        stays = grid.get("slots", 0) * launch.measuring * launch.warps >= work.measured
        origin = "in place" if launch.launches == 2 else "rows" if "ahead" in grid else "stay" if stays else "ring"
        each = instructions[origin]
        rows.append(
            {
                "goal": case.name, "gpu": gpu.name, "launch": dataclasses.asdict(launch), "origin": origin,
                "work": dataclasses.asdict(work), "instructions": each,
                "seconds": step_seconds(gpu, case.shape.B, launch, work, each),
            }
        )  # fmt: skip
    return rows

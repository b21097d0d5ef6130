r"""Runs the step of a goal a few times, for a profiler to watch.

    ncu --kernel-name "regex:measure_kernel|decide_kernel" --launch-skip 8 --launch-count 2 \
        python bench/watched_step.py latency --device cuda
"""

from __future__ import annotations

from typing import Annotated

import report
import typer
from cases import GOALS, StepInputs, rows_of
from measure import synchronize

STEPS = 6


def main(
    goal: Annotated[str, typer.Argument(help=f"one of {', '.join(case.name for case in GOALS)}")],
    device: report.DeviceName = "cpu",
    quick: report.Quick = False,
) -> None:
    """Runs a goal's step, each time on other inputs."""
    report.read_names("goal", goal, [case.name for case in GOALS])
    (case,) = (case for (case,) in rows_of("goals", None, None, quick) if case.name == goal)
    where = report.read_device(device)
    inputs = StepInputs(case.shape, "typical", case.temperature, where, STEPS).with_settings(case.filters, case.rule)
    step = inputs.ours(where.type, stats=True)
    for i in range(STEPS):
        step(i)
    synchronize(where)


if __name__ == "__main__":
    typer.run(main)

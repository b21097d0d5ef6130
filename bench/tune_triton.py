"""Times other numbers of warps than those of Triton's launch tables, on this GPU, and proposes a table; changes none.

python bench/tune_triton.py --json bench/results/tune_triton.json
"""

from __future__ import annotations

import functools
import itertools
import statistics
from collections.abc import Callable
from typing import Annotated

import torch
import typer
from cases import Shape
from measure import Method, interleave, prepare, ratios, summary
from options import JsonPath, Quick, read_device, read_integers, reading
from report import Report, show_table, terminal
from step_inputs import MOST_SETS, StepInputs

from specdec_kernels import draft_step

FILTERS = {"top_k": 50, "top_p": 0.95}
SETTINGS = {  # kernel: whether of a draft, filters and rule of a call that launches it
    "stats_kernel": (False, {}, "token"),
    "residual_kernel": (False, {}, "token"),
    "filter_kernel": (False, FILTERS, "token"),
    "race_kernel": (False, {}, "coupled"),
    "draft_draw_kernel": (True, {}, "token"),
    "draft_race_kernel": (True, {}, "coupled"),
    "compact_draw_kernel": (True, FILTERS, "token"),
}


def call_of(kernel: str, inputs: StepInputs) -> Callable[[int], object]:
    """A whole operation that launches this kernel, as single kernels are not what anyone waits for."""
    drafting, filters, rule = SETTINGS[kernel]
    inputs, compact = inputs.with_settings(filters, rule), 64 if kernel == "compact_draw_kernel" else 0

    def draft(i: int):
        n = i % inputs.sets
        return draft_step(
            inputs.draft[n][:, 0], inputs.params, seed=inputs.seed[n], position=inputs.position[i], offset=0,
            rule=rule, backend="triton", compact=compact,
        )  # fmt: skip

    return draft if drafting else inputs.ours("triton", stats=rule != "coupled")


def measure_kernel(kernel: str, inputs: StepInputs, candidates: list[int], seconds: float) -> dict[str, object]:
    from specdec_kernels.backends.triton import tables

    device, run = inputs.target.device, call_of(kernel, inputs)
    usual = tables.options(kernel, device, False)["num_warps"]

    def with_warps(i: int, num_warps: int):
        with tables.using(kernel, num_warps):
            return run(i)

    numbers = sorted({usual, *candidates})
    methods = [Method(str(n), functools.partial(with_warps, num_warps=n), inputs.calls) for n in numbers]
    methods, unavailable = prepare(methods, device, seconds)
    # Where a graph can be had, Python's overhead would only hide differences.
    form = "cold" if any(m.timing == "cold" for m in methods) else "call"
    methods = [m for m in methods if m.timing == form]
    samples = interleave(methods, device, seconds)
    found = {m.name: samples[m.key] for m in methods}
    return {
        "kernel": kernel,
        "usual": usual,
        "timing": form,
        "seconds": {name: summary(values) for name, values in found.items()},
        "ratios": {name: ratios(values, found[str(usual)]) for name, values in found.items()},
        "unavailable": unavailable,
    }


def proposal(rows: list[dict]) -> dict[str, int]:
    """For each kernel the number with the least geometric mean over shapes of its time over the table's, of those that
    ran on every shape."""
    proposed = {}
    for kernel, group in itertools.groupby(sorted(rows, key=lambda row: row["kernel"]), lambda row: row["kernel"]):
        found = [{name: ratio["median"] for name, ratio in row["ratios"].items()} for row in group]
        everywhere = set.intersection(*(set(medians) for medians in found))
        proposed[kernel] = int(min(everywhere, key=lambda n: statistics.geometric_mean(m[n] for m in found)))
    return proposed


def main(
    batches: Annotated[str, typer.Option("--batches", "-B")] = "1,8,32",
    vocabularies: Annotated[str, typer.Option("--vocabularies", "-V")] = "128256,32000,151936",
    num_drafts: Annotated[int, typer.Option("--num-drafts", "-K", min=1)] = 5,
    warps: Annotated[str, typer.Option(help="the numbers to try")] = "1,2,4,8,16",
    seconds: Annotated[float, typer.Option(min=0, help="a row, at least 5 rounds")] = 1.0,
    quick: Quick = False,
    json_path: JsonPath = None,
) -> None:
    """Times each kernel's candidates in a call that launches it; the options list shapes."""
    with reading():
        if not torch.cuda.is_available():
            raise ValueError("tune_triton needs a GPU, and torch finds none here")
        device = read_device("cuda")
        candidates = read_integers("warps", warps)
        sizes = read_integers("vocabularies", vocabularies), read_integers("batches", batches)
    report = Report("tune_triton", device, json_path, quick=quick)
    for V, B in itertools.product(*sizes):
        inputs = StepInputs(Shape(B, num_drafts, V, "bfloat16"), "typical", 1.0, device, 4 if quick else MOST_SETS)
        for kernel in SETTINGS:
            report.add({"B": B, "K": num_drafts, "V": V} | measure_kernel(kernel, inputs, candidates, seconds))
    report.content["proposed"] = proposed = proposal(report.rows)
    report.finish()
    usual = {row["kernel"]: row["usual"] for row in report.rows}
    rows = [{"kernel": kernel, "warps_now": usual[kernel], "proposed": proposed[kernel]} for kernel in SETTINGS]
    show_table(terminal(), torch.cuda.get_device_name(device), rows, ("kernel", "warps_now", "proposed"))


if __name__ == "__main__":
    typer.run(main)

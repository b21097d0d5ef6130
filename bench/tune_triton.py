"""Times other numbers of warps than those of Triton's launch tables, on this GPU, and proposes a table; changes none.

python bench/tune_triton.py --json bench/results/tune_triton.json
"""

from __future__ import annotations

import statistics
from collections.abc import Callable

import report
import torch
import typer
from cases import MOST_SETS, Shape, StepInputs
from measure import Method, interleave, prepare, ratios, summary

from specdec_kernels import draft_step

SHAPES = [Shape(B, 5, V, "bfloat16") for V in (128256, 32000, 151936) for B in (1, 8, 32)]
WARPS, SECONDS = (1, 2, 4, 8, 16), 1.0  # a row, at least 5 rounds
FILTERS = {"top_k": 50, "top_p": 0.95}
SETTINGS = {  # kernel: whether of a draft, filters and rule of a call that launches it
    "measure_kernel": (False, {}, "token"),
    "decide_kernel": (False, {}, "token"),
    "select_kernel": (False, FILTERS, "token"),
    "select_flat_kernel": (False, {"top_p": 0.95}, "token"),
    "sums_kernel": (False, {}, "block"),
    "race_kernel": (False, FILTERS, "coupled"),
    "decide_draft_kernel": (True, {}, "token"),
}


def call_of(kernel: str, inputs: StepInputs) -> Callable[[int], object]:
    """A whole operation that launches this kernel, as single kernels are not what anyone waits for."""
    drafting, filters, rule = SETTINGS[kernel]
    inputs = inputs.with_settings(filters, rule)

    def draft(i: int):
        n = i % inputs.sets
        at = {"seed": inputs.seed[n], "position": inputs.position[i], "offset": 0}
        return draft_step(inputs.draft[n][:, 0], inputs.params, **at, rule=rule, backend="triton")

    return draft if drafting else inputs.ours("triton", stats=rule != "coupled")


def measure_kernel(kernel: str, inputs: StepInputs, candidates: tuple[int, ...], seconds: float) -> dict[str, object]:
    from specdec_kernels.backends.triton import kinds, tables

    device, run = inputs.target.device, call_of(kernel, inputs)
    usual = tables.options(kernel, device, False)["num_warps"]

    def with_warps(i: int, num_warps: int):
        with kinds.using(kernel, num_warps):
            return run(i)

    methods = [Method(str(n), lambda i, n=n: with_warps(i, n), inputs.calls) for n in sorted({usual, *candidates})]
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
    for kernel in {row["kernel"] for row in rows}:
        found = [{n: ratio["median"] for n, ratio in row["ratios"].items()} for row in rows if row["kernel"] == kernel]
        everywhere = set.intersection(*(set(medians) for medians in found))
        proposed[kernel] = int(min(everywhere, key=lambda n: statistics.geometric_mean(m[n] for m in found)))
    return proposed


def main(quick: report.Quick = False, json_path: report.JsonPath = None) -> None:
    """Times each kernel's candidates in a call that launches it."""
    device = report.read_device("cuda")
    results = report.Report("tune_triton", device, json_path, None, quick=quick)
    for shape in SHAPES:
        inputs = StepInputs(shape, "typical", 1.0, device, 4 if quick else MOST_SETS)
        for kernel in SETTINGS:
            results.add({"B": shape.B, "K": shape.K, "V": shape.V} | measure_kernel(kernel, inputs, WARPS, SECONDS))
    results.content["proposed"] = proposed = proposal(results.rows)
    results.finish()
    rows = [{**row, "proposed": proposed[row["kernel"]]} for row in results.rows[: len(SETTINGS)]]
    results.show(torch.cuda.get_device_name(device), rows, ("kernel", "usual", "proposed"))


if __name__ == "__main__":
    typer.run(main)

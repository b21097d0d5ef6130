"""Compares backends with the reference on random cases: tokens, counts, status, and statistics up to rounding.

    python bench/compare_backends.py --device cuda --backends cuda --cases 100000 --seconds 120

A case is one sequence of one ``speculative_step`` or ``draft_step``. The reference runs where the logits are; ``cpu``
takes part in a share of the steps on a GPU as well, as tokens are the same everywhere but for near-ties. Ends with exit
code 1 at the first disagreement, and prints the command that shows it again.
"""

from __future__ import annotations

import dataclasses
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import torch
import typer
from options import Device, JsonPath, read_device, read_names, reading
from random_cases import Case, Limits, random_case
from report import Report

from specdec_kernels import DraftStep, SpeculativeStep, draft_step, speculative_step
from specdec_kernels.testing import StepInputs, assert_same_draft, assert_same_step

# Of the cases, how many near-ties may go the other way; and a few, so that short runs do not fail by chance.
NEAR_TIES_ALLOWED, NEAR_TIES_FREE = 2e-3, 5


def step_of(backend: str, inputs: StepInputs) -> SpeculativeStep:
    """``speculative_step`` where the tensors are."""
    return speculative_step(**{f.name: getattr(inputs, f.name) for f in dataclasses.fields(inputs)}, backend=backend)


def draft_of(backend: str, inputs: StepInputs, logits: torch.Tensor, offset: int, compact: int) -> DraftStep:
    return draft_step(
        logits, inputs.params, seed=inputs.seed, position=inputs.position, offset=offset, rule=inputs.rule,
        table=inputs.table, drafts=inputs.draft_tokens, d2t=inputs.d2t, compact=compact, backend=backend,
    )  # fmt: skip


def moved(results: tuple, device: torch.device) -> tuple:
    return type(results)(*(None if t is None else t.to(device) for t in results))


class Comparison:
    """Counts of what was compared with one backend."""

    def __init__(self, backend: str, device: torch.device, share: int):
        self.backend, self.device, self.share = backend, device, share  # one case in ``share``
        self.cases = self.near_ties = 0
        self.counts: dict[str, Counter] = {}

    def takes(self, number: int) -> bool:
        return number % self.share == 0

    def compare(self, case: Case, expected: SpeculativeStep, margin: torch.Tensor) -> None:
        """
        Raises:
            AssertionError: results differ beyond near-ties.
        """
        where = margin.device  # results come to where the reference's are
        got = moved(step_of(self.backend, case.inputs.to(self.device)), where)
        near = assert_same_step(got, expected, margin, "speculative_step")
        for i, d in enumerate(case.drawings):
            inputs, logits = d.inputs.to(self.device), d.logits.to(self.device)
            drawn = moved(draft_of(self.backend, inputs, logits, d.offset, d.compact), where)
            name = f"draft_step number {i}"
            near += assert_same_draft(drawn, d.expected, d.margin, d.inputs, d.logits, d.offset, name)
        cases = len(margin) * (1 + len(case.drawings))
        self.cases, self.near_ties = self.cases + cases, self.near_ties + near
        for name, value in case.traits.items():
            self.counts.setdefault(name, Counter())[value] += cases

    @property
    def too_many_near_ties(self) -> bool:
        return self.near_ties > max(NEAR_TIES_FREE, NEAR_TIES_ALLOWED * self.cases)

    def row(self) -> dict[str, object]:
        counts = {name: dict(sorted(counter.items())) for name, counter in self.counts.items()}
        return {"backend": self.backend, "cases": self.cases, "near_ties": self.near_ties, "counts": counts}


def describe(case: Case) -> str:
    """What a reader wants to know of a case before running it."""
    batch, rows, vocabulary = case.inputs.target_logits.shape
    traits = " ".join(f"{name}={value}" for name, value in case.traits.items())
    strides = f"target strides {case.inputs.target_logits.stride()}"
    return f"B={batch} K={rows - 1} V={vocabulary} {traits} {strides} ragged={case.structure.ragged}"


def run(
    comparisons: list[Comparison],
    device: torch.device,
    limits: Limits,
    first: int,
    variants: int,
    ended: Callable[[int], bool],
) -> tuple[int, str | None]:
    """Compares the cases first, first + 1, ... until ``ended(how many are done)``. Returns how many were right, and
    what differs in the next, in words; None: nothing."""
    done = 0
    while not ended(done):
        number = first + done
        case = random_case(number, device, limits, variants)
        expected, margin = case.inputs.reference()
        for comparison in comparisons:
            if not comparison.takes(number):
                continue
            try:
                comparison.compare(case, expected, margin)
            except Exception as error:  # a crash is a disagreement, too
                kind = "" if isinstance(error, AssertionError) else f"{type(error).__name__}: "
                return done, f"step {number}, backend {comparison.backend}: {kind}{error}\n{describe(case)}"
        done += 1
    return done, None


def main(
    device: Device = "cpu",
    backends: Annotated[str | None, typer.Option(help="default: cpu; on a GPU cuda,cpu")] = None,
    cases: Annotated[int, typer.Option(min=1, help="sequences that each backend is to be compared on")] = 100_000,
    seconds: Annotated[float, typer.Option(min=0, help="at most so long; 0: no limit")] = 0.0,
    first: Annotated[int, typer.Option(min=0, help="number of the first step")] = 0,
    steps: Annotated[int, typer.Option(min=0, help="at most so many; 0: no limit")] = 0,
    variants: Annotated[int, typer.Option(min=0, help="rules, dtypes, forms: so many mixes; 0: any")] = 0,
    max_vocabulary: Annotated[int, typer.Option(min=1)] = 200_000,
    max_logits: Annotated[int | None, typer.Option(min=1, help="of B (K+1) V; default: 2^14, on a GPU 2^22")] = None,
    cpu_share: Annotated[int, typer.Option(min=1, help="cpu on a GPU: one step in so many")] = 8,
    json_path: JsonPath = None,
) -> None:
    """Compares backends with the reference on random cases."""
    with reading():
        where = read_device(device)
        on_gpu = where.type == "cuda"
        names = read_names("backends", backends or ("cuda,cpu" if on_gpu else "cpu"), ("cpu", "triton", "cuda"))
    limits = Limits(max_vocabulary, 1024 if on_gpu else 32, max_logits or (1 << 22 if on_gpu else 1 << 14))
    comparisons = [
        Comparison(n, torch.device("cpu") if n == "cpu" else where, cpu_share if n == "cpu" and on_gpu else 1)
        for n in names
    ]
    start = time.monotonic()
    settings = {"limits": dataclasses.asdict(limits), "first": first, "variants": variants, "cases_wanted": cases}
    report = Report("compare", where, json_path, **settings)
    leading = min(comparisons, key=lambda c: c.share)

    def write(done: int, **more: object) -> None:
        report.replace([c.row() for c in comparisons], steps=done, seconds=round(time.monotonic() - start, 1), **more)

    def ended(done: int) -> bool:
        if done % 20 == 0:  # a run that is cut short leaves what it has
            write(done)
        late = seconds > 0 and time.monotonic() - start > seconds
        return late or leading.cases >= cases or 0 < steps <= done

    done, different = run(comparisons, where, limits, first, variants, ended)
    crowded = ", ".join(c.backend for c in comparisons if c.too_many_near_ties)
    write(done, disagreement=different or (f"too many near-ties: {crowded}" if crowded else None))
    for c in comparisons:
        print(f"{c.backend}: {c.cases} cases of {cases} wanted, {c.near_ties} near-ties, {done} steps")
    if different is not None:
        again = f"--device {device} --backends {','.join(names)} --first {first + done} --steps 1 --variants {variants}"
        sizes = f"--max-vocabulary {max_vocabulary} --max-logits {limits.logits} --cpu-share 1"
        print(f"DIFFERENT: {different}\nagain: python bench/{Path(__file__).name} {again} {sizes}")
    elif crowded:
        print(f"DIFFERENT: too many near-ties that went the other way: {crowded}")
    else:
        return report.finish()
    raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)

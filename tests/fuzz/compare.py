"""Compares backends with the reference on random cases: tokens, counts, status, and statistics up to rounding.

    python -m tests.fuzz --device cuda --backends cuda --cases 100000 --seconds 120

A case is one sequence of one ``speculative_step`` or ``draft_step``. The reference runs on the device of the logits. On
a GPU the backend ``cpu`` takes part in a share of the steps, as all backends return the same tokens but for near-ties.
Step numbers decide everything, so a run that was cut short goes on with ``--first``. A disagreement is printed with the
command that shows it again; after the first one, or ``--disagreements`` of them, the run ends with exit code 1.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import torch
import typer

from specdec_kernels import DraftStep, SpeculativeStep, draft_step, speculative_step
from specdec_kernels.testing import StepInputs, assert_same_draft, assert_same_step

from .options import read_backends, read_device
from .random_cases import Case, Limits, random_case

# This share of cases may be near-ties that went the other way; a few are free, so that no short run fails by chance.
NEAR_TIES_ALLOWED, NEAR_TIES_FREE = 2e-3, 5


def step_of(backend: str, inputs: StepInputs) -> SpeculativeStep:
    """``speculative_step`` on the device of the tensors."""
    return speculative_step(**{f.name: getattr(inputs, f.name) for f in dataclasses.fields(inputs)}, backend=backend)


def draft_of(backend: str, inputs: StepInputs, logits: torch.Tensor, offset: int) -> DraftStep:
    return draft_step(
        logits, inputs.params, seed=inputs.seed, position=inputs.position, offset=offset, rule=inputs.rule,
        table=inputs.table, drafts=inputs.draft_tokens, d2t=inputs.d2t, backend=backend,
    )  # fmt: skip


def moved(results: tuple, device: torch.device) -> tuple:
    return type(results)(*(None if t is None else t.to(device) for t in results))


class Comparison:
    """Counts what was compared with one backend, which takes one step in ``share``."""

    def __init__(self, backend: str, device: torch.device, share: int):
        self.backend, self.device, self.share = backend, device, share
        self.cases = self.near_ties = 0
        self.counts: dict[str, Counter] = {}

    def compare(self, case: Case, expected: SpeculativeStep, margin: torch.Tensor) -> None:
        """
        Raises:
            AssertionError: results differ by more than near-ties.
        """
        device = margin.device  # where the reference ran
        got = moved(step_of(self.backend, case.inputs.to(self.device)), device)
        near = assert_same_step(got, expected, margin, "speculative_step")
        for i, d in enumerate(case.drawings):
            inputs, logits = d.inputs.to(self.device), d.logits.to(self.device)
            drawn = moved(draft_of(self.backend, inputs, logits, d.offset), device)
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
    """One line that says what a case is."""
    batch, rows, vocabulary = case.inputs.target_logits.shape
    traits = " ".join(f"{name}={value}" for name, value in case.traits.items())
    strides = f"target strides {case.inputs.target_logits.stride()}"
    return f"B={batch} K={rows - 1} V={vocabulary} {traits} {strides} ragged={case.structure.ragged}"


def usable(device: torch.device) -> bool:
    """Whether the device still works. After a fault in a kernel no later call of the process does."""
    try:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    except RuntimeError:
        return False
    return True


def run(
    comparisons: list[Comparison],
    device: torch.device,
    limits: Limits,
    first: int,
    variants: int,
    ended: Callable[[int], bool],
    differs: Callable[[int, str], None],
) -> int:
    """Compares the cases first, first + 1, ... until ``ended(how many are done)`` or the device is of no use any more.
    ``differs(step, in words)`` is told of disagreements. Returns how many steps were compared."""
    done = 0
    while not ended(done):
        number = first + done
        case = random_case(number, device, limits, variants)
        expected, margin = case.inputs.reference()
        for comparison in comparisons:
            if number % comparison.share:
                continue
            try:
                comparison.compare(case, expected, margin)
            except Exception as error:  # a crash is a disagreement, too
                kind = "" if isinstance(error, AssertionError) else f"{type(error).__name__}: "
                told = f"step {number}, backend {comparison.backend}: {kind}{error}"
                differs(number, f"{told}\n{describe(case)}")
                if not usable(device):
                    return done + 1
        done += 1
    return done


def main(
    device: Annotated[str, typer.Option(help="cpu or cuda")] = "cpu",
    backends: Annotated[str | None, typer.Option(help="default: cpu; on a GPU cuda,cpu")] = None,
    cases: Annotated[int, typer.Option(min=1, help="sequences that each backend is compared on")] = 100_000,
    seconds: Annotated[float, typer.Option(min=0, help="time budget; 0: no limit")] = 0.0,
    first: Annotated[int, typer.Option(min=0, help="number of the first step")] = 0,
    steps: Annotated[int, typer.Option(min=0, help="at most so many; 0: no limit")] = 0,
    variants: Annotated[int, typer.Option(min=0, help="mixes of rule, dtypes and form of q; 0: any")] = 0,
    max_vocabulary: Annotated[int, typer.Option(min=1)] = 200_000,
    max_logits: Annotated[int | None, typer.Option(min=1, help="of B (K+1) V; default: 2^14, on a GPU 2^22")] = None,
    disagreements: Annotated[int, typer.Option(min=1, help="end after so many")] = 1,
    cpu_share: Annotated[int, typer.Option(min=1, help="on a GPU, cpu takes one step in so many")] = 8,
    json_path: Annotated[Path | None, typer.Option("--json", help="where the results go")] = None,
) -> None:
    """Compares backends with the reference on random cases."""
    where = read_device(device)
    on_gpu = where.type == "cuda"
    names = read_backends(backends or ("cuda,cpu" if on_gpu else "cpu"))
    limits = Limits(max_vocabulary, 1024 if on_gpu else 32, max_logits or (1 << 22 if on_gpu else 1 << 14))
    comparisons = [
        Comparison(n, torch.device("cpu") if n == "cpu" else where, cpu_share if n == "cpu" and on_gpu else 1)
        for n in names
    ]
    leading = min(comparisons, key=lambda c: c.share)
    start, found = time.monotonic(), list[str]()

    def write(done: int, complete: bool) -> None:
        if json_path is None:
            return
        content = {
            "benchmark": "fuzz", "complete": complete, "device": device, "torch": torch.__version__,
            "limits": dataclasses.asdict(limits), "first": first, "variants": variants, "cases_wanted": cases,
            "steps": done, "seconds": round(time.monotonic() - start, 1), "disagreements": found,
            "rows": [c.row() for c in comparisons],
        }  # fmt: skip
        json_path.write_text(json.dumps(content, indent=1) + "\n")

    def ended(done: int) -> bool:
        if done % 20 == 0:  # a run that is cut short leaves what it has
            write(done, False)
        late = seconds > 0 and time.monotonic() - start > seconds
        return late or leading.cases >= cases or 0 < steps <= done or len(found) >= disagreements

    def differs(number: int, told: str) -> None:
        again = f"--device {device} --backends {','.join(names)} --first {number} --steps 1 --variants {variants}"
        sizes = f"--max-vocabulary {max_vocabulary} --max-logits {limits.logits} --cpu-share 1"
        found.append(f"{told}\nagain: python -m tests.fuzz {again} {sizes}")
        print(f"DIFFERENT: {found[-1]}", flush=True)
        write(number - first, False)  # the next step may be the end of the process

    done = run(comparisons, where, limits, first, variants, ended, differs)
    for c in comparisons:
        print(f"{c.backend}: {c.cases} cases of {cases} wanted, {c.near_ties} near-ties, {done} steps")
    if not found and (crowded := ", ".join(c.backend for c in comparisons if c.too_many_near_ties)):
        found.append(f"too many near-ties went the other way: {crowded}")
        print(f"DIFFERENT: {found[-1]}")
    write(done, not found)
    if found:
        raise typer.Exit(1)
    print(f"to go on: --first {first + done}")

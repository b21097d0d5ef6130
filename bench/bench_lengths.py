"""Races the adaptive number of drafts against plain decoding and every fixed number, for three drafters.

python bench/bench_lengths.py --json bench/results/lengths.json
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Annotated

import race
import report
import torch
import typer
from measure import AGAIN, PLAIN
from race import Case, Contender
from specdec import AdaptiveDrafts, PromptLookupDrafter, SpeculativeDecoder
from specdec.drafters import BatchState, Drafter, Drafts, DraftSession, Step
from specdec.drafters.model import ModelDrafter
from specdec.models.load.loading import Pair
from specdec.models.supported import cached_model

from specdec_kernels import Rule

AUTO, NEVER_RIGHT = "auto", "never right"
DRAFTERS = ("model", NEVER_RIGHT, "lookup")
WIDTHS = "1,2,4,8"
FEWEST_PROMPTS, PROMPTS_A_ROW = 8, 4


class NeverRight(Drafter):
    """Costs what the model costs and is hardly ever accepted: each draft is the token after the one that it would be,
    without q, so that it is accepted with its own small probability."""

    def __init__(self, drafter: Drafter, vocab_size: int):
        self.drafter, self.vocab_size = drafter, vocab_size

    def start(self, batch: BatchState) -> DraftSession:
        session = self.drafter.start(batch)
        propose = session.propose

        def wrong(step: Step) -> Drafts:
            drafts = propose(step)
            wrong = (drafts.tokens + 1) % self.vocab_size
            return drafts._replace(tokens=wrong, logits=None, stats=None, d2t=None)

        session.propose = wrong
        return session


def drafter(name: str, pair: Pair) -> Drafter:
    if name == "lookup":
        return PromptLookupDrafter()
    model = ModelDrafter(cached_model(pair[1], "draft"))
    return NeverRight(model, pair[0].config.vocab_size) if name == NEVER_RIGHT else model


def contenders(names: Sequence[str], widths: Sequence[int], pair: Pair) -> dict[str, Contender]:
    """Plain decoding, and each drafter with every K and with the adaptive one. Drafts that are never right only cost,
    so one fixed K of these is enough."""
    found = {name: SpeculativeDecoder(pair[0], None, 0) for name in (PLAIN, AGAIN)}
    for name in names:
        for k in widths[:1] if name == NEVER_RIGHT else widths:
            found[f"{name}, K={k}"] = SpeculativeDecoder(pair[0], drafter(name, pair), k)
        found[f"{name}, {AUTO}"] = SpeculativeDecoder(pair[0], drafter(name, pair), AdaptiveDrafts())
    return {name: Contender(decoder) for name, decoder in found.items()}


def main(
    device: report.DeviceName = "cpu",
    drafters: Annotated[str, typer.Option(help="separated by commas")] = ",".join(DRAFTERS),
    rows: Annotated[str | None, typer.Option(help="default: 1,2,4,8,16,32")] = None,
    widths: Annotated[str | None, typer.Option(help=f"every fixed K; default: {WIDTHS}")] = None,
    temperatures: Annotated[str, typer.Option(help="separated by commas")] = "0,1",
    rule: Annotated[str, typer.Option(help="of sampled texts")] = "coupled",
    rounds: Annotated[int | None, typer.Option(min=1, help="after one to warm up; default: 2")] = None,
    threads: report.Threads = None,
    quick: report.Quick = False,
    json_path: report.JsonPath = None,
) -> None:
    """Races the adaptive K on the embedded pair."""
    where, asked = report.read_device(device), report.read_names("drafters", drafters, DRAFTERS)
    report.read_names("rule", rule, [str(known) for known in Rule])
    numbers = report.read_integers("rows", rows or ("1,2" if quick else "1,2,4,8,16,32"))
    ks = report.read_integers("widths", widths or ("1,2" if quick else WIDTHS))
    warm = report.read_temperatures(temperatures)
    counts = {n: n if quick else max(PROMPTS_A_ROW * n, FEWEST_PROMPTS) for n in numbers}
    cases = [Case(n, temperature, counts[n]) for n in numbers for temperature in warm]
    results = report.Report("lengths", where, json_path, threads, quick=quick, rule=rule)
    new_tokens = (2, 4) if quick else race.NEW_TOKENS
    race.run_cases(results, cases, partial(contenders, asked, ks), rounds or (1 if quick else 2), rule, new_tokens)


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    typer.run(main)

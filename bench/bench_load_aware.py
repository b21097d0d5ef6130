"""Races the adaptive number of drafts under a load of 1 to 16 sequences at a time, on full and on partly empty rows,
beside a scheduler all of whose requests ask for no drafts.

    python bench/bench_load_aware.py --json bench/results/load_aware.json
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import race
import report
import torch
import typer
from measure import AGAIN, PLAIN
from race import Case, Contender
from specdec import AdaptiveDrafts, SpeculativeDecoder
from specdec.models.load.loading import Pair

ADAPTIVE, CAPPED = "K adapts", "K adapts, requests with num_drafts=0"
RULE = "coupled"  # that of a server: no text depends on K
FIXED = (1, 4)
TEXTS_A_ROW = 2


def contenders(pair: Pair) -> dict[str, Contender]:
    found = {name: Contender(SpeculativeDecoder(pair[0], None, 0)) for name in (PLAIN, AGAIN)}
    for name, asked in ((ADAPTIVE, None), (CAPPED, 0)):
        found[name] = Contender(SpeculativeDecoder(*pair[:2], AdaptiveDrafts()), asked)
    return found | {f"K={k}": Contender(SpeculativeDecoder(*pair[:2], k)) for k in FIXED}


def cells(loads: Sequence[int]) -> list[tuple[int, int]]:
    """(sequences at a time, rows): on full rows, and on the rows of the largest load, of which the others are empty."""
    return [*((load, load) for load in loads), *((load, max(loads)) for load in loads if load < max(loads))]


def main(
    device: report.DeviceName = "cpu",
    loads: Annotated[str | None, typer.Option(help="sequences at a time; default: 1,4,16")] = None,
    temperatures: Annotated[str, typer.Option(help="separated by commas")] = "0,1",
    rounds: Annotated[int | None, typer.Option(min=1, help="after one to warm up; default: 3")] = None,
    threads: report.Threads = None,
    quick: report.Quick = False,
    json_path: report.JsonPath = None,
) -> None:
    """Measures drafting under load on the embedded pair."""
    where = report.read_device(device)
    numbers = report.read_integers("loads", loads or ("1,2" if quick else "1,4,16"))
    a_row = 1 if quick else TEXTS_A_ROW
    warm = report.read_temperatures(temperatures)
    cases = [Case(rows, temperature, a_row * load, load) for temperature in warm for load, rows in cells(numbers)]
    results = report.Report("load_aware", where, json_path, threads, quick=quick, rule=RULE)
    new_tokens = (2, 4) if quick else race.NEW_TOKENS
    race.run_cases(results, cases, contenders, rounds or (1 if quick else 3), RULE, new_tokens)


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    typer.run(main)

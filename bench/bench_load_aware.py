"""Decodes 1 to 16 sequences at a time on the embedded pair: plain, with K that adapts to the load, and with a fixed K.

    python bench/bench_load_aware.py --json bench/results/load_aware.json

README.md says how each number is made.
"""

from __future__ import annotations

import gc
import statistics
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated

import report
import torch
import typer
from bench_lengths import AGAIN, NEW_TOKENS, OF_PLAIN, PLAIN, PROMPT_TOKENS, TURN, spread
from jobs import Job, Slice, fixed_length, unseen_code
from measure import in_turns, ratios, summary
from specdec import AdaptiveDrafts, Request, Scheduler, SpeculativeDecoder, load_embedded_pair
from specdec.models.loading import Pair

ADAPTIVE, CAPPED = "K adapts", "K adapts, requests with num_drafts=0"
RULE = "coupled"  # that of a server: no text depends on K
FIXED = (1, 4)
TEXTS_A_ROW = 2


def methods(pair: Pair) -> dict[str, SpeculativeDecoder]:
    """Plain decoding is there twice, which shows what the run's noise is."""
    found = {name: SpeculativeDecoder(pair[0], None) for name in (PLAIN, AGAIN)}
    found |= {name: SpeculativeDecoder(*pair[:2], AdaptiveDrafts()) for name in (ADAPTIVE, CAPPED)}
    return found | {f"K={k}": SpeculativeDecoder(*pair[:2], k) for k in FIXED}


def measure(
    decoders: dict[str, SpeculativeDecoder], requests: list[Request], load: int, rows: int, rounds: int, longest: int
) -> dict:
    """The same requests through a scheduler of each decoder, ``load`` of them at a time on ``rows`` rows, all decoders
    in turns of a fraction of a second. The first round warms up, and step times are learned in it."""
    schedulers = {n: Scheduler(d, rows=rows, max_length=longest, rule=RULE) for n, d in decoders.items()}
    plainly = [replace(request, num_drafts=0) for request in requests]
    slices: dict[str, list[Slice]] = {name: [] for name in decoders}
    gc.collect()  # which would otherwise fall into somebody's turn
    jobs: dict[str, Job] = {}
    for _ in range(1 + rounds):
        asked = {name: plainly if name == CAPPED else requests for name in schedulers}
        jobs = {name: Job(scheduler, asked[name], load=load) for name, scheduler in schedulers.items()}
        ran = dict.fromkeys(jobs, Slice(rows))
        while unfinished := [name for name, job in jobs.items() if not job.done]:
            for name in in_turns(unfinished, len(unfinished)):
                ran[name] = jobs[name].run(seconds=TURN) + ran[name]
        for name, of_round in ran.items():
            slices[name].append(of_round)
    texts = jobs[PLAIN].texts
    speeds = {name: [s.speed for s in ran[1:]] for name, ran in slices.items()}
    return {
        name: {
            "tokens_per_second": summary(speeds[name]),
            "times_plain": ratios(speeds[name], speeds[PLAIN]),
            "tau": jobs[name].total.tau,
            "steps_by_drafts": jobs[name].total.steps_by_drafts,
            "step_costs": decoders[name].costs_of(rows),
            "texts_as_plain": statistics.mean(jobs[name].texts[i] == text for i, text in texts.items()),
        }
        for name in decoders
    }


def judged(found: dict, load: int, rows: int, temperature: float) -> dict:
    """What the adaptive K wins, and what a drafter costs that drafts nothing, beside the run's noise."""
    noise, capped = found[AGAIN]["times_plain"], found[CAPPED]["times_plain"]["median"]
    taken = found[ADAPTIVE]["steps_by_drafts"]
    return {
        "load": load,
        "rows": rows,
        "temperature": temperature,
        "tokens_per_second": found[ADAPTIVE]["tokens_per_second"],
        "times_plain": found[ADAPTIVE]["times_plain"],
        "plain_steps": taken[0] / sum(taken),
        "num_drafts_0": found[CAPPED]["times_plain"],
        "plain_again": noise,
        "times_plain_of_fixed": {f"K={k}": found[f"K={k}"]["times_plain"]["median"] for k in FIXED},
        "methods": found,
        "reached": {
            f"num_drafts=0 {OF_PLAIN} of plain, within noise": capped >= OF_PLAIN * min(1.0, noise["q1"]),
            f"adaptive {OF_PLAIN} of plain, within noise": found[ADAPTIVE]["times_plain"]["median"]
            >= OF_PLAIN * min(1.0, noise["q1"]),
        },
    }


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
    results = report.Report("load_aware", where, json_path, threads, quick=quick, rule=RULE)
    pair = load_embedded_pair(device=where)
    limits = (2, 4) if quick else NEW_TOKENS
    for temperature in map(float, temperatures.split(",")):
        for load, rows in cells(numbers):
            count = load if quick else TEXTS_A_ROW * load
            requests = fixed_length(unseen_code(pair[2], [PROMPT_TOKENS] * count), spread(count, *limits), temperature)
            longest = PROMPT_TOKENS + max(limits)
            found = measure(methods(pair), requests, load, rows, rounds or (1 if quick else 3), longest)
            results.add(judged(found, load, rows, temperature))
    columns = ("load", "rows", "temperature", "tokens_per_second", "times_plain", "plain_steps", "num_drafts_0")
    results.show("K by load", results.rows, (*columns, "plain_again"))
    results.finish()


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    typer.run(main)

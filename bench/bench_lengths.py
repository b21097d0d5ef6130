"""Races the adaptive number of drafts against plain decoding and against every fixed number, on the embedded pair.

    python bench/bench_lengths.py --json bench/results/lengths.json

README.md says how each number is made.
"""

from __future__ import annotations

import gc
import random
import statistics
from collections.abc import Mapping, Sequence
from typing import Annotated

import report
import torch
import typer
from bench_decoding import NeverRight
from jobs import Job, Slice, fixed_length, unseen_code
from measure import in_turns, ratios, summary
from specdec import AdaptiveDrafts, PromptLookupDrafter, Scheduler, SpeculativeDecoder, load_embedded_pair
from specdec.drafters.model import ModelDrafter
from specdec.drafters.protocol import Drafter
from specdec.models.loading import Pair
from specdec.models.supported import cached_model

from specdec_kernels import Rule

PLAIN, AGAIN, AUTO = "plain", "plain again", "auto"
DRAFTERS = ("model", "never right", "lookup")
WIDTHS = (1, 2, 4, 8)
OF_BEST, OF_PLAIN = 0.97, 0.98  # goals
TURN = 0.1  # seconds; the machine's speed changes in seconds
PROMPT_TOKENS, FEWEST_PROMPTS, PROMPTS_A_ROW = 32, 8, 4
NEW_TOKENS = 32, 96  # of the shortest and the longest text


def drafter(name: str, pair: Pair) -> Drafter:
    if name == "lookup":
        return PromptLookupDrafter()
    model = ModelDrafter(cached_model(pair[1], "draft"))
    return NeverRight(model, pair[0].config.vocab_size) if name == "never right" else model


def methods(names: Sequence[str], pair: Pair, widths: Sequence[int]) -> dict[str, SpeculativeDecoder]:
    """Plain decoding twice, which shows what the run's noise is, and each drafter with every K and with the adaptive
    one. Drafts that are never right only cost, so one fixed K of these is enough."""
    found = {name: SpeculativeDecoder(pair[0], None) for name in (PLAIN, AGAIN)}
    for name in names:
        for k in widths[:1] if name == "never right" else widths:
            found[f"{name}, K={k}"] = SpeculativeDecoder(pair[0], drafter(name, pair), k)
        found[f"{name}, {AUTO}"] = SpeculativeDecoder(pair[0], drafter(name, pair), AdaptiveDrafts())
    return found


def spread(count: int, shortest: int, longest: int) -> list[int]:
    """Evenly spread numbers of new tokens, in an order that does not change. Texts of one length would favour plain
    decoding, with which alone all rows end in the same step, so that none of them is ever idle."""
    found = [shortest + round(i * (longest - shortest) / max(count - 1, 1)) for i in range(count)]
    random.Random(0).shuffle(found)
    return found


def measure(
    decoders: Mapping[str, SpeculativeDecoder], prompts: list[list[int]], rows: int, temperature: float,
    new: Sequence[int], rounds: int, rule: str,
) -> dict:  # fmt: skip
    """Jobs of the same requests through one scheduler of each decoder, all at the same time, in turns of a fraction of
    a second. The first round warms up, and the adaptive methods learn step times and acceptance in it.

    Raises:
        RuntimeError: a greedy text is not that of plain decoding.
    """
    schedulers = {
        name: Scheduler(decoder, rows=rows, max_length=PROMPT_TOKENS + max(new), rule=rule)
        for name, decoder in decoders.items()
    }
    slices: dict[str, list[Slice]] = {name: [] for name in decoders}
    gc.collect()  # of all that was imported takes 0.3 s, which would fall into somebody's turn
    jobs: dict[str, Job] = {}
    for _ in range(1 + rounds):
        requests = fixed_length(prompts, new, temperature)
        jobs = {name: Job(scheduler, requests) for name, scheduler in schedulers.items()}
        ran = dict.fromkeys(jobs, Slice(rows))
        while unfinished := [name for name, job in jobs.items() if not job.done]:
            for name in in_turns(unfinished, len(unfinished)):
                ran[name] = jobs[name].run(seconds=TURN) + ran[name]
        for name, job in jobs.items():
            slices[name].append(ran[name])
            if temperature == 0 and job.texts != jobs[PLAIN].texts:
                raise RuntimeError(f"{name}: a text differs from that of plain decoding")
    speeds = {name: [s.speed for s in ran[1:]] for name, ran in slices.items()}
    found = {
        name: {
            "tokens_per_second": summary(speeds[name]),
            "times_plain": ratios(speeds[name], speeds[PLAIN]),
            "tau": jobs[name].total.tau,
            "alpha": jobs[name].total.alpha,
            "steps_by_drafts": jobs[name].total.steps_by_drafts,
            "step_costs": decoders[name].costs_of(rows),
        }
        for name in decoders
    }
    return {"rows": rows, "temperature": temperature, "prompts": len(prompts), "new_tokens": sum(new), "methods": found}


def judged(cell: dict, name: str) -> dict:
    """How a drafter's adaptive K compares with the best of plain decoding and its fixed K, by medians of the rounds."""
    found = cell["methods"]
    fixed = [n for n in found if n.startswith(f"{name}, K=")]
    speed = {n: found[n]["tokens_per_second"]["median"] for n in (PLAIN, *fixed)}
    best = max(speed, key=speed.__getitem__)
    mine = found[f"{name}, {AUTO}"]
    noise = found[AGAIN]["times_plain"]
    of_best = mine["tokens_per_second"]["median"] / speed[best]
    of_plain = mine["times_plain"]["median"]
    return {
        "drafter": name,
        "rows": cell["rows"],
        "temperature": cell["temperature"],
        "best": best,
        "of_best": of_best,
        "of_plain": of_plain,
        "plain_again": noise,
        "tokens_per_second": mine["tokens_per_second"],
        "times_plain_of_fixed": {n: found[n]["times_plain"]["median"] for n in fixed},
        "reached": {
            f"{OF_BEST} of the best": of_best >= OF_BEST,
            f"{OF_PLAIN} of plain, within noise": of_plain >= OF_PLAIN * min(1.0, noise["q1"]),
        },
    }


def main(
    device: report.DeviceName = "cpu",
    drafters: Annotated[str, typer.Option(help="separated by commas")] = ",".join(DRAFTERS),
    rows: Annotated[str | None, typer.Option(help="default: 1,2,4,8,16,32")] = None,
    temperatures: Annotated[str, typer.Option(help="separated by commas")] = "0,1",
    rule: Annotated[str, typer.Option(help="of sampled texts")] = "token",
    rounds: Annotated[int | None, typer.Option(min=1, help="after one to warm up; default: 2")] = None,
    threads: report.Threads = None,
    quick: report.Quick = False,
    json_path: report.JsonPath = None,
) -> None:
    """Races the adaptive K on the embedded pair."""
    where, asked = report.read_device(device), report.read_names("drafters", drafters, DRAFTERS)
    numbers = report.read_integers("rows", rows or ("1,2" if quick else "1,2,4,8,16,32"))
    Rule(rule)
    results = report.Report("lengths", where, json_path, threads, quick=quick, rule=rule)
    pair = load_embedded_pair(device=where)
    limits, widths = ((2, 4), (1, 2)) if quick else (NEW_TOKENS, WIDTHS)
    for n in numbers:
        for temperature in map(float, temperatures.split(",")):
            prompts = unseen_code(pair[2], [PROMPT_TOKENS] * (n if quick else max(PROMPTS_A_ROW * n, FEWEST_PROMPTS)))
            decoders = methods(asked, pair, widths)
            new = spread(len(prompts), *limits)
            cell = measure(decoders, prompts, n, temperature, new, rounds or (1 if quick else 2), rule)
            for name in asked:
                results.add({**judged(cell, name), "cell": cell if name == asked[0] else None})
    columns = ("drafter", "rows", "temperature", "tokens_per_second", "of_plain", "of_best", "best", "plain_again")
    results.show("the adaptive K", results.rows, columns)
    worst = {what: min(row[what] for row in results.rows) for what in ("of_best", "of_plain")}
    results.say({"rows of the table": len(results.rows), "worst of the best": worst["of_best"]})
    results.say({"median of the best": statistics.median(row["of_best"] for row in results.rows)})
    results.finish()


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    typer.run(main)

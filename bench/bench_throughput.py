"""Measures the scheduler with the embedded pair: more rows, rows that refill, and a long run in flat memory.

    python bench/bench_throughput.py --json bench/results/throughput.json

README.md says how each number is made.
"""

from __future__ import annotations

import gc
import itertools
import os
import random
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import report
import torch
import typer
from jobs import Job, Slice, fixed_length, skewed_lengths, unseen_code
from measure import in_turns, ratios, summary
from specdec import AdaptiveDrafts, Request, Scheduler, SpeculativeDecoder, load_embedded_pair
from specdec.models.loading import Pair

from specdec_kernels import SamplingParams

PARTS = ("rows", "admission", "memory")
PLAIN, ADAPTIVE = "plain", "K adapts"
K = 4
EIGHT_ROWS, SIXTEEN_ROWS, BUSY, WHOLE_BATCHES = 3.0, 1.1, 0.9, 1.4  # goals
GROWTH = 0.01  # of resident bytes from the first quarter to the last; below it memory is flat
LARGE = 1 << 16  # bytes of a tensor's storage that is weights or a cache


# ---- Rows


def measure_rows(pair: Pair, rows: list[int], temperature: float, prompts: int, new: int, rounds: int) -> list[dict]:
    """One dictionary for each decoder and number of rows. All decoders get the same prompts: the first of them, four
    for each row and not fewer than an eighth. With fewer, a job would mostly wait for its slowest texts; with few
    rows, more would take long."""
    decoders = {
        PLAIN: SpeculativeDecoder(pair[0], None),
        f"K={K}": SpeculativeDecoder(pair[0], pair[1], K),
        ADAPTIVE: SpeculativeDecoder(pair[0], pair[1], AdaptiveDrafts()),
    }
    texts = unseen_code(pair[2], [32] * prompts)
    keys = [(name, n) for name in decoders for n in rows]
    schedulers = {(name, n): Scheduler(decoders[name], rows=n, max_length=32 + new) for name, n in keys}
    for (_, n), scheduler in schedulers.items():  # warms up
        Job(scheduler, fixed_length(texts[:n], [min(new, 8)] * min(n, prompts), temperature)).run()
    slices: dict[tuple[str, int], list[Slice]] = {key: [] for key in keys}
    jobs: dict[tuple[str, int], Job] = {}
    for key in in_turns(keys, rounds):
        share = min(max(4 * key[1], prompts // 8), prompts)
        jobs[key] = Job(schedulers[key], fixed_length(texts[:share], [new] * share, temperature))
        slices[key].append(jobs[key].run())
    costs = {key: scheduler.decoder.costs_of(key[1]) for key, scheduler in schedulers.items()}
    about = {key: {"prompts": len(jobs[key].texts), "new_tokens": new, "step_costs": costs[key]} for key in keys}
    return [row_of_rows(name, n, rows[0], slices, jobs) | about[name, n] for name, n in keys]


def row_of_rows(name: str, n: int, least: int, slices: dict, jobs: dict) -> dict:
    mine, one, plain = slices[name, n], slices[name, least], slices[PLAIN, n]
    stats, texts = jobs[name, n].total, jobs[name, n].texts
    times = ratios([s.speed for s in mine], [s.speed for s in one])
    row = {
        "method": name,
        "rows": n,
        "tokens_per_second": summary([s.speed for s in mine]),
        f"times_{least}_row": times,
        "times_plain": ratios([s.seconds for s in plain], [s.seconds for s in mine]),
        f"times_{least}_row_that_forwards_allow": ratios(
            [s.tokens / s.forwards for s in mine], [s.tokens / s.forwards for s in one]
        ),
        "in_forwards": summary([s.forwards / s.seconds for s in mine]),
        "tau": stats.tau,
        "alpha": stats.alpha,
        "busy": sum(mine[1:], mine[0]).busy,
        "steps": mine[-1].steps,
        "seconds": {part: statistics.median(s.parts[part] for s in mine) for part in mine[0].parts},
        f"texts_as_with_{least}_row": statistics.mean(texts[i] == t for i, t in jobs[name, least].texts.items()),
    }
    if (least, n) == (1, 8) and name != PLAIN:
        row["reached"] = {f"8 rows {EIGHT_ROWS:g} times 1 row": times["median"] >= EIGHT_ROWS}
    if n == 16 and name == ADAPTIVE:
        row["reached"] = {f"16 rows {SIXTEEN_ROWS:g} times plain": row["times_plain"]["median"] >= SIXTEEN_ROWS}
    return row


# ---- Admission


def measure_admission(pair: Pair, rows: int, count: int, most: int, slices: int) -> dict:
    """A job of skewed lengths with rows that refill, and the same with groups of ``rows`` that wait for their longest,
    in turns.

    Raises:
        RuntimeError: a text differs between the two.
    """
    lengths = skewed_lengths(count, min(8, most // 4), most)
    draw = random.Random(1)
    prompts = unseen_code(pair[2], [draw.randrange(8, 65) for _ in range(count)])
    decoder = SpeculativeDecoder(pair[0], pair[1], K)
    jobs = []
    for whole_batches in (False, True):
        scheduler = Scheduler(decoder, rows=rows, max_length=64 + most)
        Job(scheduler, fixed_length(prompts[:rows], [8] * len(prompts[:rows]), 1.0)).run()
        jobs.append(Job(scheduler, fixed_length(prompts, lengths, 1.0), whole_batches))
    ran: list[list[Slice]] = [[], []]
    for i in in_turns((0, 1), slices):
        ran[i].append(jobs[i].run(None if len(ran[i]) == slices - 1 else count // slices))
    if jobs[0].texts != jobs[1].texts:  # one seed, one text, whoever stands in the other rows
        raise RuntimeError("a text depends on when its request was admitted")
    refilled, waited = (sum(parts[1:], parts[0]) for parts in ran)
    faster = refilled.speed / waited.speed
    found: dict[str, object] = {"method": f"K={K}", "rows": rows, "requests": count, "new_tokens": sum(lengths)}
    for suffix, total, parts in (("", refilled, ran[0]), ("_whole_batches", waited, ran[1])):
        found |= {f"busy{suffix}": total.busy, f"steps{suffix}": total.steps, f"seconds{suffix}": total.parts}
        found[f"tokens_per_second{suffix}"] = summary([s.speed for s in parts])
    reached = {
        f"rows {BUSY:.0%} busy": refilled.busy >= BUSY,
        f"{WHOLE_BATCHES:g} times whole batches": faster >= WHOLE_BATCHES,
    }
    stats = jobs[0].total
    return found | {"times_whole_batches": faster, "tau": stats.tau, "alpha": stats.alpha, "reached": reached}


# ---- Memory


def live_tensors() -> list[torch.Tensor]:
    kinds = {torch.Tensor, torch.nn.Parameter}  # isinstance takes a second for the objects of a process
    return [o for o in gc.get_objects() if type(o) in kinds]


def sample() -> dict[str, int]:
    """What this process holds: resident bytes, live tensors, and bytes on the GPU."""
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    allocated = torch.cuda.memory_allocated() if torch.cuda.is_available() else 0
    return {"resident": resident, "tensors": len(live_tensors()), "allocated": allocated}


def large_storages() -> dict[int, int]:
    """{address: bytes} of weights, caches, and whatever else is as large."""
    storages = (t.untyped_storage() for t in live_tensors() if t.device.type != "meta")
    return {s.data_ptr(): s.nbytes() for s in storages if s.nbytes() >= LARGE}


def growth(tokens: Sequence[int], samples: Sequence[dict[str, int]]) -> dict[str, dict[str, float]]:
    """By what is sampled: the medians of the first and the last quarter, and the least-squares slope, a token."""
    quarter, found = max(len(samples) // 4, 1), {}
    for name in samples[0]:
        values = [s[name] for s in samples]
        found[name] = {
            "first_quarter": statistics.median(values[:quarter]),
            "last_quarter": statistics.median(values[-quarter:]),
            "slope": statistics.linear_regression(tokens, values).slope if len({*tokens}) > 1 else 0.0,
        }
    return found


def measure_memory(pair: Pair, rows: int, tokens: int, interval: float) -> dict:
    """Generates so many tokens and samples what the process holds every ``interval`` seconds, after a first
    twentieth."""
    draw, vocabulary = random.Random(0), pair[0].config.vocab_size
    scheduler = Scheduler(SpeculativeDecoder(pair[0], pair[1], K), rows=rows, max_length=16 + 64)

    def submit(i: int) -> None:
        prompt = [draw.randrange(vocabulary) for _ in range(draw.randrange(2, 17))]
        params = SamplingParams(temperature=float(i % 2))
        scheduler.submit(Request(prompt, draw.randrange(16, 65), params, seed=i, eos_token_id=[]))

    made, at, samples, storages, numbers = 0, list[int](), list[dict[str, int]](), dict[int, int](), itertools.count()
    begun = last = time.perf_counter()
    while made < tokens:
        while scheduler.usage.waiting < rows:
            submit(next(numbers))
        made += sum(len(u.tokens) for u in scheduler.step())
        if made >= tokens / 20 and (time.perf_counter() - last >= interval or made >= tokens):
            at.append(made)
            samples.append(sample())
            storages = storages or large_storages()
            last = time.perf_counter()
    seconds, found, moved = time.perf_counter() - begun, growth(at, samples), large_storages() != storages
    scheduler.close()
    resident, tensors = ((found[n]["first_quarter"], found[n]["last_quarter"]) for n in ("resident", "tensors"))
    reached = {
        f"resident bytes grow by at most {GROWTH:.0%}": resident[1] <= resident[0] * (1 + GROWTH),
        "no more tensors": tensors[1] <= tensors[0],
        "no large storage moved": not moved,
    }
    run = {"rows": rows, "tokens": made, "samples": len(samples), "seconds": seconds, "growth": found}
    size = sum(storages.values())
    return {**run, "cache_and_weight_bytes": size, "large_storages_moved": moved, "reached": reached}


def main(
    device: report.DeviceName = "cpu",
    parts: Annotated[str, typer.Option(help="separated by commas")] = ",".join(PARTS),
    rows: Annotated[str | None, typer.Option(help="to compare, the least first; default: 1,8,16")] = None,
    rounds: Annotated[int | None, typer.Option(min=1, help="of part rows; default: 5")] = None,
    threads: report.Threads = None,
    quick: report.Quick = False,
    json_path: report.JsonPath = None,
) -> None:
    """Measures the scheduler on the embedded pair."""
    where, asked = report.read_device(device), report.read_names("parts", parts, PARTS)
    numbers = report.read_integers("rows", rows or ("1,2" if quick else "1,8,16"))
    results = report.Report("throughput", where, json_path, threads, quick=quick, num_drafts=K)
    pair = load_embedded_pair(device=where)
    most_rows = 2 if quick else 8
    if "rows" in asked:
        prompts, new_tokens = (2, 3) if quick else (64, 48)
        for temperature in (1.0,) if quick else (0.0, 1.0):
            for row in measure_rows(pair, numbers, temperature, prompts, new_tokens, rounds or (1 if quick else 5)):
                results.add({"part": "rows", "temperature": temperature, **row})
        columns = (
            "temperature",
            "method",
            "rows",
            "tokens_per_second",
            f"times_{numbers[0]}_row",
            "times_plain",
            "tau",
        )
        results.show(f"{prompts} prompts x {new_tokens} new tokens", results.rows, columns)
    if "admission" in asked:
        count, most, slices = (5, 6, 2) if quick else (160, 256, 5)
        row = measure_admission(pair, most_rows, count, most, slices)
        results.add({"part": "admission", **row})
        columns = ("tokens_per_second", "tokens_per_second_whole_batches", "times_whole_batches", "busy")
        results.show(f"{count} requests", [row], columns)
    if "memory" in asked:
        row = measure_memory(pair, most_rows, 12 if quick else 30_000, 0.05 if quick else 0.5)
        results.add({"part": "memory", **row})
        of_growth = [{"": name, **values} for name, values in row["growth"].items()]
        results.show(f"{row['tokens']} tokens", of_growth, [*of_growth[0]])
    results.say(
        {f"reached: {goal}": reached for row in results.rows for goal, reached in row.get("reached", {}).items()}
    )
    results.finish()


if __name__ == "__main__":
    typer.run(main)

"""What a scheduler makes of a machine: more rows, rows that refill, and a long run in flat memory.

    python bench/bench_throughput.py --json bench/results/throughput.json

The embedded pair, float32. bench/README.md says how each number is made.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Sequence
from typing import Annotated

import torch
import typer
from flat_memory import Sample, growth, large_storages, sample
from job_slices import Job, Slice, skewed_lengths, standard_library, synchronized, together
from measure import ratios, summary
from options import Device, JsonPath, Threads, read_device, read_integers, read_names, reading
from report import Report, terminal
from rich.console import Console
from rich.table import Table
from specdec import Request, Scheduler, SpeculativeDecoder, Stats, load_embedded_pair
from specdec.models.loading import Pair

from specdec_kernels import SamplingParams

PARTS = ("rows", "admission", "memory")
PLAIN = "plain"
EIGHT_ROWS, BUSY, WHOLE_BATCHES = 3.0, 0.9, 1.4  # goals
GROWTH = 0.01  # of resident bytes from the first quarter to the last; below it memory is flat


def decoders(pair: Pair, num_drafts: int) -> dict[str, SpeculativeDecoder]:
    target, draft, _ = pair
    return {PLAIN: SpeculativeDecoder(target, None), "specdec": SpeculativeDecoder(target, draft, num_drafts)}


def fixed_length(prompts: Sequence[list[int]], lengths: Sequence[int], temperature: float) -> list[Request]:
    """Exactly so many tokens each: no end-of-sequence token."""
    params = SamplingParams(temperature=temperature)
    return [
        Request(prompt, length, params, seed=i, eos_token_id=[], id=i)
        for i, (prompt, length) in enumerate(zip(prompts, lengths, strict=True))
    ]


# ---- Rows


def measure_rows(pair: Pair, rows: list[int], temperature: float, prompts: int, new: int, k: int, rounds: int):
    """One dictionary for each decoder and number of rows; all decode the same prompts in each round."""
    texts = standard_library(pair[2], [32] * prompts)
    todo = fixed_length(texts, [new] * prompts, temperature)
    schedulers = {
        (name, n): Scheduler(decoder, rows=n, max_length=32 + new)
        for name, decoder in decoders(pair, k).items()
        for n in rows
    }
    keys = list(schedulers)
    for n, scheduler in ((n, s) for (_, n), s in schedulers.items()):
        Job(scheduler, fixed_length(texts[:n], [min(new, 8)] * min(n, prompts), temperature)).run()
    slices: dict[tuple[str, int], list[Slice]] = {key: [] for key in keys}
    jobs: dict[tuple[str, int], Job] = {}
    for r in range(rounds):
        for i in range(len(keys)):
            key = keys[(i + r) % len(keys)]
            jobs[key] = Job(schedulers[key], todo)
            slices[key].append(jobs[key].run())
    return [_row_of_rows(name, n, rows[0], slices, jobs) for name, n in keys]


def _row_of_rows(name: str, n: int, least: int, slices: dict, jobs: dict) -> dict:
    mine, one, plain = slices[name, n], slices[name, least], slices[PLAIN, n]
    stats = Stats.total(jobs[name, n].stats, len(jobs[name, n].stats[0].drafted_by_position))
    times = ratios([s.seconds for s in one], [s.seconds for s in mine])
    allowed = [a.forwards / b.forwards for a, b in zip(one, mine, strict=True)]
    same = sum(jobs[name, n].texts[i] == text for i, text in jobs[name, least].texts.items())
    row = {
        "method": name,
        "rows": n,
        "tokens_per_second": summary([s.speed for s in mine]),
        f"times_{least}_row": times,
        "times_plain": ratios([s.seconds for s in plain], [s.seconds for s in mine]),
        f"times_{least}_row_that_forwards_allow": summary(allowed),
        "in_forwards": summary([s.forwards / s.seconds for s in mine]),
        "tau": stats.tau,
        "alpha": stats.alpha,
        "busy": together(mine).busy,
        "steps": mine[-1].steps,
        "seconds": {part: statistics.median(s.parts[part] for s in mine) for part in mine[0].parts},
        f"texts_as_with_{least}_row": same / len(jobs[name, n].texts),
    }
    if (least, n) == (1, 8) and name != PLAIN:
        row["reached"] = {f"8 rows {EIGHT_ROWS:g} times 1 row": times["median"] >= EIGHT_ROWS}
    return row


def show_rows(console: Console, title: str, rows: list[dict]) -> None:
    least = rows[0]["rows"]
    head = ("method", "rows", "tokens/s", f"times {least} row", "forwards allow", "times plain", "tau", "busy")
    table = Table(*head, "in forwards", title=title)
    for row in rows:
        ratio = [row[f"times_{least}_row"], row[f"times_{least}_row_that_forwards_allow"], row["times_plain"]]
        numbers = (*(r["median"] for r in ratio), row["tau"], row["busy"], row["in_forwards"]["median"])
        speed = f"{row['tokens_per_second']['median']:.1f}"
        table.add_row(row["method"], str(row["rows"]), speed, *(f"{x:.2f}" for x in numbers))
    console.print(table)


# ---- Admission


def measure_admission(pair: Pair, rows: int, count: int, most: int, k: int, slices: int, temperature: float) -> dict:
    """A job of skewed lengths with rows that refill, and the same with groups of ``rows`` that wait for their longest,
    in turns."""
    lengths = skewed_lengths(count, min(8, most // 4), most)
    draw = random.Random(1)
    prompts = standard_library(pair[2], [draw.randrange(8, 65) for _ in range(count)])
    todo = fixed_length(prompts, lengths, temperature)
    decoder = decoders(pair, k)["specdec"]
    jobs = []
    for whole_batches in (False, True):
        scheduler = Scheduler(decoder, rows=rows, max_length=64 + most)
        Job(scheduler, fixed_length(prompts[:rows], [8] * len(prompts[:rows]), temperature)).run()
        jobs.append(Job(scheduler, todo, whole_batches))
    ran: list[list[Slice]] = [[], []]
    for s in range(slices):
        for which in (0, 1) if s % 2 == 0 else (1, 0):
            last = s == slices - 1
            ran[which].append(jobs[which].run(None if last else count // slices))
    if jobs[0].texts != jobs[1].texts:  # one seed, one text, whoever stands in the other rows
        raise RuntimeError("a text depends on when its request was admitted")
    refilled, waited = (together(parts) for parts in ran)
    stats = Stats.total(jobs[0].stats, k)
    faster = refilled.speed / waited.speed
    return {
        "method": "specdec",
        "rows": rows,
        "requests": count,
        "temperature": temperature,
        "new_tokens": {"sum": sum(lengths), "median": statistics.median(lengths), "most": max(lengths)},
        "tau": stats.tau,
        "alpha": stats.alpha,
        "busy": refilled.busy,
        "busy_whole_batches": waited.busy,
        "steps": refilled.steps,
        "steps_whole_batches": waited.steps,
        "tokens_per_second": summary([s.speed for s in ran[0]]),
        "tokens_per_second_whole_batches": summary([s.speed for s in ran[1]]),
        "times_whole_batches": faster,
        "times_whole_batches_by_slice": ratios([s.speed for s in ran[0]], [s.speed for s in ran[1]]),
        "seconds": refilled.parts,
        "reached": {
            f"rows {BUSY:.0%} busy": refilled.busy >= BUSY,
            f"{WHOLE_BATCHES:g} times whole batches": faster >= WHOLE_BATCHES,
        },
    }


# ---- Memory


def measure_memory(pair: Pair, rows: int, tokens: int, k: int, interval: float) -> dict:
    """Generates so many tokens and samples what the process holds every ``interval`` seconds, after a first
    twentieth."""
    draw, vocabulary = random.Random(0), pair[0].config.vocab_size

    def coming():
        for i in range(10 * tokens):  # more than is needed
            prompt = [draw.randrange(vocabulary) for _ in range(draw.randrange(2, 17))]
            params = SamplingParams(temperature=float(i % 2))
            yield Request(prompt, draw.randrange(16, 65), params, seed=i, eos_token_id=[])

    source = coming()
    scheduler = Scheduler(decoders(pair, k)["specdec"], rows=rows, max_length=16 + 64)
    made, samples, storages = 0, list[Sample](), dict[int, int]()
    begun = last = time.perf_counter()
    while made < tokens:
        while scheduler.usage.waiting < rows:
            scheduler.submit(next(source))
        made += sum(len(u.tokens) for u in scheduler.step() if not hasattr(u, "end"))
        now = time.perf_counter()
        if made >= tokens / 20 and (now - last >= interval or made >= tokens):
            samples.append(sample(made))
            storages = storages or large_storages()
            last = time.perf_counter()
    seconds = synchronized(pair[0].device) - begun
    found = growth(samples)
    moved = large_storages() != storages
    scheduler.close()
    resident, tensors = found["resident"], found["tensors"]
    flat = resident["last_quarter"] <= resident["first_quarter"] * (1 + GROWTH)
    return {
        "rows": rows,
        "tokens": made,
        "samples": len(samples),
        "seconds": seconds,
        "growth": found,
        "cache_and_weight_bytes": sum(storages.values()),
        "large_storages_moved": moved,
        "reached": {
            f"resident bytes grow by at most {GROWTH:.0%}": flat,
            "no more tensors": tensors["last_quarter"] <= tensors["first_quarter"],
            "no large storage moved": not moved,
        },
    }


def show_admission(console: Console, row: dict) -> None:
    table = Table("rows", "tokens/s", "quartiles of slices", "busy", "steps", title=f"{row['requests']} requests")
    for name, suffix in (("refilled", ""), ("whole batches", "_whole_batches")):
        speed, busy, steps = (row[f"{key}{suffix}"] for key in ("tokens_per_second", "busy", "steps"))
        quartiles = f"{speed['q1']:.1f} to {speed['q3']:.1f}"
        table.add_row(name, f"{speed['median']:.1f}", quartiles, f"{busy:.3f}", str(steps))
    console.print(table)
    console.print(f"refilled rows: {row['times_whole_batches']:.2f} times whole batches")


def show_memory(console: Console, row: dict) -> None:
    table = Table("", "first quarter", "last quarter", "slope a token", title=f"{row['tokens']} tokens")
    for name, values in row["growth"].items():
        quarters = (f"{values[key]:,.0f}" for key in ("first_quarter", "last_quarter"))
        table.add_row(name, *quarters, f"{values['slope']:.4f}")
    console.print(table)


def show_reached(console: Console, row: dict) -> None:
    for goal, reached in row.get("reached", {}).items():
        console.print(f"{'reached' if reached else 'NOT reached'}: {goal}")


def main(
    device: Device = "cpu",
    parts: Annotated[str, typer.Option(help=f"some of {', '.join(PARTS)}, separated by commas")] = ",".join(PARTS),
    rows: Annotated[str | None, typer.Option(help="to compare, the least first; default: 1,2,4,8,16")] = None,
    num_drafts: Annotated[int, typer.Option("--num-drafts", "-K", min=1)] = 4,
    prompts: Annotated[int | None, typer.Option(min=1, help="of part rows; default: 32")] = None,
    new_tokens: Annotated[int | None, typer.Option(min=1, help="of part rows, each; default: 64")] = None,
    rounds: Annotated[int | None, typer.Option(min=1, help="of part rows; default: 5")] = None,
    requests: Annotated[int | None, typer.Option(min=5, help="of part admission; default: 500")] = None,
    tokens: Annotated[int | None, typer.Option(min=1, help="of part memory; default: 100000")] = None,
    threads: Threads = None,
    quick: Annotated[bool, typer.Option(help="a smoke run: other defaults")] = False,
    json_path: JsonPath = None,
) -> None:
    """Measures the scheduler on the embedded pair."""
    with reading():
        where, asked = read_device(device), read_names("parts", parts, PARTS)
        numbers = read_integers("rows", rows or ("1,2" if quick else "1,2,4,8,16"))
    if threads is not None:
        torch.set_num_threads(threads)
    console = terminal()
    report = Report("throughput", where, json_path, quick=quick, num_drafts=num_drafts)
    pair = load_embedded_pair(device=where)
    most_rows, slices = (2, 2) if quick else (8, 5)
    if "rows" in asked:
        prompts, new_tokens = prompts or (3 if quick else 32), new_tokens or (6 if quick else 64)
        for temperature in (1.0,) if quick else (0.0, 1.0):
            settings = (temperature, prompts, new_tokens, num_drafts, rounds or (1 if quick else 5))
            found = measure_rows(pair, numbers, *settings)
            show_rows(console, f"temperature {temperature:g}, {prompts} prompts x {new_tokens} new tokens", found)
            for row in found:
                report.add({"part": "rows", "temperature": temperature, **row})
                show_reached(console, row)
    if "admission" in asked:
        count, most = requests or (10 if quick else 500), 6 if quick else 256
        row = measure_admission(pair, most_rows, count, most, num_drafts, slices, 1.0)
        report.add({"part": "admission", **row})
        show_admission(console, row)
        show_reached(console, row)
    if "memory" in asked:
        row = measure_memory(pair, most_rows, tokens or (120 if quick else 100_000), num_drafts, 0.05 if quick else 1.0)
        report.add({"part": "memory", **row})
        show_memory(console, row)
        show_reached(console, row)
    report.finish()


if __name__ == "__main__":
    typer.run(main)

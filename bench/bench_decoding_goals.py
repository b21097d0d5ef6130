"""The decoding loop against its goals: tokens a second at batch 1, 8 and 32, and where a step's time goes.

    python bench/bench_decoding_goals.py --quick
    python bench/bench_decoding_goals.py --device cuda --pair 8b+1b --json bench/results/decoding_goals.json

Random weights, two real shapes, a chosen acceptance. bench/README.md says how each number is made.
"""

from __future__ import annotations

import time
from typing import Annotated

import torch
import typer
from loop_methods import MODES, Cell
from loop_runs import Plan, measure
from loop_verdict import goals, judged
from machine import bandwidth
from options import Device, JsonPath, Threads, read_device, read_integers, read_names, reading
from report import Report, terminal
from rich.console import Console
from rich.table import Table
from tunable_pair import TWO_SHAPES, make_pair_of_two


def show(console: Console, title: str, row: dict) -> None:
    table = Table("method", "tokens/s", "quartiles", "tau", "alpha", "graphs", title=title)
    for m in row["methods"]:
        t, alpha, graphs = m["tokens_per_second"], m["alpha"], m.get("graphs")
        table.add_row(
            m["name"],
            f"{t['median']:.1f}",
            f"{t['q1']:.1f} to {t['q3']:.1f}",
            f"{m['tau']:.2f}",
            "-" if alpha is None else f"{alpha:.2f}",
            "-" if graphs is None else f"{graphs['count']} ({graphs['bytes'] / 1e6:.0f} MB)",
        )
    console.print(table)
    found = row["found"]
    for name, times in found.get("times", {}).items():
        other = found["baseline"] if name == "baseline" else name
        console.print(f"{found['fastest']['specdec']}: {times['median']:.2f} times {other}")
    for key in ("c", "allowed_speedup", "of_allowed", "outside_models", "attention_over_filled"):
        if found.get(key) is not None:
            console.print(f"{key}: {found[key]:.3f}")
    for goal, reached in row["reached"].items():
        console.print(f"{ {True: 'reached', False: 'NOT reached', None: 'not measured'}[reached] }: {goal}")
    for name, reason in row["unavailable"].items():
        console.print(f"{name}: not measured: {reason}")


def main(
    device: Device = "cpu",
    pair: Annotated[str, typer.Option(help=f"one of {', '.join(TWO_SHAPES)}")] = "tiny",
    alpha: Annotated[float, typer.Option(help="the acceptance that the pair is tuned to, between 0 and 1")] = 0.8,
    temperature: Annotated[float, typer.Option(min=0)] = 1.0,
    batches: Annotated[str | None, typer.Option("--batches", "-B", help="default: 1,8,32")] = None,
    contexts: Annotated[str | None, typer.Option(help="tokens of the prompts; default: 512,8192")] = None,
    num_drafts: Annotated[int, typer.Option("--num-drafts", "-K", min=1)] = 4,
    new_tokens: Annotated[int | None, typer.Option(min=1, help="of a sequence in a window; default: 128")] = None,
    rounds: Annotated[int | None, typer.Option(min=1, help="windows of a method; default: 3")] = None,
    modes: Annotated[str | None, typer.Option(help=f"some of {', '.join(MODES)}; default: all")] = None,
    seconds: Annotated[float | None, typer.Option(min=0, help="for the forwards of a mode; default: 2")] = None,
    limit: Annotated[float, typer.Option(min=0, help="seconds after which no method begins")] = float("inf"),
    watch: Annotated[bool, typer.Option(help="count synchronisations and profile kernels at batch 1")] = True,
    threads: Threads = None,
    quick: Annotated[bool, typer.Option(help="a smoke run: other defaults, nothing is compiled")] = False,
    json_path: JsonPath = None,
) -> None:
    """Times the decoding loop against its goals."""
    with reading():
        where = read_device(device)
        if pair not in TWO_SHAPES:
            raise ValueError(f"pair: got {pair!r}, allowed: {', '.join(TWO_SHAPES)}")
        asked = read_names("modes", modes or ",".join(MODES), MODES)
        sizes = read_integers("batches", batches or ("1,2" if quick else "1,8,32"))
        lengths = read_integers("contexts", contexts or ("16" if quick else "512,8192"))
        if not 0 < alpha < 1:
            raise ValueError(f"alpha: got {alpha}, allowed: between 0 and 1, both excluded")
    if threads is not None:
        torch.set_num_threads(threads)
    new_tokens, rounds = new_tokens or (12 if quick else 128), rounds or (2 if quick else 3)
    seconds = (0.0 if quick else 2.0) if seconds is None else seconds
    console, start = terminal(), time.perf_counter()
    target, draft = TWO_SHAPES[pair]
    shapes = {who: {**p._asdict(), "dtype": str(p.dtype)} for who, p in (("target", target), ("draft", draft))}
    report = Report("decoding_goals", where, json_path, quick=quick, pair=pair, shapes=shapes)
    ceilings = bandwidth(where, quick) if where.type == "cuda" else None
    tuned = make_pair_of_two(target, draft, where)
    tuned.calibrate(alpha, temperature)
    of_pair = {
        "eps": tuned.eps,
        "expected_alpha": tuned.expected_alpha(temperature),
        "cost_ratio": tuned.cost_ratio,
        "bandwidth": ceilings,
    }
    compiling = "--quick compiles nothing" if quick else None
    for batch, context in sorted(((b, c) for c in lengths for b in sizes), key=lambda cell: cell[0] * cell[1]):
        cell = Cell(batch, context, new_tokens, rounds, num_drafts, temperature)
        title, begun = f"{pair}, B={batch}, context {context}", time.perf_counter()
        with console.status(title) as status:

            def progress(method: str, title: str = title, status=status) -> None:
                status.update(f"{title}: {method}")

            row, speeds = measure(tuned, cell, asked, Plan(compiling, watch, seconds, start + limit, progress))
        row["found"] = judged(row, speeds, cell, ceilings and max(ceilings["read"], ceilings["copy"]))
        # The goals are of one pair, at batch 1.
        named = batch == 1 and pair == "8b+1b" and where.type == "cuda"
        row["reached"] = goals(row["found"], speeds) if named else {}
        row |= {"seconds_in_all": time.perf_counter() - begun}
        about = {"B": batch, "context": context, "new_tokens": new_tokens, "K": num_drafts, "temperature": temperature}
        report.add({**about, **of_pair, **row})
        show(console, title, row)
    report.finish()


if __name__ == "__main__":
    typer.run(main)

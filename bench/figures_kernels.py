"""The figures of the operations on raw logits: by shape, by setting, and of drawing drafts."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from figures import Results, milliseconds, number, page, percent, source, spread, table, times_faster


def accepted(row: dict) -> str:
    """What a row of ``bench_kernels.py step`` accepts."""
    return "all accepted" if row["drafts"] == "all_accepted" else f"alpha {row['cases']['step']['alpha']:.2f}"


def _faster(ratios: Mapping[str, dict], peers: Sequence[str], ours: str = "cpu") -> list[str]:
    """How many times as fast ours is; empty where a peer was not measured."""
    found = [ratios.get(f"{ours}/{peer}") for peer in peers]
    return ["" if ratio is None else spread(times_faster(ratio)) for ratio in found]


def _head(peers: Sequence[str]) -> list[str]:
    return [f"times as fast as {'`torch.compile`' if peer == 'compile' else peer}" for peer in peers]


def steps(name: str) -> Callable[[Results], str]:
    """The figure of one file of ``bench_kernels.py step``."""

    def figure(results: Results) -> str:
        r = results[name]
        measured = {key for row in r["rows"] for key in row["ratios"]}
        peers = [peer for peer in ("transformers", "eager", "compile") if f"cpu/{peer}" in measured]
        rows = []
        for row in sorted(r["rows"], key=lambda row: (row["V"], row["B"], row["K"], row["drafts"] != "typical")):
            shape = [str(row["V"]), str(row["B"]), str(row["K"]), accepted(row)]
            times = [milliseconds(row["seconds"][ours]) for ours in ("cpu", "cpu+stats")]
            floor = spread(row["ratios"]["cpu/floor_all_rows"])
            rows.append([*shape, *times, *_faster(row["ratios"], peers), floor])
        head = ["V", "B", "K", "drafts", "time", "with q's statistics", *_head(peers), "times the floor"]
        said = (
            f"The floor is the bytes of all rows that may be needed, over the bandwidth of reading "
            f"({r['bandwidth']['read'] / 1e9:.0f} GB/s). {source(name, r)}"
        )
        return page(table(head, rows), said)

    return figure


def settings(results: Results) -> str:
    r = results["settings"]
    by_drafts = {row["drafts"]: row for row in r["rows"]}
    some, whole = by_drafts["typical"], by_drafts["all_accepted"]
    rows = []
    for case, about in some["cases"].items():
        filters = [f"{name.replace('_', '-')} {value}" for name, value in about["filters"].items()]
        with_stats = some["seconds"].get(f"cpu+stats {case}")
        against = [of["ratios"].get(f"cpu {case}/cpu token none") for of in (some, whole)]
        rows.append(
            [
                ", ".join([f"`{about['rule']}`", *filters]),
                f"{about['mean_emitted']:.2f}",
                milliseconds(some["seconds"][f"cpu {case}"]),
                milliseconds(with_stats) if with_stats else "",
                *("" if ratio is None else spread(ratio) for ratio in against),
                *_faster(some["ratios"], [f"transformers {case}"], f"cpu {case}"),
            ]
        )
    head = ["rule, filters", "emitted", "time", "with q's statistics", "times `token` without filters"]
    said = (
        f"B = {some['B']}, K = {some['K']}, V = {some['V']}, {some['dtype']}; q is disturbed until alpha is "
        f"{some['cases']['token none']['alpha']:.2f} without filters. {source('settings', r)}"
    )
    return page(table([*head, "the same, all accepted", *_head(["transformers"])], rows), said)


def instructions(results: Results) -> str:
    r, rows = results["machine_code"], []
    for row in r["rows"]:
        for origin in (name for name in ("stay", "ring", "in place") if name in row):
            counts = row[origin]
            shares = [f"{percent(of['bandwidth_share'])} ({gpu})" for gpu, of in row[f"{origin}, predicted"].items()]
            rows.append(
                [
                    f"`{row['kernel']}`", row["architecture"], str(row["registers"]), origin, str(counts["all"]),
                    str(counts["address and bookkeeping"]), ", ".join(shares),
                ]
            )  # fmt: skip
    head = [
        "kernel",
        "architecture",
        "registers",
        "blocks",
        "instructions",
        "of these bookkeeping",
        "share of bandwidth",
    ]
    said = (
        "Instructions for 1,024 bfloat16 logits in the measuring loop. The last column is **predicted**, not measured: "
        "the share of the data sheet's bandwidth that issued instructions and exponentials allow if all latencies are "
        f"hidden ([bench/README.md](../bench/README.md)). `bench/results/cpu/machine_code.json` (commit "
        f"{r['commit'][:10]}{' with changes' if r['dirty'] else ''}, {r['date'][:10]}): `python bench/machine_code.py`"
    )
    return page(table(head, rows), said)


def drafts(results: Results) -> str:
    r, peers = results["draft_step"], ("multinomial", "eager", "compile")
    rows = []
    for row in sorted(r["rows"], key=lambda row: (row["V"], row["B"])):
        time = milliseconds(row["seconds"]["cpu"])
        rows.append([str(row["V"]), str(row["B"]), time, *_faster(row["ratios"], peers)])
    return page(table(["V", "B", "time", *_head(peers)], rows), source("draft_step", r))


def measured_steps(folder: Path) -> dict[tuple[str, str], float]:
    """Seconds of the goals' steps by (model of the GPU, goal), out of what bench/gpu.sh brought: <GPU>/A/goals.json."""
    found = {}
    for path in sorted(folder.glob("*/A/goals.json")):
        r = json.loads(path.read_text(encoding="utf-8"))
        for row in r["rows"] if r["device"] == "cuda" and not r["quick"] else ():
            timed = row["seconds"].get("cuda+stats [cold]")
            if timed is not None and row["drafts"] == "typical":
                found[model_of(r["hardware"]["gpu"]), row["goal"]] = timed["median"]
    return found


def model_of(gpu: str) -> str:
    """What tells a GPU from others in its name: H100, 5090."""
    found = re.search(r"\b[A-Z]?\d{3,4}\b", gpu)
    return found[0] if found else gpu


def predicted_steps(results: Results) -> str:
    r = results["machine_code"]
    measured = measured_steps(results.folder.parent)
    goals = dict.fromkeys(step["goal"] for step in r["steps"])
    gpus = dict.fromkeys(step["gpu"] for step in r["steps"])
    by = {(step["goal"], step["gpu"]): step for step in r["steps"]}

    def cell(goal: str, gpu: str) -> str:
        seconds = measured.get((model_of(gpu), goal))
        told = number(1e6 * by[goal, gpu]["seconds"]["total"])
        return told if seconds is None else f"{told}, measured {number(1e6 * seconds)}"

    def parts(goal: str) -> list[str]:
        seconds = by[goal, "H200 SXM"]["seconds"]
        phases = seconds["measuring"] + seconds["later"]
        return [number(1e6 * x) for x in (seconds["memory"], seconds["instructions"], seconds["total"] - phases)]

    rows = [[f"`{goal}`", *(cell(goal, gpu) for gpu in gpus), *parts(goal)] for goal in goals]
    head = ["case", *gpus, "H200: memory", "H200: instructions", "H200: the rest"]
    said = (
        "Microseconds of a step, **predicted**, not measured: a model ([bench/predicted_times.py]"
        "(../bench/predicted_times.py)) of what the kernels do, which is counted, at the data sheets' rates, with "
        "assumed costs of launches, barriers and draws. One of the drafts of each sequence is rejected. "
        f"{'' if measured else 'No GPU has measured any of it yet. '}"
        f"`bench/results/cpu/machine_code.json` (commit {r['commit'][:10]}{' with changes' if r['dirty'] else ''}, "
        f"{r['date'][:10]}): `python bench/machine_code.py`"
    )
    return page(table(head, rows), said)

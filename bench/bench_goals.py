"""Times ``speculative_step`` on the shapes that have a goal, and says which are reached.

    python bench/bench_goals.py --device cuda --json bench/results/goals.json

bfloat16, temperature 0.8, the draft's statistics handed over. The goals are for an H200, device time by CUDA graph; on
other devices the same shapes are timed, and only what is relative means something.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field, replace
from typing import Annotated

import torch
import typer
from launches import launches
from machine import bandwidth, floor_seconds
from measure import compared, interleave, prepare, summary
from options import Backends, Device, JsonPath, Quick, Threads, read_backends, read_device, read_names, reading
from peer_methods import peer_methods
from peers import Compiler
from report import Report, terminal
from rich.console import Console
from rich.table import Table
from step_inputs import ACCEPTANCE, MOST_SETS, Shape, StepInputs

TEMPERATURE = 0.8
FASTER = {"flashinfer": 3.0, "transformers": 10.0}  # than these peers, so many times


@dataclass(frozen=True)
class Goal:
    shape: Shape
    rule: str = "token"
    filters: dict[str, float] = field(default_factory=dict)
    seconds: float | None = None  # cold, at most
    bandwidth: float | None = None  # of the measured copy bandwidth, at least
    launches: int | None = None  # at most

    def as_row(self) -> dict[str, object]:
        s = self.shape
        sampling = {"rule": self.rule, "filters": self.filters}
        return {"B": s.B, "K": s.K, "V": s.V, "dtype": s.dtype, **sampling, "goal_seconds": self.seconds,
                "goal_bandwidth": self.bandwidth, "goal_launches": self.launches}  # fmt: skip


def bf16(B: int, K: int, V: int) -> Shape:
    return Shape(B, K, V, "bfloat16")


GOALS = {
    "latency": Goal(bf16(1, 5, 128256), seconds=8e-6, launches=1),
    "few": Goal(bf16(8, 5, 151936), seconds=10e-6),
    "token": Goal(bf16(32, 8, 128256), seconds=25e-6),
    "block": Goal(bf16(32, 8, 128256), "block", seconds=42e-6),
    "filters": Goal(bf16(32, 8, 128256), "token", {"top_k": 50, "top_p": 0.95}, seconds=40e-6),
    "many": Goal(bf16(256, 4, 151936), bandwidth=0.9),
}


def measure_goal(
    goal: Goal,
    inputs: StepInputs,
    device: torch.device,
    backends: list[str],
    compiler: Compiler,
    ceilings: dict[str, float],
    seconds: float,
) -> dict[str, object]:
    """One goal's row: ``inputs`` have its shape, rule and filters."""
    stats = goal.rule != "coupled"
    ours = [inputs.method(backend, backend, stats) for backend in backends]
    others, absent = peer_methods(inputs, compiler)
    methods, unavailable = prepare([*ours, *others], device, seconds)
    samples = interleave(methods, device, seconds)

    accepted = inputs.num_accepted(backends[0])
    sizes = {
        "all_rows": goal.shape.bytes_all_rows(stats, goal.rule),
        "reached_rows": goal.shape.bytes_reached_rows(stats, accepted, goal.rule),
    }
    floors = {rows: floor_seconds(size, ceilings) for rows, size in sizes.items()}
    peers = [m for m in methods if m.name not in backends]
    found = {}
    for m in (m for m in methods if m.name in backends):
        found |= compared(m, peers, samples, {f"floor_{rows}": floor for rows, floor in floors.items()})
    launched = {b: launches(inputs.ours(b, stats), device) for b in backends}
    reached = {
        m.name: {
            **reaches(goal, m.name, samples, launched[m.name], sizes["reached_rows"] / ceilings["copy"]),
            **is_faster(m.name, found),
        }
        for m in ours
    }
    return {
        "acceptance_rate": accepted.float().mean().item() / goal.shape.K,
        "input_sets": inputs.sets,
        "inputs_exceed_cache": inputs.exceed_cache,
        "launches": launched,
        "bytes_read": sizes,
        "floor_seconds": floors,
        "seconds": {key: summary(values) for key, values in samples.items()},
        "ratios": found,
        "reached": reached,
        "unavailable": absent | unavailable,
    }


def reaches(
    goal: Goal, backend: str, samples: dict[str, list[float]], launched: dict[str, object], copying: float
) -> dict[str, bool | None]:
    """Which of its goals a backend reaches; None: not measured here. ``copying``: seconds to copy the bytes that the
    outcome needs; rows that were read in vain do not count."""
    cold = samples.get(f"{backend} [cold]")
    median = summary(cold)["median"] if cold else None
    kernels = launched.get("kernels")
    found: dict[str, bool | None] = {}
    if goal.seconds is not None:
        found["seconds"] = None if median is None else median <= goal.seconds
    if goal.bandwidth is not None:
        found["bandwidth"] = None if median is None else copying / median >= goal.bandwidth
    if goal.launches is not None:
        found["launches"] = None if kernels is None else kernels <= goal.launches
    return found


def is_faster(backend: str, measured: dict[str, dict]) -> dict[str, bool | None]:
    """The same of the peers; as calls from Python where no graph can hold the peer."""
    found: dict[str, bool | None] = {}
    for peer, times in FASTER.items():
        ratio = next(
            (measured[k] for k in (f"{backend} [cold]/{peer} [cold]", f"{backend}/{peer}") if k in measured), None
        )
        found[f"{times:g} times faster than {peer}"] = None if ratio is None else 1 / ratio["median"] >= times
    return found


def main(
    device: Device = "cpu",
    goals: Annotated[str, typer.Option(help="which of them")] = ",".join(GOALS),
    backends: Backends = None,
    seconds: Annotated[float | None, typer.Option(min=0, help="a row, at least 5 rounds; default: 4")] = None,
    compile_seconds: Annotated[
        float | None, typer.Option(min=0, help="for torch.compile in all; 0: without it; default: 60")
    ] = None,
    threads: Threads = None,
    quick: Quick = False,
    json_path: JsonPath = None,
) -> None:
    """Times the shapes that have a goal, on drafts that are often and that are always accepted."""
    with reading():
        where = read_device(device)
        chosen = {name: GOALS[name] for name in read_names("goals", goals, GOALS)}
        names, left_out = read_backends(where, backends)
    seconds = (0.1 if quick else 4.0) if seconds is None else seconds
    compiler = Compiler((0.0 if quick else 60.0) if compile_seconds is None else compile_seconds)
    if threads is not None:
        torch.set_num_threads(threads)
    ceilings = bandwidth(where, quick)
    settings = {"quick": quick, "bandwidth": ceilings, "temperature": TEMPERATURE, "faster": FASTER}
    report = Report("goals", where, json_path, **settings, backends_left_out=left_out)
    for (name, goal), drafts in itertools.product(chosen.items(), ACCEPTANCE):
        if quick:
            s = goal.shape
            goal = replace(goal, shape=Shape(min(s.B, 2), s.K, s.V // 100, s.dtype))
        inputs = StepInputs(goal.shape, drafts, TEMPERATURE, where, 4 if quick else MOST_SETS)
        inputs = inputs.with_settings(goal.filters, goal.rule)
        row = measure_goal(goal, inputs, where, names, compiler, ceilings, seconds)
        report.add({"goal": name, **goal.as_row(), "drafts": drafts} | row)
    report.finish()
    show(terminal(), report.rows, names)


def show(console: Console, rows: list[dict], backends: list[str]) -> None:
    """A line for each goal, kind of drafts and backend."""
    peers = tuple(FASTER)
    head = ("goal", "drafts", "backend", "launches", "floor us", "goal", "cold us", "warm us", "call us", "/floor")
    table = Table(
        *head, *(f"{p} / ours" for p in peers), "reached (in the order of the JSON)", title="median microseconds a step"
    )
    for row, backend in itertools.product(rows, backends):
        seconds, measured = row["seconds"], row["ratios"]
        times = {t: seconds.get(backend + (f" [{t}]" if t != "call" else "")) for t in ("cold", "warm", "call")}
        form = " [cold]" if times["cold"] else ""
        over = measured.get(f"{backend}{form}/floor_all_rows")
        faster = []
        for p in peers:
            ratio = measured.get(f"{backend}{form}/{p}{form}") or measured.get(f"{backend}/{p}")
            faster.append("-" if ratio is None else f"{1 / ratio['median']:.1f}")
        aim = row["goal_seconds"]
        table.add_row(
            row["goal"], row["drafts"], backend, str(row["launches"][backend].get("kernels", "-")),
            f"{row['floor_seconds']['all_rows'] * 1e6:.1f}",
            f"{aim * 1e6:.0f} us" if aim else f"{row['goal_bandwidth']:.0%} of copy",
            *("-" if t is None else f"{t['median'] * 1e6:.1f}" for t in times.values()),
            "-" if over is None else f"{over['median']:.2f}", *faster,
            " ".join({True: "yes", False: "NO", None: "-"}[v] for v in row["reached"][backend].values()),
        )  # fmt: skip
    console.print(table)
    reasons = {name: reason for row in rows for name, reason in row["unavailable"].items()}
    for name, reason in reasons.items():
        console.print(f"{name}: not measured in some rows: {reason}")


if __name__ == "__main__":
    typer.run(main)

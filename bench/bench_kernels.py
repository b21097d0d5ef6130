"""Times ``speculative_step`` and ``draft_step`` against peers, goals, and the bytes that they have to read.

    python bench/bench_kernels.py goals --device cuda --json bench/results/goals.json

``cases.py`` has the cases of each group: goals, step, settings and draft. README.md says how each number is made.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Annotated

import torch
import typer
from cases import DTYPES, FASTER, GOALS, SETTINGS, SIZES, Case, Shape, rows_of
from machine import bandwidth, cache_bytes, floor_seconds
from measure import Method, compared, first_line, interleave, prepare, summary
from options import Device, JsonPath, Quick, Threads, read_backends, read_device, read_integers, read_names, reading
from peer_methods import peer_methods
from peers import Compiler, probabilities
from report import Report, terminal
from rich.console import Console
from rich.table import Table
from step_inputs import ACCEPTANCE, LOGIT_STD, MOST_SETS, StepInputs
from watch import launches

from specdec_kernels import SamplingParams, draft_step

SECONDS = {"goals": 4.0, "step": 2.0, "settings": 60.0, "draft": 1.0}  # a row
COMPILE_SECONDS = {"goals": 60.0, "step": 900.0, "settings": 0.0, "draft": 300.0}  # in all
MOST_SETS_OF_SETTINGS = 16  # each setting has its own drafts, which take memory

Samples = dict[str, list[float]]
Floors = dict[str, float]
Beside = tuple[Floors, list[str]]  # what a method of ours is compared with: floors, and methods by name


@dataclass
class Bench:
    """What all rows of a run have in common."""

    device: torch.device
    backends: list[str]
    compiler: Compiler
    ceilings: dict[str, float]  # bytes a second, and seconds of a launch
    seconds: float  # a row
    most_sets: int

    def timed(self, methods: Sequence[Method], ours: dict[str, Beside], absent: dict[str, str]) -> tuple[dict, Samples]:
        """(what every row has, seconds by method and round)."""
        ready, failed = prepare(methods, self.device, self.seconds)
        samples = interleave(ready, self.device, self.seconds)
        ratios: dict[str, dict] = {}
        for m in (m for m in ready if m.name in ours):
            floors, others = ours[m.name]
            ratios |= compared(m, [other for other in ready if other.name in others], samples, floors)
        row = {
            "calls_a_sample": {m.key: m.calls_a_sample for m in ready},
            "seconds": {key: summary(values) for key, values in samples.items()},
            "ratios": ratios,
            "unavailable": absent | failed,
        }
        return row, samples


@dataclass
class Ours:
    """One of our methods: a case by a backend, with or without the draft's statistics."""

    name: str
    case: Case
    backend: str
    stats: bool
    inputs: StepInputs


def about_case(case: Case, inputs: StepInputs, bench: Bench) -> dict[str, object]:
    """What is said of a case beside its times; bytes and floors by form of the draft's statistics."""
    accepted = inputs.num_accepted(bench.backends[0])
    bytes_read = {
        "stats" if stats else "recomputed": {
            "all_rows": case.shape.bytes_all_rows(stats, case.rule),
            "reached_rows": case.shape.bytes_reached_rows(stats, accepted, case.rule),
        }
        for stats in case.stats
    }
    floors = {
        form: {f"floor_{rows}": floor_seconds(size, bench.ceilings) for rows, size in sizes.items()}
        for form, sizes in bytes_read.items()
    }
    return {
        "rule": case.rule,
        "filters": case.filters,
        "alpha": (accepted.sum() / (accepted + 1).clamp(max=case.shape.K).sum()).item(),
        "acceptance_rate": accepted.float().mean().item() / case.shape.K,
        "mean_emitted": 1 + accepted.float().mean().item(),
        "bytes_read": bytes_read,
        "floor_seconds": floors,
    }


def measure_row(cases: Sequence[Case], drafts: str, bench: Bench) -> dict[str, object]:
    """Cases of one shape in the same rounds. A method is named by backend, ``+stats`` and, in a row of several cases,
    its case; its ratios are to the floors, to the peers of its case, and to rule ``token`` with and without its
    filters."""
    logits = StepInputs(cases[0].shape, drafts, cases[0].temperature, bench.device, bench.most_sets)
    ours: dict[str, Ours] = {}
    methods: list[Method] = []
    peers: dict[str, list[str]] = {}  # by the case's name
    about: dict[str, dict] = {}
    unavailable: dict[str, str] = {}
    for case in cases:
        inputs = logits.with_settings(case.filters, case.rule)
        about[case.name] = about_case(case, inputs, bench)
        suffix = f" {case.name}" if len(cases) > 1 else ""
        for backend, stats in itertools.product(bench.backends, case.stats):
            name = f"{backend}{'+stats' if stats else ''}{suffix}"
            ours[name] = Ours(name, case, backend, stats, inputs)
            methods.append(inputs.method(name, backend, stats))
        others, absent = peer_methods(inputs, bench.compiler, case.peers)
        methods += [replace(m, name=m.name + suffix) for m in others]
        peers[case.name] = [m.name + suffix for m in others]
        unavailable |= {name + suffix: reason for name, reason in absent.items()}
    beside: dict[str, Beside] = {}
    for o in ours.values():
        others = [*peers[o.case.name], *(other.name for other in ours.values() if is_plainer(other, o))]
        beside[o.name] = about[o.case.name]["floor_seconds"]["stats" if o.stats else "recomputed"], others
    row, samples = bench.timed(methods, beside, unavailable)
    launched = {o.name: launches(o.inputs.ours(o.backend, o.stats), bench.device) for o in ours.values()}
    return row | {
        "cases": about,
        "input_sets": logits.sets,
        "inputs_exceed_cache": logits.exceed_cache,
        "launches": launched,
        "reached": {
            o.name: reached(o, samples, row["ratios"], launched[o.name], about[o.case.name], bench.ceilings)
            for o in ours.values()
            if o.case.goal is not None
        },
    }


def is_plainer(other: Ours, mine: Ours) -> bool:
    """Whether ``other`` is rule ``token``, without filters or with those of ``mine``, and otherwise the same."""
    same = (other.backend, other.stats) == (mine.backend, mine.stats) and other.name != mine.name
    return same and other.case.rule == "token" and other.case.filters in ({}, mine.case.filters)


def reached(
    mine: Ours, samples: Samples, ratios: dict, launched: dict, about: dict, ceilings: dict[str, float]
) -> dict[str, bool | None]:
    """Which of its goals a method reaches; None where it was not measured. Bytes that were read in vain do not count
    for the bandwidth."""
    goal, cold = mine.case.goal, samples.get(f"{mine.name} [cold]")
    median = summary(cold)["median"] if cold else None
    found: dict[str, bool | None] = {}
    if goal.seconds is not None:
        found["seconds"] = None if median is None else median <= goal.seconds
    if goal.bandwidth is not None:
        copying = about["bytes_read"]["stats"]["reached_rows"] / ceilings["copy"]
        found["bandwidth"] = None if median is None else copying / median >= goal.bandwidth
    if goal.launches is not None:
        kernels = launched.get("kernels")
        found["launches"] = None if kernels is None else kernels <= goal.launches
    for peer, times in FASTER.items():  # as calls from Python where no graph can hold the peer
        keys = (f"{mine.name} [cold]/{peer} [cold]", f"{mine.name}/{peer}")
        ratio = next((ratios[key] for key in keys if key in ratios), None)
        found[f"{times:g} times faster than {peer}"] = None if ratio is None else 1 / ratio["median"] >= times
    return found


# ---- Drawing a draft


def race(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Draws by an exponential race and keeps q, which an eager verifier needs later."""
    q = probabilities(logits)
    return (q / torch.empty_like(q).exponential_()).argmax(-1), q


def multinomial(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """As transformers samples. On a GPU ``torch.multinomial`` waits for the device: no graph can hold it."""
    q = probabilities(logits)
    return torch.multinomial(q, 1)[:, 0], q


def random_logits(shape: Shape, device: torch.device, most_sets: int) -> torch.Tensor:
    """[sets, B, V], twice as large as the caches unless that takes more than ``most_sets``."""
    wanted = math.ceil(2 * cache_bytes(device) / (shape.B * shape.row_bytes))
    torch.manual_seed(0)
    dtype = DTYPES[shape.dtype]
    logits = torch.empty(min(wanted, most_sets), shape.B, shape.V, dtype=dtype, device=device)
    for one in logits:  # one at a time, as float32 noise for all would need several times their memory
        one.copy_(torch.randn(shape.B, shape.V, device=device) * LOGIT_STD)
    return logits


def measure_drafts(shape: Shape, bench: Bench) -> dict[str, object]:
    logits = random_logits(shape, bench.device, bench.most_sets)
    sets, device = len(logits), bench.device
    params = SamplingParams(temperature=torch.ones(shape.B, device=device))
    seed = torch.arange(shape.B, device=device)
    position = [torch.full((shape.B,), i, device=device) for i in range(sets)]

    def ours(backend: str) -> Method:
        def run(i: int, of_set: int | None = None):
            rows, at = logits[i if of_set is None else of_set], position[i % sets]
            return draft_step(rows, params, seed=seed, position=at, offset=0, backend=backend)

        return Method(backend, run, sets, capturable=backend != "reference", warm=lambda i: run(i, 0))

    def peer(name: str, draw: Callable[[torch.Tensor], object], capturable: bool = True) -> Method:
        return Method(name, lambda i: draw(logits[i]), sets, capturable, warm=lambda i: draw(logits[0]))

    methods, absent = [ours(b) for b in bench.backends], {}
    methods += [peer("eager", race), peer("multinomial", multinomial, capturable=False)]
    try:
        methods.append(peer("compile", bench.compiler.compiled(race, logits[0])))
    except Exception as error:  # why a peer cannot run is a result
        absent["compile"] = first_line(error)
    bytes_read = shape.B * shape.row_bytes
    floor = floor_seconds(bytes_read, bench.ceilings)
    beside = {b: ({"floor": floor}, ["eager", "multinomial", "compile"]) for b in bench.backends}
    row, _ = bench.timed(methods, beside, absent)
    return row | {
        "input_sets": sets,
        "inputs_exceed_cache": sets * bytes_read >= 2 * cache_bytes(device),
        "bytes_read": bytes_read,
        "floor_seconds": floor,
    }


# ---- The command


def show(console: Console, row: dict, backends: Sequence[str]) -> None:
    """Every method's microseconds, and those of ours as multiples of the floors and of the methods beside them."""

    def label(other: str) -> str:
        who, _, case = other.split(" [")[0].partition(" ")
        return case if who.removesuffix("+stats") in backends else who

    ratios = [(*key.split("/"), value["median"]) for key, value in row["ratios"].items()]
    columns = list(dict.fromkeys(label(other) for _, other, _ in ratios))
    head = " ".join(f"{k}={row[k]}" for k in ("goal", "B", "K", "V", "dtype", "drafts") if k in row)
    table = Table("method", "microseconds", *(f"/ {column}" for column in columns), "goals", title=head)
    for key, seconds in row["seconds"].items():
        mine = {label(other): f"{ratio:.3g}" for method, other, ratio in ratios if method == key}
        goals = row.get("reached", {}).get(key.split(" [")[0], {})
        words = [f"{name}: { {True: 'yes', False: 'NO', None: '-'}[value] }" for name, value in goals.items()]
        table.add_row(
            key, f"{seconds['median'] * 1e6:.1f}", *(mine.get(column, "-") for column in columns), "; ".join(words)
        )
    console.print(table)
    for name, reason in row["unavailable"].items():
        console.print(f"{name}: not measured: {reason}")


def main(
    group: Annotated[str, typer.Argument(help=f"one of {', '.join(SIZES)}")],
    device: Device = "cpu",
    names: Annotated[str | None, typer.Option(help="some of the cases of goals or settings")] = None,
    batches: Annotated[str | None, typer.Option("--batches", "-B", help="default: as in cases.py")] = None,
    num_drafts: Annotated[str | None, typer.Option("--num-drafts", "-K", help="default: as in cases.py")] = None,
    vocabularies: Annotated[str | None, typer.Option("--vocabularies", "-V", help="default: as in cases.py")] = None,
    dtypes: Annotated[str | None, typer.Option(help=f"some of {', '.join(DTYPES)}")] = None,
    temperature: Annotated[float, typer.Option(help="of group step; > 0; at 1 no peer pays for a division")] = 1.0,
    backends: Annotated[str | None, typer.Option(help="default: all that run here but the oracle")] = None,
    seconds: Annotated[float | None, typer.Option(min=0, help="a row, at least 5 rounds; default: by group")] = None,
    compile_seconds: Annotated[
        float | None, typer.Option(min=0, help="for torch.compile in all; 0: without it; default: by group")
    ] = None,
    threads: Threads = None,
    quick: Quick = False,
    json_path: JsonPath = None,
) -> None:
    """Times a group of cases of speculative_step, or draft_step."""
    with reading():
        (group,) = read_names("group", group, SIZES)
        where = read_device(device)
        asked, left_out = read_backends(where, backends)
        if not 0 < temperature < float("inf"):
            raise ValueError(f"temperature: got {temperature}, allowed: a number > 0")
        given = {"batches": batches, "num-drafts": num_drafts, "vocabularies": vocabularies, "dtypes": dtypes}
        rows = rows_of(group, asked_sizes(group, quick, given), temperature)
        if names is not None:
            allowed = {"goals": [c.name for c in GOALS], "settings": [f"{r} {f}" for r, f in SETTINGS]}.get(group, [])
            chosen = read_names("names", names, allowed)
            rows = [kept for row in rows if (kept := [case for case in row if case.name in chosen])]
    if threads is not None:
        torch.set_num_threads(threads)
    compiling = (0.0 if quick else COMPILE_SECONDS[group]) if compile_seconds is None else compile_seconds
    most_sets = 4 if quick else MOST_SETS_OF_SETTINGS if group == "settings" else MOST_SETS
    seconds = ((0.5 if group == "settings" else 0.1) if quick else SECONDS[group]) if seconds is None else seconds
    ceilings = bandwidth(where, quick)
    bench = Bench(where, asked, Compiler(compiling), ceilings, seconds, most_sets)
    settings = {"group": group, "quick": quick, "bandwidth": ceilings, "backends_left_out": left_out}
    report, console = Report("kernels", where, json_path, **settings), terminal()
    console.print(f"read {ceilings['read'] / 1e9:.1f} GB/s, copy {ceilings['copy'] / 1e9:.1f} GB/s")
    for cases, drafts in itertools.product(rows, ACCEPTANCE if group != "draft" else [None]):
        if quick and group == "goals":
            s = cases[0].shape
            cases = [replace(cases[0], shape=Shape(min(s.B, 2), s.K, s.V // 100, s.dtype))]
        shape = cases[0].shape
        head: dict[str, object] = {"goal": cases[0].name} if group == "goals" else {}
        head |= {"B": shape.B, "V": shape.V, "dtype": shape.dtype}
        if drafts is None:
            row = head | measure_drafts(shape, bench)
        else:
            head |= {"K": shape.K, "temperature": cases[0].temperature, "drafts": drafts}
            row = head | measure_row(cases, drafts, bench)
            if cases[0].goal is not None:
                row |= {f"goal_{name}": value for name, value in vars(cases[0].goal).items()}
        report.add(row)
        show(console, row, asked)
    report.finish()


def asked_sizes(group: str, quick: bool, given: dict[str, str | None]) -> dict[str, list]:
    """The group's sizes but for those that were asked for."""
    sizes = dict(SIZES[group])
    if quick and sizes:
        sizes |= {"vocabularies": [1000], "batches": [1] if group == "settings" else [1, 8]}
        sizes |= {"num-drafts": [5]} if "num-drafts" in sizes else {}
    for name, text in given.items():
        if text is not None and name not in sizes:
            raise ValueError(f"{name}: got {text!r}, allowed: nothing, as {group} has its own")
        if text is not None:
            sizes[name] = read_names(name, text, DTYPES) if name == "dtypes" else read_integers(name, text)
    return sizes


if __name__ == "__main__":
    typer.run(main)

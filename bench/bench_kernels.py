"""Times ``speculative_step`` and ``draft_step`` against peers, goals, and the bytes that they have to read.

    python bench/bench_kernels.py goals --device cuda --json bench/results/goals.json

``cases.py`` has the cases of each group: goals, step, settings and draft. README.md says how each number is made.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated

import report
import torch
import typer
from cases import ACCEPTANCE, DTYPES, FASTER, GROUPS, MOST_SETS, Case, Shape, StepInputs, rows_of
from measure import Method, compared, first_line, interleave, prepare, profiled, summary
from peers import Compiler, eager, flashinfer_step, probabilities, transformers_step

from specdec_kernels import build_info, draft_step

SECONDS = {"goals": 4.0, "step": 2.0, "settings": 60.0, "draft": 1.0}  # a row
COMPILE_SECONDS = {"goals": 60.0, "step": 900.0, "settings": 0.0, "draft": 300.0}  # in all
MOST_SETS_OF_SETTINGS = 16  # each setting has its own drafts, which take memory

WITHOUT_FLASHINFER = "SPECDEC_BENCH_WITHOUT_FLASHINFER"  # set it where its kernels cannot be compiled
WITH_FILTERS = ("transformers", "flashinfer", "flashinfer+q")

Samples = dict[str, list[float]]
Beside = tuple[dict[str, float], list[str]]  # what a method of ours is compared with: floors, and methods by name


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


def backends_of(device: torch.device) -> tuple[list[str], dict[str, str]]:
    """The backends to time, and why others are left out."""
    rows = [r for r in build_info()["backends"] if r["device"] == device.type]
    left_out = {r["backend"]: r["reason"] for r in rows if not r["available"]}
    left_out["reference"] = "the oracle, not made to be fast"
    if device.type == "cpu":
        left_out.setdefault("triton", "on a CPU it is Triton's interpreter, which serves tests")
    names = [r["backend"] for r in rows if r["backend"] not in left_out]
    if not names:
        report.refuse("device", device, f"one with a backend that can run: {left_out}")
    return names, left_out


# ---- Verifying drafts


def peer_methods(
    inputs: StepInputs, compiler: Compiler, wanted: Sequence[str] | None = None
) -> tuple[list[Method], dict[str, str]]:
    """The wanted peers (None: all) that can run on these inputs, and why the others cannot."""
    t, filters = inputs.temperature, inputs.filters
    logits, int32 = ("target", "tokens", "draft"), "tokens_int32"
    makers: dict[str, tuple[Callable[[], Callable], tuple[str, ...]]] = {  # how to make the step, and what it gets
        "eager": (lambda: eager(t), logits),
        "eager+q": (lambda: eager(t, has_q=True), ("target", "tokens", "draft_probs")),
        "compile": (lambda: compiler.compiled(eager(t), *inputs.arguments(*logits)(0)), logits),
        "transformers": (lambda: transformers_step(t, filters), ("target", "tokens", "draft_float32")),
        "flashinfer": (lambda: flashinfer_step(t, filters), ("target", int32, "draft", "noise")),
        "flashinfer+q": (lambda: flashinfer_step(t, filters, "q"), ("target", int32, "draft_probs", "noise")),
        "flashinfer+p+q": (lambda: flashinfer_step(t, given="pq"), ("target_probs", int32, "draft_probs", "noise")),
    }
    methods, unavailable = [], {}
    for name, (make, tensors) in makers.items():
        if wanted is not None and name not in wanted:
            continue
        try:
            if name.startswith("flashinfer") and WITHOUT_FLASHINFER in os.environ:
                raise RuntimeError(f"left out by {WITHOUT_FLASHINFER}")
            if name.startswith("flashinfer") and not inputs.target.is_cuda:
                raise RuntimeError("it runs on NVIDIA GPUs")
            if filters and name not in WITH_FILTERS:
                raise RuntimeError(f"it has no filters here ({', '.join(filters)})")
            step = make()  # before its tensors, which may be large
            arguments = inputs.arguments(*tensors)
            arguments(0)
            if name == "transformers" and inputs.leaves_nothing():
                raise RuntimeError("it divides 0 by 0: its filters exclude a draft where q = p, so no residual is left")
        except Exception as error:  # why a peer cannot run is a result
            unavailable[name] = first_line(error)
            continue
        run, warm = (lambda i, s=step, a=arguments: s(*a(i))), (lambda i, s=step, a=arguments: s(*a(0)))
        capturable = name != "transformers"  # which reads what it drew
        methods.append(Method(name, run, inputs.calls, capturable=capturable, warm=warm))
    return methods, unavailable


@dataclass
class Ours:
    """One of our methods: a case by a backend, with or without the draft's statistics."""

    name: str
    case: Case
    backend: str
    stats: bool
    inputs: StepInputs

    def is_plainer_than(self, other: Ours) -> bool:
        """Whether it is rule ``token``, without filters or with those of ``other``, and otherwise the same."""
        same = (self.backend, self.stats) == (other.backend, other.stats) and self.name != other.name
        return same and self.case.rule == "token" and self.case.filters in ({}, other.case.filters)


def about_case(case: Case, inputs: StepInputs, bench: Bench) -> dict[str, object]:
    """What is said of a case beside its times; bytes and floors by form of the draft's statistics."""
    accepted = inputs.num_accepted(bench.backends[0])
    bytes_read, floors = {}, {}
    for stats in case.stats:
        reached_rows = case.shape.bytes_reached_rows(stats, accepted, case.rule)
        sizes = {"all_rows": case.shape.bytes_all_rows(stats, case.rule), "reached_rows": reached_rows}
        form = "stats" if stats else "recomputed"
        bytes_read[form] = sizes
        floors[form] = {f"floor_{rows}": report.floor_seconds(size, bench.ceilings) for rows, size in sizes.items()}
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
    ours: list[Ours] = []
    methods: list[Method] = []
    peers: dict[str, list[str]] = {}  # by the case's name
    about: dict[str, dict] = {}
    unavailable: dict[str, str] = {}
    for case in cases:
        inputs = logits.with_settings(case.filters, case.rule)
        about[case.name] = about_case(case, inputs, bench)
        suffix = f" {case.name}" if len(cases) > 1 else ""
        for backend, stats in itertools.product(bench.backends, case.stats):
            ours.append(Ours(f"{backend}{'+stats' if stats else ''}{suffix}", case, backend, stats, inputs))
            methods.append(inputs.method(ours[-1].name, backend, stats))
        others, absent = peer_methods(inputs, bench.compiler, case.peers)
        methods += [replace(m, name=m.name + suffix) for m in others]
        peers[case.name] = [m.name + suffix for m in others]
        unavailable |= {name + suffix: reason for name, reason in absent.items()}
    beside: dict[str, Beside] = {}
    for o in ours:
        others = [*peers[o.case.name], *(other.name for other in ours if other.is_plainer_than(o))]
        beside[o.name] = about[o.case.name]["floor_seconds"]["stats" if o.stats else "recomputed"], others
    row, samples = bench.timed(methods, beside, unavailable)
    unseen = {"unknown": "kernels are launched on GPUs"}
    calls = {o.name: partial(o.inputs.ours(o.backend, o.stats), 0) for o in ours}
    row["launches"] = {name: profiled(call) if bench.device.type == "cuda" else unseen for name, call in calls.items()}
    row |= {"cases": about, "input_sets": logits.sets, "inputs_exceed_cache": logits.exceed_cache}
    with_goals = [o for o in ours if o.case.goal]
    return row | {"reached": {o.name: reached(o, samples, row) for o in with_goals}}


def reached(mine: Ours, samples: Samples, row: dict) -> dict[str, bool | None]:
    """Which of its goals a method reaches; None where it was not measured."""
    goal, cold = mine.case.goal, samples.get(f"{mine.name} [cold]")
    median = summary(cold)["median"] if cold else None
    found: dict[str, bool | None] = {"seconds": None if median is None else median <= goal["seconds"]}
    if "launches" in goal:
        kernels = row["launches"][mine.name].get("kernels")
        found["launches"] = None if kernels is None else kernels <= goal["launches"]
    for peer, times in FASTER.items():  # as calls from Python where no graph can hold the peer
        keys = (f"{mine.name} [cold]/{peer} [cold]", f"{mine.name}/{peer}")
        ratio = next((row["ratios"][key] for key in keys if key in row["ratios"]), None)
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


def measure_drafts(shape: Shape, bench: Bench) -> dict[str, object]:
    inputs = StepInputs(shape, "all_accepted", 1.0, bench.device, bench.most_sets)

    def method(name: str, draw: Callable[[int, int], object], capturable: bool = True) -> Method:
        """``draw(i, n)`` is call i, on the logits of set n."""
        return Method(name, lambda i: draw(i, i % inputs.sets), inputs.calls, capturable, warm=lambda i: draw(i, 0))

    def ours(i: int, n: int, backend: str):
        at = {"seed": inputs.seed[n], "position": inputs.position[i % inputs.calls], "offset": 0}
        return draft_step(inputs.target[n, :, 0], inputs.params, **at, backend=backend)

    methods, absent = [method(b, lambda i, n, b=b: ours(i, n, b)) for b in bench.backends], {}
    methods.append(method("eager", lambda i, n: race(inputs.target[n, :, 0])))
    methods.append(method("multinomial", lambda i, n: multinomial(inputs.target[n, :, 0]), capturable=False))
    try:
        compiled = bench.compiler.compiled(race, inputs.target[0, :, 0])
        methods.append(method("compile", lambda i, n: compiled(inputs.target[n, :, 0])))
    except Exception as error:  # why a peer cannot run is a result
        absent["compile"] = first_line(error)
    bytes_read = shape.B * shape.row_bytes
    floor = report.floor_seconds(bytes_read, bench.ceilings)
    row, _ = bench.timed(
        methods, {b: ({"floor": floor}, ["eager", "multinomial", "compile"]) for b in bench.backends}, absent
    )
    row |= {"input_sets": inputs.sets, "inputs_exceed_cache": inputs.exceed_cache}
    return row | {"bytes_read": bytes_read, "floor_seconds": floor}


# ---- The command


def main(
    group: Annotated[str, typer.Argument(help=f"one of {', '.join(GROUPS)}")],
    device: report.DeviceName = "cpu",
    batches: Annotated[str | None, typer.Option("--batches", "-B", help="default: as in cases.py")] = None,
    dtypes: Annotated[str | None, typer.Option(help=f"some of {', '.join(DTYPES)}")] = None,
    vocabularies: Annotated[str | None, typer.Option("--vocabularies", "-V", help="default: as in cases.py")] = None,
    drafts: Annotated[str | None, typer.Option("--drafts", "-K", help="drafts a step; default: as in cases.py")] = None,
    seconds: Annotated[float | None, typer.Option(min=0, help="a row, at least 5 rounds; default: by group")] = None,
    compile_seconds: Annotated[
        float | None, typer.Option(min=0, help="for torch.compile in all; 0: without it")
    ] = None,
    threads: report.Threads = None,
    quick: report.Quick = False,
    json_path: report.JsonPath = None,
) -> None:
    """Times a group of cases of speculative_step, or draft_step."""
    (group,) = report.read_names("group", group, GROUPS)
    where = report.read_device(device)
    backends, left_out = backends_of(where)
    asked = batches and report.read_integers("batches", batches), dtypes and report.read_names("dtypes", dtypes, DTYPES)
    sizes = [text and report.read_integers(n, text) for n, text in (("vocabularies", vocabularies), ("drafts", drafts))]
    rows = rows_of(group, *asked, quick, *sizes)
    compiling = (0.0 if quick else COMPILE_SECONDS[group]) if compile_seconds is None else compile_seconds
    most_sets = 4 if quick else MOST_SETS_OF_SETTINGS if group == "settings" else MOST_SETS
    seconds = (0.1 if quick else SECONDS[group]) if seconds is None else seconds
    about = {"group": group, "quick": quick, "backends_left_out": left_out, "native": build_info()["native"]}
    results = report.Report("kernels", where, json_path, threads, **about)
    ceilings = results.content["bandwidth"] = report.bandwidth(where, quick)
    bench = Bench(where, backends, Compiler(compiling), ceilings, seconds, most_sets)
    results.say({name: f"{ceilings[name] / 1e9:.1f} GB/s" for name in ("read", "copy")})
    for cases, acceptance in itertools.product(rows, ACCEPTANCE if group != "draft" else [None]):
        case, shape = cases[0], cases[0].shape
        row: dict[str, object] = {"goal": case.name} if case.goal else {}
        row |= {"B": shape.B, "V": shape.V, "dtype": shape.dtype}
        if acceptance is None:
            row |= measure_drafts(shape, bench)
        else:
            row |= {"K": shape.K, "temperature": case.temperature, "drafts": acceptance}
            row |= measure_row(cases, acceptance, bench)
        row |= {f"goal_{name}": value for name, value in case.goal.items()}
        results.add(row)
        head = " ".join(f"{k}={row[k]}" for k in ("goal", "B", "K", "V", "dtype", "drafts") if k in row)
        results.show(head, [{"method": k, "seconds": v} for k, v in row["seconds"].items()], ("method", "seconds"))
        results.say(row["ratios"] | row.get("reached", {}) | row["unavailable"])
    results.finish()


if __name__ == "__main__":
    typer.run(main)

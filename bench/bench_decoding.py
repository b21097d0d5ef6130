"""Times decoding: the loop against transformers and its goals, every drafter, every accept rule.

    python bench/bench_decoding.py loop --device cuda --pair 8b+1b --json bench/results/loop.json
    python bench/bench_decoding.py drafters --json bench/results/drafters.json
    python bench/bench_decoding.py rules --json bench/results/rules.json

README.md says how each number is made.
"""

from __future__ import annotations

import fnmatch
import time
from collections.abc import Mapping
from typing import Annotated, NamedTuple

import torch
import typer
from jobs import Job, Slice, editing, fixed_length
from loop_cells import MODES, Cell, contenders
from loop_cells import measure as measure_cell
from loop_costs import goals, judged
from machine import bandwidth
from measure import in_turns, ratios, summary
from options import Device, JsonPath, Quick, Threads, read_device, read_integers, read_names, reading
from report import Report, show_table, terminal
from specdec import (
    AdaptiveDrafts,
    EarlyExitDrafter,
    PromptLookupDrafter,
    Scheduler,
    SpeculativeDecoder,
    SuffixDrafter,
    load_embedded_pair,
)
from specdec.cli.compare import CODE_PROMPTS
from specdec.drafters import Drafter, Drafts, DraftSession, Generation, Step
from specdec.drafters.model import ModelDrafter
from specdec.models.supported import cached_model
from specdec.stats import Stats
from transformers import PreTrainedModel
from tunable_pair import PAIRS, named_pair

from specdec_kernels import Rule, SamplingParams

app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False)
NumDrafts = Annotated[str, typer.Option("--num-drafts", "-K", help="numbers separated by commas")]


def read_alpha(alpha: float) -> None:
    if not 0 < alpha < 1:
        raise ValueError(f"alpha: got {alpha}, allowed: between 0 and 1, both excluded")


# ---- The loop


@app.command()
def loop(
    device: Device = "cpu",
    pair: Annotated[str, typer.Option(help=f"one of {', '.join(PAIRS)}")] = "tiny",
    alpha: Annotated[float, typer.Option(help="the acceptance that the pair is tuned to, between 0 and 1")] = 0.8,
    temperature: Annotated[float, typer.Option(min=0)] = 1.0,
    batches: Annotated[str | None, typer.Option("--batches", "-B", help="default: 1,8,32")] = None,
    contexts: Annotated[str | None, typer.Option(help="tokens of the prompts; default: 512,8192")] = None,
    num_drafts: NumDrafts = "4",
    new_tokens: Annotated[int | None, typer.Option(min=1, help="of a sequence in a window; default: 128")] = None,
    rounds: Annotated[int | None, typer.Option(min=1, help="windows of a method; default: 5")] = None,
    modes: Annotated[str | None, typer.Option(help=f"some of {', '.join(MODES)}; default: all")] = None,
    seconds: Annotated[float | None, typer.Option(min=0, help="for the forwards of a mode; default: 2")] = None,
    limit: Annotated[float, typer.Option(min=0, help="seconds after which no method begins")] = float("inf"),
    watch: Annotated[bool, typer.Option(help="count synchronisations and profile kernels at batch 1")] = True,
    threads: Threads = None,
    quick: Quick = False,
    json_path: JsonPath = None,
) -> None:
    """Times the loop on pairs with random weights, against transformers, its own modes and its goals."""
    with reading():
        where = read_device(device)
        (pair,) = read_names("pair", pair, PAIRS)
        asked = read_names("modes", modes or ("eager,deferred" if quick else ",".join(MODES)), MODES)
        sizes = read_integers("batches", batches or ("1,2" if quick else "1,8,32"))
        lengths = read_integers("contexts", contexts or ("16" if quick else "512,8192"))
        ks = read_integers("num-drafts", num_drafts)
        read_alpha(alpha)
    if threads is not None:
        torch.set_num_threads(threads)
    new_tokens, rounds = new_tokens or (12 if quick else 128), rounds or (2 if quick else 5)
    seconds = (0.1 if quick else 2.0) if seconds is None else seconds
    start, console = time.perf_counter(), terminal()
    report = Report("loop", where, json_path, quick=quick, pair=pair, shapes=[str(preset) for preset in PAIRS[pair]])
    ceilings = bandwidth(where, quick) if where.type == "cuda" else None
    tuned = named_pair(pair, where)
    tuned.calibrate(alpha, temperature)
    of_pair = {
        "eps": tuned.eps,
        "expected_alpha": tuned.expected_alpha(temperature),
        "cost_ratio": tuned.cost_ratio,
        "bandwidth": ceilings,
    }
    cells = [Cell(b, c, new_tokens, rounds, k, temperature) for c in lengths for b in sizes for k in ks]
    for cell in sorted(cells, key=lambda cell: cell.batch * cell.context):
        title, begun = f"{pair}, B={cell.batch}, context {cell.context}, K={cell.num_drafts}", time.perf_counter()
        with console.status(title):
            methods = contenders(tuned, cell, asked, watch)
            row, speeds = measure_cell(methods, cell, where, start + limit, seconds)
        row["found"] = judged(row, speeds, cell, ceilings and max(ceilings["read"], ceilings["copy"]))
        # The goals are of one pair, at batch 1.
        named = cell.batch == 1 and pair == "8b+1b" and where.type == "cuda"
        row["reached"] = goals(row["found"], speeds) if named else {}
        about = {"B": cell.batch, "context": cell.context, "new_tokens": new_tokens, "K": cell.num_drafts}
        about |= {"temperature": temperature, "seconds_in_all": time.perf_counter() - begun}
        report.add({**about, **of_pair, **row})
        columns = {name: speed["median"] for name, speed in row["found"].get("times", {}).items()}
        show_table(console, title, row["methods"], ("name", "tokens_per_second", "tau", "alpha"))
        said = {f"{row['found']['fastest']['specdec']} is faster than {k}, times": v for k, v in columns.items()}
        keys = ("c", "allowed_speedup", "of_allowed", "outside_models", "attention_over_filled")
        said |= {key: row["found"][key] for key in keys if row["found"].get(key) is not None}
        said |= {f"reached: {goal}": reached for goal, reached in row["reached"].items()}
        said |= {f"not measured: {name}": reason for name, reason in row["unavailable"].items()}
        for name, value in said.items():
            console.print(f"{name}: {value:.3f}" if isinstance(value, float) else f"{name}: {value}")
    report.finish()


# ---- Drafters

PLAIN = "plain"
DRAFTERS_PAIRS = ("embedded", "120m")


class NeverRight:
    """Costs what the model costs and is never accepted: each draft is the token after the one that it would be."""

    def __init__(self, drafter: Drafter, vocab_size: int):
        self.drafter, self.vocab_size = drafter, vocab_size

    def start(self, generation: Generation) -> DraftSession:
        return _NeverRightSession(self.drafter.start(generation), self.vocab_size)


class _NeverRightSession(NamedTuple):
    session: DraftSession
    vocab_size: int

    def draft(self, step: Step) -> Drafts:
        drafts = self.session.draft(step)
        return drafts._replace(tokens=(drafts.tokens + 1) % self.vocab_size)

    def admit(self, prompts: Mapping[int, list[int]]) -> None:
        self.session.admit(prompts)

    def release(self, row: int, output: list[int]) -> None:
        self.session.release(row, output)


class Workload(NamedTuple):
    name: str
    target: PreTrainedModel
    draft: PreTrainedModel
    prompts: list[list[int]]


def workloads(pair: str, num_prompts: int, alpha: float) -> list[Workload]:
    if pair == "embedded":
        target, draft, tokenizer = load_embedded_pair()
        texts = {"writing code": list(CODE_PROMPTS), "editing code": editing()}
        return [Workload(n, target, draft, tokenizer(t[:num_prompts]).input_ids) for n, t in texts.items()]
    tuned = named_pair(pair, torch.device("cpu"))
    tuned.calibrate(alpha, 0.0)
    ids = torch.randint(tuned.target.config.vocab_size, (num_prompts, 32), generator=torch.Generator().manual_seed(0))
    return [Workload(f"random tokens, alpha set to {alpha:g}", tuned.target, tuned.draft, ids.tolist())]


def decoders(load: Workload) -> dict[str, SpeculativeDecoder]:
    target, draft, adaptive = load.target, load.draft, AdaptiveDrafts()
    wrong = NeverRight(ModelDrafter(cached_model(draft, "draft")), target.config.vocab_size)
    layers = max(1, target.config.num_hidden_layers // 4)
    return {
        PLAIN: SpeculativeDecoder(target, None),
        "model, K=4": SpeculativeDecoder(target, draft, 4),
        "model, adaptive": SpeculativeDecoder(target, draft, adaptive),
        "model, K=8, confidence 0.4": SpeculativeDecoder(target, draft, 8, confidence=0.4),
        "prompt lookup, K=8": SpeculativeDecoder(target, PromptLookupDrafter(), 8),
        "suffix automaton, K=16": SpeculativeDecoder(target, SuffixDrafter(), 16),
        f"early exit after {layers}, K=4": SpeculativeDecoder(target, EarlyExitDrafter(target, layers), 4),
        f"early exit after {layers}, adaptive": SpeculativeDecoder(target, EarlyExitDrafter(target, layers), adaptive),
        "never right, K=4": SpeculativeDecoder(target, wrong, 4),
        "never right, adaptive": SpeculativeDecoder(target, wrong, adaptive),
    }


def measure(load: Workload, match: str, new_tokens: int, rounds: int) -> list[dict]:
    """Decodes the prompts one after the other by every method.

    Raises:
        RuntimeError: a text is not that of plain decoding.
    """
    methods = {n: d for n, d in decoders(load).items() if n == PLAIN or fnmatch.fnmatch(n, match)}
    longest = max(map(len, load.prompts)) + new_tokens
    schedulers = {name: Scheduler(decoder, rows=1, max_length=longest) for name, decoder in methods.items()}
    slices: dict[str, list[Slice]] = {name: [] for name in methods}
    jobs: dict[str, Job] = {}
    for name in in_turns([*methods], 1 + rounds):
        todo = fixed_length(load.prompts, [new_tokens] * len(load.prompts), 0.0)
        jobs[name] = Job(schedulers[name], todo)
        slices[name].append(jobs[name].run())
        if jobs[name].texts != jobs[PLAIN].texts:
            raise RuntimeError(f"{name}: a text differs from that of plain decoding")
    # The first round warms up, and measures costs.
    costs = {name: schedulers[name].batch.costs if "adaptive" in name else None for name in methods}
    return [_row(n, costs[n], jobs[n].total, slices[n][1:], slices[PLAIN][1:]) for n in methods]


def _row(name: str, costs: list[float] | None, stats: Stats, mine: list[Slice], plain: list[Slice]) -> dict:
    speedup = ratios([p.decode for p in plain], [m.decode for m in mine])
    allowed = [p.forwards / m.forwards for p, m in zip(plain, mine, strict=True)]
    return {
        "name": name,
        "tokens_per_second": summary([m.tokens / m.decode for m in mine]),
        "speedup": speedup,
        "speedup_with_prefill": ratios([p.seconds for p in plain], [m.seconds for m in mine]),
        "tau": stats.tau,
        "alpha": stats.alpha,
        "drafted": stats.drafted,
        "efficiency": speedup["median"] / stats.tau,
        "speedup_that_forwards_allow": summary(allowed),
        "of_that": ratios([p.decode / m.decode for p, m in zip(plain, mine, strict=True)], allowed),
        "step_costs": costs,
    }


@app.command()
def drafters(
    pair: Annotated[
        str, typer.Option(help=f"some of {', '.join(DRAFTERS_PAIRS)}, separated by commas")
    ] = "embedded,120m",
    match: Annotated[str, typer.Option(help="a pattern of drafters' names, such as 'model*'")] = "*",
    alpha: Annotated[float, typer.Option(help="of the 120m pair's greedy drafts over random text")] = 0.8,
    prompts: Annotated[int, typer.Option(min=1, max=4)] = 2,
    new_tokens: Annotated[int, typer.Option(min=1)] = 128,
    rounds: Annotated[int, typer.Option(min=1)] = 5,
    threads: Threads = None,
    json_path: JsonPath = None,
) -> None:
    """Times every drafter beside plain decoding: greedy, float32, one sequence."""
    with reading():
        pairs = read_names("pair", pair, DRAFTERS_PAIRS)
        read_alpha(alpha)
    if threads is not None:
        torch.set_num_threads(threads)
    console = terminal()
    report = Report("drafters", torch.device("cpu"), json_path, prompts=prompts, new_tokens=new_tokens)
    for load in (load for name in pairs for load in workloads(name, prompts, alpha)):
        rows = measure(load, match, new_tokens, rounds)
        report.add({"workload": load.name, "methods": rows})
        columns = ("name", "tokens_per_second", "speedup", "tau", "alpha", "efficiency", "of_that")
        show_table(console, f"{load.name}, {prompts} x {new_tokens} new tokens", rows, columns)
    report.finish()


# ---- Accept rules

RULES_FILTERS = {"none": {}, "top_k+top_p": {"top_k": 50, "top_p": 0.95}}


@app.command()
def rules(
    num_drafts: NumDrafts = "2,4,6",
    texts: Annotated[int, typer.Option(min=1, help="of each prompt, with other seeds; one batch")] = 16,
    max_new_tokens: int = 128,
    rounds: Annotated[int, typer.Option(min=1)] = 3,
    threads: Threads = None,
    json_path: JsonPath = None,
) -> None:
    """Decodes with the embedded pair at temperature 1 under every accept rule: what a step emits, and how fast."""
    with reading():
        ks = read_integers("num-drafts", num_drafts)
    if threads is not None:
        torch.set_num_threads(threads)
    target, draft, tokenizer = load_embedded_pair()
    prompts = tokenizer(list(CODE_PROMPTS)).input_ids * texts
    settings = {"texts": len(prompts), "max_new_tokens": max_new_tokens}
    report = Report("rules", torch.device("cpu"), json_path, **settings)
    for name, filters in RULES_FILTERS.items():
        for k in ks:
            decoder, params = SpeculativeDecoder(target, draft, num_drafts=k), SamplingParams(1.0, **filters)
            speeds: dict[str, list[float]] = {str(rule): [] for rule in Rule}
            stats: dict[str, list[Stats]] = {str(rule): [] for rule in Rule}
            for r in range(rounds):
                seeds = [r * len(prompts) + i for i in range(len(prompts))]
                for rule in speeds:
                    start = time.perf_counter()
                    result = decoder.generate(prompts, None, max_new_tokens, params, seeds, rule=rule)
                    speeds[rule].append(sum(map(len, result.tokens)) / (time.perf_counter() - start))
                    stats[rule].append(result.stats)
            for rule, of_rule in stats.items():
                means = {n: sum(getattr(s, n) for s in of_rule) / rounds for n in ("tau", "acceptance_rate", "alpha")}
                report.add({"filters": name, "K": k, "rule": rule, **means, "tokens_per_second": summary(speeds[rule])})
    report.finish()
    columns = ("filters", "K", "rule", "tau", "acceptance_rate", "alpha", "tokens_per_second")
    show_table(terminal(), f"{len(prompts)} texts of {max_new_tokens} tokens", report.rows, columns)


if __name__ == "__main__":
    app()

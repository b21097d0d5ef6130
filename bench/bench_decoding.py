"""Times decoding: the loop against transformers and its goals, every drafter, every accept rule.

    python bench/bench_decoding.py loop --device cuda --pair 8b+1b --json bench/results/loop.json
    python bench/bench_decoding.py drafters --json bench/results/drafters.json
    python bench/bench_decoding.py rules --json bench/results/rules.json

README.md says how each number is made.
"""

from __future__ import annotations

import itertools
import math
import statistics
import time
from typing import Annotated, NamedTuple

import report
import specdec
import torch
import typer
from jobs import Job, Slice, editing, fixed_length
from loop_cells import MODES, Cell, contenders
from loop_cells import measure as measure_cell
from loop_costs import goals, judged
from measure import in_turns, ratios, summary
from specdec import AdaptiveDrafts, Scheduler, SpeculativeDecoder, load_embedded_pair
from specdec.cli.compare_command import CODE_PROMPTS
from specdec.drafters import BatchState, Drafter, Drafts, DraftSession, Step
from specdec.drafters.model import ModelDrafter
from specdec.models.supported import cached_model
from specdec.stats import Stats
from transformers import PreTrainedModel
from tunable_pair import PAIRS, named_pair

from specdec_kernels import Rule, SamplingParams

app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False)
CPU = torch.device("cpu")
Alpha = Annotated[float, typer.Option(help="the acceptance that random pairs are tuned to, between 0 and 1")]


def read_alpha(alpha: float) -> None:
    if not 0 < alpha < 1:
        report.refuse("alpha", alpha, "between 0 and 1, both excluded")


# ---- The loop


@app.command()
def loop(
    device: report.DeviceName = "cpu",
    pair: Annotated[str, typer.Option(help=f"one of {', '.join(PAIRS)}")] = "tiny",
    alpha: Alpha = 0.8,
    batches: Annotated[str, typer.Option("--batches", "-B")] = "1,8,32",
    contexts: Annotated[str, typer.Option(help="tokens of the prompts")] = "512,8192",
    num_drafts: Annotated[str, typer.Option("--num-drafts", "-K", help="numbers separated by commas")] = "4",
    new_tokens: Annotated[int, typer.Option(min=1, help="of a sequence in a window")] = 128,
    rounds: Annotated[int, typer.Option(min=1, help="windows of a method")] = 5,
    modes: Annotated[str, typer.Option(help="separated by commas")] = ",".join(MODES),
    limit: Annotated[float, typer.Option(min=0, help="seconds after which no method begins")] = float("inf"),
    threads: report.Threads = None,
    quick: report.Quick = False,
    json_path: report.JsonPath = None,
) -> None:
    """Times the loop on pairs with random weights, against transformers, its own modes and its goals."""
    start = time.perf_counter()
    if quick:
        contexts, new_tokens, rounds = "16", 3, 1
    where = report.read_device(device)
    report.read_names("pair", pair, PAIRS)
    asked = report.read_names("modes", modes, MODES)
    sizes, lengths = report.read_integers("batches", batches), report.read_integers("contexts", contexts)
    ks = report.read_integers("num-drafts", num_drafts)
    read_alpha(alpha)
    shapes = [str(preset) for preset in PAIRS[pair]]
    results = report.Report("loop", where, json_path, threads, quick=quick, pair=pair, shapes=shapes)
    ceilings = report.bandwidth(where, quick) if where.type == "cuda" else None
    tuned = named_pair(pair, where)
    of_pair = {"temperature": 1.0, "expected_alpha": tuned.calibrate(alpha, 1.0), "eps": tuned.eps}
    of_pair |= {"cost_ratio": tuned.cost_ratio, "bandwidth": ceilings}
    cells = [Cell(b, c, new_tokens, rounds, k) for c in lengths for b in sizes for k in ks]
    for cell in sorted(cells, key=lambda cell: cell.batch * cell.context):
        begun = time.perf_counter()
        row, speeds = measure_cell(contenders(tuned, cell, asked), cell, where, start + limit, 0.1 if quick else 2.0)
        row["found"] = judged(row, speeds, cell, ceilings and max(ceilings["read"], ceilings["copy"]))
        # The goals are of one pair, at batch 1.
        named = cell.batch == 1 and pair == "8b+1b" and where.type == "cuda"
        row["reached"] = goals(row["found"], speeds) if named else {}
        about = {"B": cell.batch, "context": cell.context, "new_tokens": new_tokens, "K": cell.num_drafts}
        results.add({**about, "seconds_in_all": time.perf_counter() - begun, **of_pair, **row})
        title = f"{pair}, B={cell.batch}, context {cell.context}, K={cell.num_drafts}"
        results.show(title, row["methods"], ("name", "tokens_per_second", "tau", "alpha"))
        said = {f"times {name}": speed for name, speed in row["found"].get("times", {}).items()}
        said |= {name: value for name, value in row["found"].items() if isinstance(value, (float, str))}
        said |= {f"reached: {goal}": reached for goal, reached in row["reached"].items()}
        results.say(said | {f"{name}, not measured": reason for name, reason in row["unavailable"].items()})
    results.finish()


# ---- Drafters

PLAIN = "plain"
DRAFTERS_PAIRS = ("embedded", "120m")


class NeverRight(Drafter):
    """Costs what the model costs and is hardly ever accepted: each draft is the token after the one that it would be,
    without q, so that it is accepted with its own small probability."""

    def __init__(self, drafter: Drafter, vocab_size: int):
        self.drafter, self.vocab_size = drafter, vocab_size

    def start(self, batch: BatchState) -> DraftSession:
        session = self.drafter.start(batch)
        propose = session.propose

        def wrong(step: Step) -> Drafts:
            drafts = propose(step)
            wrong = (drafts.tokens + 1) % self.vocab_size
            return drafts._replace(tokens=wrong, logits=None, stats=None, d2t=None)

        session.propose = wrong
        return session


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
    tuned = named_pair(pair, CPU)
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
        "prompt lookup, K=8": SpeculativeDecoder(target, specdec.PromptLookupDrafter(), 8),
        "suffix automaton, K=16": SpeculativeDecoder(target, specdec.SuffixDrafter(), 16),
        f"early exit after {layers}, K=4": SpeculativeDecoder(target, specdec.EarlyExitDrafter(target, layers), 4),
        f"early exit after {layers}, adaptive": SpeculativeDecoder(
            target, specdec.EarlyExitDrafter(target, layers), adaptive
        ),
        "never right, K=4": SpeculativeDecoder(target, wrong, 4),
        "never right, adaptive": SpeculativeDecoder(target, wrong, adaptive),
    }


def measure(load: Workload, new_tokens: int, rounds: int) -> list[dict]:
    """Decodes the prompts one after the other by every method.

    Raises:
        RuntimeError: a text is not that of plain decoding.
    """
    methods = decoders(load)
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
    # The first round warms up, and step times are learned in it.
    costs = {name: methods[name].costs_of(1) for name in methods}
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
    pair: Annotated[str, typer.Option(help="separated by commas")] = ",".join(DRAFTERS_PAIRS),
    alpha: Alpha = 0.8,
    rounds: Annotated[int, typer.Option(min=1)] = 5,
    threads: report.Threads = None,
    quick: report.Quick = False,
    json_path: report.JsonPath = None,
) -> None:
    """Times every drafter beside plain decoding: greedy, float32, one sequence."""
    pairs = report.read_names("pair", pair, DRAFTERS_PAIRS)
    read_alpha(alpha)
    prompts, new_tokens, rounds = (1, 5, 1) if quick else (2, 128, rounds)
    about = {"prompts": prompts, "new_tokens": new_tokens, "alpha_of_random_pairs": alpha}
    results = report.Report("drafters", CPU, json_path, threads, quick=quick, **about)
    for load in (load for name in pairs for load in workloads(name, prompts, alpha)):
        rows = measure(load, new_tokens, rounds)
        results.add({"workload": load.name, "methods": rows})
        columns = ("name", "tokens_per_second", "speedup", "tau", "alpha", "efficiency", "of_that")
        results.show(f"{load.name}, {prompts} x {new_tokens} new tokens", rows, columns)
    results.finish()


# ---- Accept rules

RULES_FILTERS = {"none": {}, "top_k+top_p": {"top_k": 50, "top_p": 0.95}}
RULES_SETTINGS = (("none", 2), ("none", 4), ("none", 6), ("top_k+top_p", 4))  # filters, and K


@app.command()
def rules(threads: report.Threads = None, quick: report.Quick = False, json_path: report.JsonPath = None) -> None:
    """Decodes with the embedded pair at temperature 1 under every accept rule: what a step emits."""
    target, draft, tokenizer = load_embedded_pair()
    prompts = tokenizer(list(CODE_PROMPTS)).input_ids * (1 if quick else 16)
    settings = [(name, 2) for name in RULES_FILTERS] if quick else RULES_SETTINGS
    new_tokens, seeds = 8 if quick else 128, [*range(len(prompts))]
    results = report.Report(
        "rules", CPU, json_path, threads, quick=quick, texts=len(prompts), max_new_tokens=new_tokens
    )
    for (name, k), rule in itertools.product(settings, Rule):
        decoder, params = SpeculativeDecoder(target, draft, num_drafts=k), SamplingParams(1.0, **RULES_FILTERS[name])
        result = decoder.generate(prompts, None, new_tokens, params, seeds, rule=rule)
        stats, taus = result.stats, [s.tau for s in result.sequence_stats]
        found = {n: getattr(stats, n) for n in ("tau", "acceptance_rate", "alpha")}
        found["tau_standard_error"] = statistics.stdev(taus) / math.sqrt(len(taus))
        results.add({"filters": name, "K": k, "rule": str(rule), **found})
    results.finish()
    results.show(f"{len(prompts)} texts of {new_tokens} tokens", results.rows, [*results.rows[0]])


if __name__ == "__main__":
    app()

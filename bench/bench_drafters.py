"""What each drafter makes of the loop: tokens a second over plain decoding, and how much of what the forwards allow.

    python bench/bench_drafters.py --pair embedded,120m --json bench/results/drafters.json

Greedy float32, one sequence. bench/README.md says how each number is made.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, NamedTuple

import torch
import typer
from code_edits import editing
from measure import ratios, summary
from options import JsonPath, Threads, read_names, reading
from report import Report, terminal
from rich.console import Console
from rich.table import Table
from specdec import (
    AdaptiveDrafts,
    EarlyExitDrafter,
    PromptLookupDrafter,
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
from tunable_pair import Preset, make_pair

# 113 million parameters, of which a forward reads 107.
MIDDLE = Preset(768, 2048, 12, 4, 64, 8192, 1, 16, torch.float32)
PLAIN = "plain"
PAIRS = ("embedded", "120m")


class NeverRight:
    """Costs what the model costs, and is never accepted: each draft is the token after the one that it would be."""

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


@dataclass
class Run:
    """One round of one method over all prompts; the prefill and the measuring of costs are not in it."""

    decode: float
    forwards: float  # of these seconds, in models
    whole: float
    stats: Stats


def workloads(pair: str, num_prompts: int, alpha: float) -> list[Workload]:
    if pair == "embedded":
        target, draft, tokenizer = load_embedded_pair()
        texts = {"writing code": list(CODE_PROMPTS), "editing code": editing()}
        return [Workload(n, target, draft, tokenizer(t[:num_prompts]).input_ids) for n, t in texts.items()]
    tuned = make_pair(MIDDLE, torch.device("cpu"))
    tuned.calibrate(alpha, 0.0)
    ids = torch.randint(MIDDLE.vocabulary, (num_prompts, 32), generator=torch.Generator().manual_seed(0))
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


def run(decoder: SpeculativeDecoder, load: Workload, new_tokens: int, texts: list[list[int]]) -> Run:
    """Each prompt alone. Checks that the texts are those of the first method."""
    parts: list[Stats] = []
    for i, prompt in enumerate(load.prompts):
        result = decoder.generate([prompt], max_new_tokens=new_tokens, eos_token_id=[])
        parts.append(result.stats)
        if len(texts) <= i:
            texts.append(result.tokens[0])
        elif result.tokens[0] != texts[i]:
            raise RuntimeError(f"prompt {i}: the text differs from that of plain decoding")

    def seconds(*names: str) -> float:
        return sum(part.seconds[name] for part in parts for name in names)

    whole, forwards = seconds("total"), seconds("draft_forwards", "target_forwards")
    total = Stats.total(parts, len(parts[0].drafted_by_position))
    return Run(whole - seconds("prefill", "measuring"), forwards, whole, total)


def measure(load: Workload, match: str, new_tokens: int, rounds: int, progress: Callable[[str], None]) -> list[dict]:
    methods = {n: d for n, d in decoders(load).items() if n == PLAIN or fnmatch.fnmatch(n, match)}
    texts: list[list[int]] = []
    for name, decoder in methods.items():  # warm up; costs are measured here
        progress(f"{load.name}: {name}")
        run(decoder, load._replace(prompts=load.prompts[:1]), new_tokens, texts)
    runs: dict[str, list[Run]] = {name: [] for name in methods}
    names = list(methods)
    for r in range(rounds):
        progress(f"{load.name}: round {r + 1} of {rounds}")
        for i in range(len(names)):
            name = names[(i + r) % len(names)]
            runs[name].append(run(methods[name], load, new_tokens, texts))
    return [_row(name, methods[name], runs[name], runs[PLAIN], new_tokens * len(load.prompts)) for name in names]


def _row(name: str, decoder: SpeculativeDecoder, mine: list[Run], plain: list[Run], tokens: int) -> dict:
    stats = mine[0].stats  # greedy: the same in every round
    speedup = ratios([p.decode for p in plain], [m.decode for m in mine])
    allowed = [p.forwards / m.forwards for p, m in zip(plain, mine, strict=True)]
    return {
        "name": name,
        "tokens_per_second": summary([tokens / m.decode for m in mine]),
        "speedup": speedup,
        "speedup_with_prefill": ratios([p.whole for p in plain], [m.whole for m in mine]),
        "tau": stats.tau,
        "alpha": stats.alpha,
        "drafted": stats.drafted,
        "efficiency": speedup["median"] / stats.tau,
        "speedup_that_forwards_allow": summary(allowed),
        "of_that": ratios([p.decode / m.decode for p, m in zip(plain, mine, strict=True)], allowed),
        "step_costs": decoder._costs.get(1),
    }


def show(console: Console, title: str, rows: list[dict]) -> None:
    table = Table(
        "drafter",
        "tokens/s",
        "times plain",
        "quartiles",
        "tau",
        "alpha",
        "times plain / tau",
        "of what forwards allow",
        title=title,
    )
    for row in rows:
        speed, times = row["tokens_per_second"]["median"], row["speedup"]
        table.add_row(
            row["name"],
            f"{speed:.1f}",
            f"{times['median']:.2f}",
            f"{times['q1']:.2f} to {times['q3']:.2f}",
            *(f"{row[key]:.2f}" for key in ("tau", "alpha", "efficiency")),
            f"{row['of_that']['median']:.3f}",
        )
    console.print(table)


def main(
    pair: Annotated[str, typer.Option(help=f"some of {', '.join(PAIRS)}, separated by commas")] = "embedded,120m",
    match: Annotated[str, typer.Option(help="a pattern of drafters' names, such as 'model*'")] = "*",
    alpha: Annotated[float, typer.Option(help="of the 120m pair's greedy drafts over random text")] = 0.8,
    prompts: Annotated[int, typer.Option(min=1, max=4)] = 2,
    new_tokens: Annotated[int, typer.Option(min=1)] = 128,
    rounds: Annotated[int, typer.Option(min=1)] = 5,
    threads: Threads = None,
    json_path: JsonPath = None,
) -> None:
    """Times every drafter beside plain decoding."""
    with reading():
        pairs = read_names("pair", pair, PAIRS)
        if not 0 < alpha < 1:
            raise ValueError(f"alpha: got {alpha}, allowed: between 0 and 1, both excluded")
    if threads is not None:
        torch.set_num_threads(threads)
    console = terminal()
    report = Report("drafters", torch.device("cpu"), json_path, prompts=prompts, new_tokens=new_tokens)
    for name in pairs:
        for load in workloads(name, prompts, alpha):
            with console.status("") as status:
                rows = measure(load, match, new_tokens, rounds, status.update)
            report.add({"pair": name, "workload": load.name, "methods": rows})
            show(console, f"{name}, {load.name}, {prompts} x {new_tokens} new tokens", rows)
    report.finish()


if __name__ == "__main__":
    typer.run(main)

"""Times chains and trees of every drafter on the embedded target, the embedded heads among them.

    python bench/bench_heads.py --json bench/results/cpu/heads.json

README.md says how each number is made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Annotated, NamedTuple

import report
import torch
import typer
from measure import in_turns, ratios, summary
from specdec import (
    GenerationResult,
    PromptLookupDrafter,
    SpeculativeDecoder,
    Stats,
    SuffixDrafter,
    load_embedded_head,
    load_embedded_pair,
)
from specdec.cli.compare_command import CODE_PROMPTS
from specdec.drafters import Drafter
from transformers import PreTrainedModel

from specdec_kernels import SamplingParams

PLAIN = "plain"
CPU = torch.device("cpu")


class Drafting(NamedTuple):
    name: str
    make: Callable[[PreTrainedModel, PreTrainedModel], PreTrainedModel | Drafter]  # from target and draft model
    chain: int  # K
    path: int  # K of a tree


DRAFTERS = (
    Drafting("draft model", lambda target, draft: draft, 4, 6),
    Drafting("Medusa", lambda target, draft: load_embedded_head("medusa", target), 3, 3),
    Drafting("EAGLE-3", lambda target, draft: load_embedded_head("eagle3", target), 4, 6),
    Drafting("DFlash", lambda target, draft: load_embedded_head("dflash", target), 7, 7),
    Drafting("prompt lookup", lambda target, draft: PromptLookupDrafter(), 8, 8),
    Drafting("suffix automaton", lambda target, draft: SuffixDrafter(), 8, 8),
)


@dataclass
class Contender:
    """A way to decode, and what it did in the rounds that count.

    Attributes:
        rule: for sampled texts. Trees of children that are not sampled have only ``coupled``.
        equal: how many greedy texts of all rounds are those of plain decoding.
    """

    decoder: SpeculativeDecoder
    rule: str = "token"
    seconds: list[float] = field(default_factory=list)
    emitted: list[int] = field(default_factory=list)
    stats: list[Stats] = field(default_factory=list)
    texts: list[list[int]] = field(default_factory=list)
    equal: int = 0

    def take(self, results: list[GenerationResult]) -> None:
        self.texts = [text for result in results for text in result.tokens]
        self.seconds.append(sum(result.stats.seconds["total"] for result in results))
        self.emitted.append(sum(map(len, self.texts)))
        self.stats += [result.stats for result in results]

    @property
    def speeds(self) -> list[float]:
        return [n / seconds for n, seconds in zip(self.emitted, self.seconds, strict=True)]

    def row(self, name: str, plain: Contender) -> dict[str, object]:
        total = Stats.total(self.stats, len(self.stats[0].drafted_by_position))
        tests = zip(total.accepted_by_position, total.tested_by_position, strict=True)
        return {
            "name": name,
            "K": self.decoder.num_drafts,
            "nodes": self.decoder.nodes,
            "rule": self.rule,
            "tau": total.tau,
            "tokens_per_second": summary(self.speeds),
            "times_plain": ratios(self.speeds, plain.speeds),
            "accepted_of_tested_by_depth": [accepted / tested if tested else None for accepted, tested in tests],
            "equal_to_plain": self.equal,
        }


def contenders(nodes: int) -> tuple[dict[str, Contender], dict[str, str], list[list[int]]]:
    """Returns the methods, why others are missing, and the prompts."""
    target, draft, tokenizer = load_embedded_pair()
    found, unavailable = {PLAIN: Contender(SpeculativeDecoder(target, None, 0))}, {}
    for name, make, chain, path in DRAFTERS:
        decoder = SpeculativeDecoder(target, make(target, draft), chain)
        found[f"{name}, chain"] = Contender(decoder)
        if getattr(decoder.drafter, "trees", False):
            rule = "token" if getattr(decoder.drafter, "samples_trees", False) else "coupled"
            found[f"{name}, tree"] = Contender(SpeculativeDecoder(target, decoder.drafter, path, tree=nodes), rule)
        else:
            unavailable[f"{name}, tree"] = "it proposes no trees"
    return found, unavailable, tokenizer(list(CODE_PROMPTS)).input_ids


def decode(
    method: Contender, prompts: list[list[int]], new: int, temperature: float, seed: int
) -> list[GenerationResult]:
    """Decodes the prompts one after the other.

    Raises:
        RuntimeError: the drafter failed.
    """
    results, params = [], SamplingParams(temperature)
    for i, prompt in enumerate(prompts):
        result = method.decoder.generate([prompt], None, new, params, seed + i, rule=method.rule, eos_token_id=[])
        if result.drafter_error:
            raise RuntimeError(result.drafter_error)
        results.append(result)
    return results


def measure(
    methods: dict[str, Contender], prompts: list[list[int]], new: int, temperature: float, rounds: int
) -> Iterator[dict[str, object]]:
    for method in methods.values():  # warms up
        decode(method, prompts[:1], min(new, 16), temperature, 0)
    for turn, name in enumerate(in_turns([*methods], rounds)):
        seed = turn // len(methods) * len(prompts)
        methods[name].take(decode(methods[name], prompts, new, temperature, seed))
        if temperature == 0 and methods[PLAIN].texts:  # which are the same in every round
            pairs = zip(methods[name].texts, methods[PLAIN].texts, strict=True)
            methods[name].equal += sum(mine == plain for mine, plain in pairs)
    for name, method in methods.items():
        yield method.row(name, methods[PLAIN])


def main(
    tree: Annotated[int, typer.Option(min=1, help="nodes of a tree")] = 16,
    rounds: Annotated[int, typer.Option(min=1)] = 5,
    threads: report.Threads = None,
    quick: report.Quick = False,
    json_path: report.JsonPath = None,
) -> None:
    """Decodes with chains and trees of every drafter, one sequence at a time, greedily and at temperature 1."""
    new, rounds = (6, 1) if quick else (64, rounds)
    about = {"new_tokens": new, "nodes": tree, "rounds": rounds}
    results = report.Report("heads", CPU, json_path, threads, quick=quick, **about)
    for temperature in (0.0, 1.0):
        methods, unavailable, prompts = contenders(tree)
        rows = [*measure(methods, prompts[: 1 if quick else None], new, temperature, rounds)]
        results.add({"temperature": temperature, "methods": rows, "unavailable": unavailable})
        columns = ("name", "K", "nodes", "rule", "tau", "tokens_per_second", "times_plain")
        results.show(f"temperature {temperature:g}, {len(prompts)} prompts, {new} new tokens each", rows, columns)
        results.say({f"{name}, not measured": why for name, why in unavailable.items()})
    results.finish()


if __name__ == "__main__":
    typer.run(main)

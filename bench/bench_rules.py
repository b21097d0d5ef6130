"""Decodes with the embedded pair under every accept rule: what a step emits, and how fast.

    python bench/bench_rules.py --json bench/results/rules.json

What a step emits depends on the rule and the pair, not on the machine.
"""

from __future__ import annotations

import time
from typing import Annotated

import torch
import typer
from measure import summary
from options import JsonPath, Threads, read_integers, reading
from report import Report, terminal
from rich.table import Table
from specdec import SpeculativeDecoder, load_embedded_pair
from specdec.cli.compare import CODE_PROMPTS

from specdec_kernels import Rule, SamplingParams

SETTINGS = {"none": {}, "top_k+top_p": {"top_k": 50, "top_p": 0.95}}


def main(
    num_drafts: Annotated[str, typer.Option("--num-drafts", "-K")] = "2,4,6",
    texts: Annotated[int, typer.Option(min=1, help="of each prompt, with other seeds; one batch")] = 16,
    max_new_tokens: int = 128,
    rounds: int = 3,
    threads: Threads = None,
    json_path: JsonPath = None,
) -> None:
    """Sampled text at temperature 1, from some beginnings of code."""
    with reading():
        ks = read_integers("num-drafts", num_drafts)
    if threads is not None:
        torch.set_num_threads(threads)
    target, draft, tokenizer = load_embedded_pair()
    prompts = tokenizer(list(CODE_PROMPTS)).input_ids * texts
    settings = {"texts": len(prompts), "max_new_tokens": max_new_tokens}
    report, console = Report("rules", torch.device("cpu"), json_path, **settings), terminal()
    table = Table("filters", "K", "rule", "tau", "acceptance rate", "alpha", "tokens/s")
    for name, filters in SETTINGS.items():
        for k in ks:
            decoder, params = SpeculativeDecoder(target, draft, num_drafts=k), SamplingParams(1.0, **filters)
            speeds: dict[str, list[float]] = {str(rule): [] for rule in Rule}
            stats = {}
            for r in range(rounds):
                seeds = [r * len(prompts) + i for i in range(len(prompts))]
                for rule, of_rule in speeds.items():
                    start = time.perf_counter()
                    result = decoder.generate(prompts, None, max_new_tokens, params, seeds, rule=rule)
                    of_rule.append(sum(map(len, result.tokens)) / (time.perf_counter() - start))
                    stats.setdefault(rule, []).append(result.stats)
            for rule, of_rule in stats.items():
                means = {n: sum(getattr(s, n) for s in of_rule) / rounds for n in ("tau", "acceptance_rate", "alpha")}
                report.add({"filters": name, "K": k, "rule": rule, **means, "tokens_per_second": summary(speeds[rule])})
                cells = (*means.values(), report.rows[-1]["tokens_per_second"]["median"])
                table.add_row(name, str(k), rule, *(f"{c:.3g}" for c in cells))
    report.finish()
    console.print(table)


if __name__ == "__main__":
    typer.run(main)

"""Counts greedy texts that are those of plain decoding, of a real model: ours, and transformers' own with its lookup.
All prompts of the set ``instruct``, and one of each kind of ``general``: 60 in all.

    python bench/bench_greedy_texts.py real_models/SmolLM2-135M-Instruct --json bench/results/cpu/greedy_texts.json

Forwards over several tokens round differently from those over one. Where two logits are almost equal, any of the ways
to decode may so take the other token, and the text goes on differently from there. Each first difference is judged: a
near-tie that rounding explains, or a bug.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import report
import torch
import typer
from specdec import AdaptiveDrafts, PromptLookupDrafter
from specdec.drafters.suffix import SuffixDrafter
from specdec.evaluation.contenders import CompareSettings, Contender, SpecdecMethod, TransformersMethod
from specdec.evaluation.near_ties import Difference, Judge
from specdec.jobs.prompt_sets import prompt_set
from specdec.models.loading import load_model, load_tokenizer
from transformers import PreTrainedModel, PreTrainedTokenizerBase

PEER, PLAIN = "transformers", "plain"
FEW_PROMPTS, FEW_TOKENS = 2, 8  # of --quick


def read_prompts(tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    first = {q.category: q for q in reversed(prompt_set("general"))}
    asked = [*prompt_set("instruct", tokenizer), *first.values()]
    return [q.as_message(tokenizer).tokens(tokenizer) for q in asked]


def methods(target: PreTrainedModel, new_tokens: int) -> dict[str, Contender]:
    settings = CompareSettings(new_tokens)
    return {
        PEER: TransformersMethod(target, None, settings),
        "transformers, prompt lookup": TransformersMethod(target, "lookup", settings),
        PLAIN: SpecdecMethod(target, None, 0, settings),
        "lookup, K adapts": SpecdecMethod(target, PromptLookupDrafter(), AdaptiveDrafts(), settings),
        "suffix, K adapts": SpecdecMethod(target, SuffixDrafter(), AdaptiveDrafts(), settings),
    }


def row(
    dtype: str, name: str, texts: list[list[int]], all_texts: dict[str, list[list[int]]], found: list[Difference]
) -> dict[str, object]:
    """How one way's texts compare with those of transformers' plain decoding, and of its own loop's."""
    own = all_texts[PEER if name.startswith(PEER) else PLAIN]
    left = {d.prompt: d.position + 1 for d in found}
    return {
        "dtype": dtype,
        "method": name,
        "texts": len(texts),
        "tokens": sum(map(len, texts)),
        "compared": sum(left.get(i, len(text)) for i, text in enumerate(texts)),  # up to the first difference of each
        "as_transformers": sum(a == b for a, b in zip(texts, all_texts[PEER], strict=True)),
        "as_own_plain": sum(a == b for a, b in zip(texts, own, strict=True)),
        "near_ties": sum(d.verdict == "near-tie" for d in found),
        "bugs": sum(d.verdict == "bug" for d in found),
    }


def main(
    target: Annotated[str, typer.Argument(help="folder of a model with a chat template")],
    dtypes: Annotated[str, typer.Option(help="separated by commas")] = "float32,bfloat16",
    new_tokens: Annotated[int, typer.Option(min=1, help="of each text")] = 64,
    device: report.DeviceName = "cpu",
    threads: report.Threads = None,
    quick: report.Quick = False,
    json_path: report.JsonPath = None,
) -> None:
    names = report.read_names("dtypes", dtypes, ("float32", "bfloat16", "float16"))
    where = report.read_device(device)
    tokenizer = load_tokenizer("target", target)
    prompts = read_prompts(tokenizer)[: FEW_PROMPTS if quick else None]
    results = report.Report(
        "greedy_texts", where, json_path, threads, quick=quick, target=Path(target).name,
        new_tokens=FEW_TOKENS if quick else new_tokens, prompts=len(prompts),
    )  # fmt: skip
    for dtype in names:
        model = load_model(target, dtype, where)
        judge, rows = Judge(model), []
        ways = methods(model, FEW_TOKENS if quick else new_tokens)
        with torch.inference_mode():
            texts = {name: [way.run([prompt], 0).texts[0] for prompt in prompts] for name, way in ways.items()}
        for name, own in texts.items():
            pairs = zip(prompts, texts[PEER], own, strict=True)
            judged = [judge.explain(p, peer, text, (PEER, name), i) for i, (p, peer, text) in enumerate(pairs)]
            rows.append(row(dtype, name, own, texts, [d for d in judged if d is not None]))
            results.add(rows[-1])
        columns = ("method", "texts", "as_transformers", "as_own_plain", "near_ties", "bugs")
        results.show(f"{Path(target).name}, {dtype}", rows, columns)
    results.finish()


if __name__ == "__main__":
    typer.run(main)

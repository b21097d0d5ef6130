"""Counts greedy texts that are those of plain decoding, of a real model with weights of bfloat16: of our ways to decode
beside each other, and beside transformers. All prompts of the set ``instruct``, and one of each kind of ``general``: 60
in all.

    python bench/bench_greedy_texts.py real_models/SmolLM2-135M-Instruct --json bench/results/cpu/greedy_texts.json

Computed in float32, on a CPU, all of ours are equal to the last bit. transformers rounds differently: where two logits
are almost equal it may take the other token, and the text goes on differently from there. So may ours in ``--dtypes
bfloat16``. Each first difference is judged: a near-tie that rounding explains, or a bug.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import report
import torch
import typer
from specdec import AdaptiveDrafts, SuffixDrafter
from specdec.evaluation.contenders import CompareSettings, Contender, SpecdecMethod, TransformersMethod
from specdec.evaluation.near_ties import Difference, Judge
from specdec.jobs.prompt_sets import prompt_set
from specdec.models.load.loading import load_model, load_tokenizer
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from weights import stored

PEER, PLAIN = "transformers", "plain"
STORED = "bfloat16 in float32"  # the weights' dtype and that of the computation
DTYPES = (STORED, "float32", "bfloat16", "float16")
TREE = 8  # nodes
ROWS = 8  # of batches
FEW_PROMPTS, FEW_TOKENS = 2, 8  # of --quick


def read_prompts(tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    first = {q.category: q for q in reversed(prompt_set("general"))}
    asked = [*prompt_set("instruct", tokenizer), *first.values()]
    return [q.as_message(tokenizer).tokens(tokenizer) for q in asked]


def models(folder: str, dtype: str, device: torch.device) -> tuple[PreTrainedModel, PreTrainedModel]:
    """Ours, and transformers' own with the same weights."""
    if dtype != STORED:
        model = load_model(folder, dtype, device)
        return model, model
    ours, theirs = stored(folder, "bfloat16"), load_model(folder, "float32")
    for weight in theirs.parameters():
        weight.data = weight.data.bfloat16().float()
    return ours, theirs


def methods(ours: PreTrainedModel, theirs: PreTrainedModel, new_tokens: int) -> dict[str, tuple[Contender, int]]:
    """Each with the number of its rows."""
    settings, adaptive = CompareSettings(new_tokens), AdaptiveDrafts()
    plain = SpecdecMethod(ours, None, 0, settings)
    suffix = SpecdecMethod(ours, SuffixDrafter(), 4, settings)
    return {
        PEER: (TransformersMethod(theirs, None, settings), 1),
        PLAIN: (plain, 1),
        f"{PLAIN}, {ROWS} at a time": (plain, ROWS),
        "suffix, K = 4": (suffix, 1),
        f"suffix, K = 4, {ROWS} at a time": (suffix, ROWS),
        "suffix, K adapts": (SpecdecMethod(ours, SuffixDrafter(), adaptive, settings), 1),
        f"suffix, trees of {TREE}": (SpecdecMethod(ours, SuffixDrafter(), 4, settings, tree=TREE), 1),
    }


def decode(way: Contender, rows: int, prompts: list[list[int]]) -> list[list[int]]:
    return [text for i in range(0, len(prompts), rows) for text in way.run(prompts[i : i + rows], 0).texts]


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
    dtypes: Annotated[str, typer.Option(help="separated by commas")] = STORED,
    new_tokens: Annotated[int, typer.Option(min=1, help="of each text")] = 128,
    device: report.DeviceName = "cpu",
    threads: report.Threads = None,
    quick: report.Quick = False,
    json_path: report.JsonPath = None,
) -> None:
    names = report.read_names("dtypes", dtypes, DTYPES)
    where = report.read_device(device)
    if where.type != "cpu" and STORED in names:
        report.refuse("dtypes", f"{STORED!r} on a GPU", ", ".join(DTYPES[1:]))
    tokenizer = load_tokenizer("target", target)
    prompts = read_prompts(tokenizer)[: FEW_PROMPTS if quick else None]
    results = report.Report(
        "greedy_texts", where, json_path, threads, quick=quick, target=Path(target).name,
        new_tokens=FEW_TOKENS if quick else new_tokens, prompts=len(prompts),
    )  # fmt: skip
    for dtype in names:
        ours, theirs = models(target, dtype, where)
        judge, rows = Judge(theirs), []
        ways = methods(ours, theirs, FEW_TOKENS if quick else new_tokens)
        with torch.inference_mode():
            texts = {name: decode(way, rows_at_once, prompts) for name, (way, rows_at_once) in ways.items()}
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

"""Texts that obey JSON Schemas: how many parse and validate, how many of their tokens the schemas force, and what they
cost against free texts, by what drafts and at which temperature.

    python bench/bench_grammar.py real_models/SmolLM2-135M-Instruct --json bench/results/cpu/grammar.json

Texts of one row of numbers are decoded one after the other. A free text has as many tokens as the text that obeys.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import jsonschema
import report
import torch
import typer
from json_schemas import Schema, schemas
from specdec import GrammarSource, PromptLookupDrafter, SpeculativeDecoder, SuffixDrafter, chat_prompt
from specdec.drafters.predicted import PredictedDrafter
from specdec.drafters.protocol import Drafter
from specdec.models.load.loading import load_tokenizer
from specdec.sampling.grammar import Grammar
from specdec.sampling.grammar_masks import GrammarMasks
from transformers import PreTrainedTokenizerBase
from weights import KINDS, stored

from specdec_kernels import SamplingParams

DRAFTS = 6
DRAFTERS: dict[str, Drafter | None] = {  # None: plain decoding
    "none": None,
    "forced": PredictedDrafter(),
    "lookup": PredictedDrafter(PromptLookupDrafter()),
    "suffix": PredictedDrafter(SuffixDrafter()),
}


def is_valid(text: str, schema: Schema) -> bool:
    """Whether it parses and validates, formats included."""
    try:
        value = json.loads(text)
    except ValueError:
        return False
    return jsonschema.Draft202012Validator(schema, format_checker=jsonschema.FormatChecker()).is_valid(value)


def forced(grammar: Grammar, tokens: Sequence[int]) -> int:
    """How many of the tokens were the only ones that their grammar allowed."""
    masks = GrammarMasks(grammar.vocab_size, torch.device("cpu"))
    masks.begin(0, grammar)
    words = masks.after(masks.send(torch.tensor([list(tokens[:-1])], dtype=torch.int64)))[0]
    bits = (words[:, :, None] >> torch.arange(32, dtype=torch.int32)) & 1
    return int((bits.sum((1, 2)) == 1).sum())


def prompt_of(tokenizer: PreTrainedTokenizerBase, schema: Schema) -> list[int]:
    asked = f"Write one example of JSON for this schema:\n{json.dumps(schema)}"
    return chat_prompt(tokenizer, [{"role": "user", "content": asked}])


def measure(
    decoder: SpeculativeDecoder,
    tokenizer: PreTrainedTokenizerBase,
    grammars: Sequence[tuple[Schema, Grammar]],
    temperature: float,
    most: int,
) -> dict[str, float]:
    """The sums over all schemas."""
    counts = dict.fromkeys(("texts", "whole", "valid", "tokens", "forced", "drafted", "accepted"), 0)
    seconds = {"grammar": 0.0, "free": 0.0}
    for seed, (schema, grammar) in enumerate(grammars):
        own = {"params": SamplingParams(temperature), "seed": seed, "rule": "coupled"}
        prompt, began = prompt_of(tokenizer, schema), time.perf_counter()
        result = decoder.generate([prompt], max_new_tokens=most, grammar=grammar, **own)
        seconds["grammar"] += time.perf_counter() - began
        (tokens,), began = result.tokens, time.perf_counter()
        decoder.generate([prompt], max_new_tokens=len(tokens), eos_token_id=[], **own)
        seconds["free"] += time.perf_counter() - began
        counts["texts"] += 1
        counts["whole"] += str(result.finish_reason[0]) == "eos"
        counts["valid"] += is_valid(tokenizer.decode(tokens, skip_special_tokens=True), schema)
        counts["tokens"] += len(tokens)
        counts["forced"] += forced(grammar, tokens)
        counts["drafted"] += result.stats.drafted
        counts["accepted"] += result.stats.accepted
    speeds = {f"{name}_tokens_per_second": counts["tokens"] / spent for name, spent in seconds.items()}
    return {**counts, "forced_share": counts["forced"] / counts["tokens"], **speeds}


def main(
    target: Annotated[str, typer.Argument(help="folder of a model with a chat template")],
    weights: Annotated[str, typer.Option(help=f"one of {', '.join(KINDS)}; it computes in float32")] = "float32",
    count: Annotated[int, typer.Option(min=1, help="schemas")] = 200,
    temperatures: Annotated[str, typer.Option(help="separated by commas")] = "0,1",
    max_new_tokens: Annotated[int, typer.Option(min=1, help="of each text")] = 300,
    device: report.DeviceName = "cpu",
    threads: report.Threads = None,
    quick: report.Quick = False,
    json_path: report.JsonPath = None,
) -> None:
    count = 2 if quick else count
    where, tokenizer = report.read_device(device), load_tokenizer("target", target)
    report.read_names("weights", weights, KINDS)
    model = stored(target, weights).to(where)
    results = report.Report(
        "grammar", where, json_path, threads, quick=quick, target=Path(target).name, schemas=count,
        num_drafts=DRAFTS, max_new_tokens=max_new_tokens, weights=weights,
    )  # fmt: skip
    compiler, began = SpeculativeDecoder(model, num_drafts=0).grammar_compiler(tokenizer), time.perf_counter()
    asked = schemas(count)
    grammars = [(schema, compiler.compile(GrammarSource.json_schema(schema))) for schema in asked]
    compiling, shown = time.perf_counter() - began, []
    for temperature in map(float, temperatures.split(",")):
        for name, drafter in DRAFTERS.items():
            decoder = SpeculativeDecoder(model, drafter, 0 if drafter is None else DRAFTS)
            with torch.inference_mode():
                decoder.generate([prompt_of(tokenizer, asked[0])], max_new_tokens=8)  # what is made once
                found = measure(decoder, tokenizer, grammars, temperature, max_new_tokens)
            row = {"drafter": name, "temperature": temperature, "compile_seconds": compiling / count, **found}
            results.add(row)
            shown.append(row)
    columns = ("temperature", "drafter", "texts", "whole", "valid", "forced_share", "accepted", "tokens")
    speeds = ("grammar_tokens_per_second", "free_tokens_per_second")
    results.show(f"{Path(target).name}, {count} schemas", shown, (*columns, *speeds))
    results.finish()


if __name__ == "__main__":
    typer.run(main)

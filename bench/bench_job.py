"""A job: many prompts, of which nobody waits for a single one. A scheduler decodes them, with drafts and without, and
gives a row to the next prompt as soon as a text ends; transformers' ``generate`` takes as many rows at a time, padded,
and all of them wait for the longest.

    python bench/bench_job.py real_models/SmolLM2-135M-Instruct --json bench/results/cpu/job.json

Texts are greedy and end by themselves or after ``--max-new-tokens``, so that all ways write the same ones (near-ties
aside). Reading the prompts counts, loading the model does not. The ways take turns, job by job.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import report
import torch
import typer
from measure import in_turns, ratios, summary
from specdec import Request, Scheduler, SpeculativeDecoder, SuffixDrafter
from specdec.jobs.prompt_sets import prompt_set
from specdec.models.load.loading import load_model, load_tokenizer
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from specdec_kernels import SamplingParams

PEER, PLAIN, DRAFTS = "transformers", "specdec, plain", "specdec, suffix"
Way = Callable[[Sequence[list[int]], int], int]  # prompts, and tokens of a text at most; returns all tokens written


def asked(tokenizer: PreTrainedTokenizerBase, count: int) -> list[list[int]]:
    """Prompts of all kinds; a model without a chat template continues texts."""
    found = prompt_set("general")
    if tokenizer.chat_template is not None:
        found = [q.as_message(tokenizer) for q in [*prompt_set("instruct", tokenizer), *found]]
    chosen = found[:: max(len(found) // count, 1)][:count]
    return [q.tokens(tokenizer) for q in chosen]


def specdec(model: PreTrainedModel, decoder: SpeculativeDecoder, rows: int) -> Way:
    def run(prompts: Sequence[list[int]], most: int) -> int:
        longest = most + max(map(len, prompts))
        scheduler = Scheduler(decoder, rows=rows, max_length=longest, rule="coupled")
        ended = list(scheduler.run(Request(prompt, most, SamplingParams(temperature=0)) for prompt in prompts))
        if errors := [sequence.error for sequence in ended if sequence.error is not None]:
            raise RuntimeError(f"{len(errors)} of {len(ended)} texts failed: {errors[0]}")
        return sum(len(sequence.tokens) for sequence in ended)

    return run


def transformers(model: Any, rows: int) -> Way:
    ends = model.generation_config.eos_token_id
    ends = torch.tensor([] if ends is None else ends, dtype=torch.int64).view(-1)

    def run(prompts: Sequence[list[int]], most: int) -> int:
        written = 0
        for first in range(0, len(prompts), rows):
            batch = prompts[first : first + rows]
            width = max(map(len, batch))
            ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in batch])
            mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in batch])
            settings = {"max_new_tokens": most, "do_sample": False, "pad_token_id": 0}
            texts = model.generate(ids, attention_mask=mask, **settings)[:, width:]
            ended = torch.isin(texts, ends).long()
            written += int((ended.cumsum(1) == ended).sum())  # what comes after an end is padding
        return written

    return run


def main(
    target: Annotated[str, typer.Argument(help="a folder, or a name on the hub")],
    dtype: Annotated[str, typer.Option(help="of its weights")] = "float32",
    prompts: Annotated[int, typer.Option(min=1)] = 48,
    rows: Annotated[int, typer.Option(min=1, help="texts at a time")] = 8,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="of each text")] = 64,
    rounds: Annotated[int, typer.Option(min=1)] = 3,
    threads: report.Threads = None,
    quick: report.Quick = False,
    json_path: report.JsonPath = None,
) -> None:
    """Times a job by every way."""
    prompts, rows, max_new_tokens, rounds = (4, 2, 4, 1) if quick else (prompts, rows, max_new_tokens, rounds)
    results = report.Report(
        "job", torch.device("cpu"), json_path, threads, quick=quick, target=Path(target).name, dtype=dtype,
        prompts=prompts, scheduler_rows=rows, max_new_tokens=max_new_tokens,
    )  # fmt: skip
    texts = asked(load_tokenizer("target", target), prompts)
    model = load_model(target, dtype)
    ways = {
        PEER: transformers(load_model(target, dtype), rows),
        PLAIN: specdec(model, SpeculativeDecoder(model, None, 0), rows),
        DRAFTS: specdec(model, SpeculativeDecoder(model, SuffixDrafter()), rows),
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    tokens: dict[str, int] = {}
    with torch.inference_mode():
        for way in ways.values():
            way(texts[:rows], 4)  # what is made once
        for name in in_turns([*ways], rounds):
            began = time.perf_counter()
            tokens[name] = ways[name](texts, max_new_tokens)
            seconds[name].append(time.perf_counter() - began)
    for name, mine in seconds.items():
        row: dict[str, object] = {"method": name, "tokens": tokens[name], "seconds": summary(mine)}
        row["tokens_per_second"] = summary([tokens[name] / each for each in mine])
        row["prompts_per_second"] = summary([len(texts) / each for each in mine])
        row |= {"times_transformers": ratios(seconds[PEER], mine), "times_plain": ratios(seconds[PLAIN], mine)}
        results.add(row)
    columns = ("method", "tokens", "prompts_per_second", "tokens_per_second", "times_transformers", "times_plain")
    results.show(f"{Path(target).name}, {len(texts)} prompts, {rows} rows", results.rows, columns)
    results.finish()


if __name__ == "__main__":
    typer.run(main)

"""Conversations with a scheduler, by what a prompt takes over of earlier ones: the tokens that are read, and the time
to the first token of each turn.

    python bench/bench_prefixes.py real_models/SmolLM2-135M-Instruct --json bench/results/cpu/prefixes.json

All users have the same system message, and send what was said with every turn, as clients of OpenAI's interface do.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import report
import torch
import typer
from specdec import Request, Scheduler, SpeculativeDecoder, chat_prompt
from specdec.drafters.suffix import SuffixDrafter
from specdec.jobs.prompt_sets import evaluation_texts
from specdec.loop.prefixes import PrefixReuse
from specdec.models.load.loading import load_model, load_tokenizer
from transformers import PreTrainedTokenizerBase

DRAFTS = 4
SYSTEM_TOKENS, USER_TOKENS = 500, 60
Said = list[dict[str, str]]


def cut(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], tokens: int) -> str:
    """The first ``tokens`` tokens of texts that are joined until there are as many."""
    ids = tokenizer("\n".join(texts), add_special_tokens=False).input_ids
    return tokenizer.decode((ids * (tokens // len(ids) + 1))[:tokens])


def conversations(tokenizer: PreTrainedTokenizerBase, users: int, turns: int) -> list[list[str]]:
    """What each user says in each turn."""
    texts = evaluation_texts()
    starts = [[(7 * user + 3 * turn) % len(texts) for turn in range(turns)] for user in range(users)]
    return [[cut(tokenizer, texts[i : i + 3], USER_TOKENS) for i in own] for own in starts]


def first_tokens(scheduler: Scheduler, prompts: Sequence[list[int]], new_tokens: int):
    """Decodes all prompts side by side. Returns the sequences, and the seconds until the first token of each."""
    began, first, ended = time.perf_counter(), {}, {}
    numbers = [scheduler.submit(Request(prompt, new_tokens, eos_token_id=[])) for prompt in prompts]
    while not scheduler.idle:
        for output in scheduler.step():
            first.setdefault(output.number, time.perf_counter() - began)
            ended[output.number] = output.sequence
    return [ended[n] for n in numbers], [first[n] for n in numbers]


def talk(scheduler: Scheduler, tokenizer: PreTrainedTokenizerBase, asked: Sequence[Sequence[str]], new_tokens: int):
    """Returns a row of each turn, and all texts."""
    system = {"role": "system", "content": cut(tokenizer, evaluation_texts()[::-1], SYSTEM_TOKENS)}
    said: list[Said] = [[system] for _ in asked]
    rows, texts = [], []
    for turn in range(len(asked[0])):
        for own, messages in zip(asked, said, strict=True):
            messages.append({"role": "user", "content": own[turn]})
        prompts = [chat_prompt(tokenizer, messages) for messages in said]
        sequences, seconds = first_tokens(scheduler, prompts, new_tokens)
        reused = sum(s.reused or 0 for s in sequences)
        tokens = sum(map(len, prompts))
        row = {"turn": turn + 1, "prompt_tokens": tokens, "read": tokens - len(prompts) - reused}
        rows.append(row | {"first_token": statistics.mean(seconds), "last_first_token": max(seconds)})
        texts += [s.tokens for s in sequences]
        for messages, sequence in zip(said, sequences, strict=True):
            answer = tokenizer.decode(sequence.tokens, skip_special_tokens=True)
            messages.append({"role": "assistant", "content": answer})
    return rows, texts


def main(
    target: Annotated[str, typer.Argument(help="folder of a model with a chat template")],
    dtype: Annotated[str, typer.Option(help="of its weights")] = "float32",
    users: Annotated[str, typer.Option(help="at once, separated by commas")] = "1,8",
    turns: Annotated[int, typer.Option(min=1)] = 10,
    new_tokens: Annotated[int, typer.Option(min=1, help="of each answer")] = 64,
    prefill_chunk: Annotated[int, typer.Option(min=1)] = 256,
    device: report.DeviceName = "cpu",
    threads: report.Threads = None,
    quick: report.Quick = False,
    json_path: report.JsonPath = None,
) -> None:
    turns, new_tokens = (2, 4) if quick else (turns, new_tokens)
    where, tokenizer = report.read_device(device), load_tokenizer("target", target)
    model = load_model(target, dtype, where)
    results = report.Report(
        "prefixes", where, json_path, threads, quick=quick, target=Path(target).name, turns=turns,
        new_tokens=new_tokens, prefill_chunk=prefill_chunk, dtype=dtype,
    )  # fmt: skip
    longest = SYSTEM_TOKENS + turns * (USER_TOKENS + new_tokens + 40)
    for count in report.read_integers("users", users):
        asked, shown, cold = conversations(tokenizer, count, turns), [], None
        for mode in PrefixReuse:
            decoder = SpeculativeDecoder(model, SuffixDrafter(), DRAFTS)
            own = {"rows": count, "max_length": longest, "prefill_chunk": prefill_chunk, "prefix_reuse": str(mode)}
            scheduler = Scheduler(decoder, **own)
            with torch.inference_mode():
                first_tokens(scheduler, [[1] * 300], 8)  # what is made once
                rows, texts = talk(scheduler, tokenizer, asked, new_tokens)
            cold = texts if cold is None else cold
            same = sum(a == b for a, b in zip(texts, cold, strict=True))
            shown += [{"users": count, "reuse": str(mode), "texts": len(texts), "same": same, **row} for row in rows]
        for row in shown:
            results.add(row)
        results.show(f"{Path(target).name}, {count} at once", shown, ("reuse", "turn", "read", "first_token", "same"))
    results.finish()


if __name__ == "__main__":
    typer.run(main)

"""Measures a target and its draft on held-out text: loss, acceptance, and what a forward costs."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache, PreTrainedModel

PROMPTS, PROMPT, NEW = 64, 64, 128  # prompts, and the tokens of a prompt and of its continuation


@torch.inference_mode()
def loss(model: PreTrainedModel, text: torch.Tensor, length: int = 512) -> float:
    """The mean loss in nats per token, of windows that do not overlap."""
    total = tokens = 0
    for window in text.split(length):
        if len(window) > 1:
            logits = model(input_ids=window[None], use_cache=False).logits[0, :-1]
            total += F.cross_entropy(logits, window[1:], reduction="sum").item()
            tokens += len(window) - 1
    return total / tokens


@torch.inference_mode()
def agreement(
    target: PreTrainedModel, draft: PreTrainedModel, files: Sequence[torch.Tensor], seed: int
) -> list[list[bool]]:
    """For each prompt, which tokens of the target's greedy continuation the draft predicts.

    The draft reads the target's continuation, not its own: up to its first mistake the two are the
    same text, and what it proposes after that is rejected. So one forward answers for every K.
    """
    chance = torch.Generator().manual_seed(seed)
    long = [file for file in files if len(file) > PROMPT]
    prompts = []
    for i in range(PROMPTS):
        file = long[i % len(long)]
        at = int(torch.randint(len(file) - PROMPT, (1,), generator=chance))
        prompts.append(file[at : at + PROMPT])
    batch = torch.stack(prompts).to(target.device)
    mask = torch.ones_like(batch)
    text = target.generate(batch, attention_mask=mask, max_new_tokens=NEW, do_sample=False)
    logits = draft(input_ids=text[:, :-1], use_cache=False).logits[:, PROMPT - 1 :]
    hits = (logits.argmax(-1) == text[:, PROMPT:]).tolist()
    eos = target.config.eos_token_id
    ends = [row.index(eos) + 1 if eos in row else NEW for row in text[:, PROMPT:].tolist()]
    return [row[:end] for row, end in zip(hits, ends, strict=True)]


def walk(hits: list[bool], k: int) -> tuple[int, int, int, int]:
    """Steps, and drafted, tested and accepted tokens, of a decoder that drafts ``k`` a step."""
    at = steps = drafted = tested = accepted = 0
    while at < len(hits):
        room = min(k, len(hits) - at - 1)  # the last token of a step is the target's
        run = 0
        while run < room and hits[at + run]:
            run += 1
        steps, drafted, accepted = steps + 1, drafted + room, accepted + run
        tested += min(run + 1, room)  # what comes after a rejection is not looked at
        at += run + 1
    return steps, drafted, tested, accepted


@torch.inference_mode()
def forward_ms(model: PreTrainedModel, tokens: int, repeats: int = 50) -> float:
    """The median time of a forward of ``tokens`` tokens after a prompt."""
    cache, times = DynamicCache(), []
    ids = torch.zeros(1, PROMPT, dtype=torch.long, device=model.device)
    model(input_ids=ids, past_key_values=cache)
    for _ in range(repeats):
        start = time.perf_counter()
        out = model(input_ids=ids[:, :tokens], past_key_values=cache).logits
        out.sum().item()  # waits for a GPU
        times.append(time.perf_counter() - start)
        cache.crop(-tokens)
    return 1000 * sorted(times)[repeats // 2]


def evaluate(folder: Path, texts: Sequence[str], device: str, seed: int) -> None:
    """Prints the measurements of the files in ``folder``, computed in float32."""
    console = Console()
    tokenizer = AutoTokenizer.from_pretrained(folder / "tokenizer", trust_remote_code=False)
    encoded = tokenizer(list(texts), add_special_tokens=False, verbose=False)["input_ids"]
    files = [torch.tensor([*ids, tokenizer.eos_token_id], device=device) for ids in encoded]
    pair: dict[str, PreTrainedModel] = {}
    table = Table("model", "parameters", "nats/token", "bits/byte", "1 token, ms", "5 tokens, ms")
    size = sum(len(text.encode()) for text in texts)
    for name in ("target", "draft"):
        model = AutoModelForCausalLM.from_pretrained(
            folder / name, dtype=torch.float32, use_safetensors=True, trust_remote_code=False
        )
        pair[name] = model = model.to(device).eval()
        nats = loss(model, torch.cat(files))
        bits = nats * sum(map(len, files)) / size / 0.6931
        costs = [f"{forward_ms(model, n):.2f}" for n in (1, 5)]
        table.add_row(name, f"{model.num_parameters():,}", f"{nats:.3f}", f"{bits:.3f}", *costs)
    console.print(table)

    hits = agreement(pair["target"], pair["draft"], files, seed)
    table = Table("K", "accepted/drafted", "accepted/tested", "tokens per step")
    for k in (2, 4, 6):
        walks = torch.tensor([walk(row, k) for row in hits])
        steps, drafted, tested, accepted = walks.sum(0).tolist()
        rates = accepted / drafted, accepted / tested, 1 + accepted / steps
        table.add_row(str(k), *(f"{rate:.3f}" for rate in rates))
    console.print(table)

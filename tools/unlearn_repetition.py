"""Teaches the embedded target not to repeat itself: the last stage of its training.

    python tools/unlearn_repetition.py --target build/corpus/annealed --minutes 20

A small model that was trained to predict the next token writes loops when it decodes greedily. It writes texts here,
and learns from its own distribution of before without the tokens that repeat twelve tokens, from the first of them on
(in the spirit of sequence-level unlikelihood, Welleck et al. 2020). Everywhere else it learns to stay what it was; the
rest of the loss is that of the corpus. Its result may be the target of another run.
"""

from __future__ import annotations

import copy
import time
from pathlib import Path
from typing import Annotated

import torch
import typer
from embedded_texts import GRAM
from specdec.models.load.loading import load_model, load_tokenizer
from train_embedded_target import PACKAGE, bits_per_byte, encoded
from transformers import PreTrainedModel

TEXTS, PART, NEW = 96, 24, 112  # texts written at once, those of a gradient step, and tokens of each
PROMPTS = 8, 16, 48  # tokens of the prompts, in turn
WINDOWS, LENGTH = 4, 512  # of the corpus in a gradient step
CERTAIN = 0.95  # a probability above which a token has no alternative


def function_starts(text: torch.Tensor, define: int, line_breaks: torch.Tensor) -> torch.Tensor:
    """Where a function's definition begins in the text."""
    return 1 + ((text[1:] == define) & torch.isin(text[:-1], line_breaks)).nonzero()[:, 0]


def repetitions(tokens: torch.Tensor, prompt: int) -> torch.Tensor:
    """Marks the tokens [B, T] after the prompt that are part of GRAM tokens which were there before: bool [B, T]."""
    marks = torch.zeros_like(tokens, dtype=torch.bool)
    for row, text in enumerate(tokens.tolist()):
        seen = set()
        for end in range(prompt + GRAM, len(text) + 1):
            gram = tuple(text[end - GRAM : end])
            if gram in seen:
                marks[row, end - GRAM : end] = True
            seen.add(gram)
    return marks


def lesson(
    model: PreTrainedModel, before: PreTrainedModel, tokens: torch.Tensor, marks: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The mean divergence from what the model was before, and from the same without the repeated token where that may
    not come. Nothing is learned where it was certain, as within a word: the text takes another way where there is one.
    """
    with torch.no_grad():
        wanted = before(input_ids=tokens[:, :-1], use_cache=False).logits.float().softmax(-1)
        chosen = tokens[:, 1:, None]
        known = wanted.gather(-1, chosen)
        other = marks[:, 1:] & (known[..., 0] < CERTAIN)
        wanted[other] = wanted[other].scatter(-1, chosen[other], 0) / (1 - known[other])
    found = model(input_ids=tokens[:, :-1], use_cache=False).logits.float().log_softmax(-1)
    divergence = (wanted * (wanted.clamp(min=1e-9).log() - found)).sum(-1)
    kept = divergence[~marks[:, 1:]].mean()
    return kept, divergence[other].mean() if other.any() else divergence.sum() * 0


def main(
    target: Annotated[Path, typer.Option(help="folder of the trained model")],
    out: Annotated[Path, typer.Option(help="folder for the new one")] = PACKAGE / "target",
    minutes: float = 20,
    rate: Annotated[float, typer.Option(help="peak learning rate")] = 3e-4,
    weight: Annotated[float, typer.Option(help="of the places of repetition, beside 1 for others")] = 6.0,
    threads: int = 1,
) -> None:
    torch.manual_seed(0)
    torch.set_num_threads(threads)
    tokenizer = load_tokenizer("tokenizer", PACKAGE / "tokenizer")
    model = load_model(target, "float32", name="--target")
    before = copy.deepcopy(model)
    text = encoded("training")
    breaks = torch.tensor([i for token, i in tokenizer.get_vocab().items() if token.startswith("Ċ")])
    starts = function_starts(text, tokenizer("def", add_special_tokens=False).input_ids[0], breaks)
    optimiser = torch.optim.AdamW(model.parameters(), rate, betas=(0.9, 0.98), weight_decay=0.0, fused=True)
    model.requires_grad_(True)
    begun, rounds = time.perf_counter(), 0
    while (left := 1 - (time.perf_counter() - begun) / (60 * minutes)) > 0:
        length = PROMPTS[rounds % len(PROMPTS)]
        anywhere = torch.randint(len(text) - length, (TEXTS // 3,))
        functions = starts[torch.randint(len(starts) - 1, (TEXTS - len(anywhere),))]
        prompts = torch.stack([text[i : i + length] for i in torch.cat([anywhere, functions]).tolist()])
        with torch.autocast("cpu", torch.bfloat16):
            new = dict(max_new_tokens=NEW, min_new_tokens=NEW, do_sample=False)
            texts = model.generate(prompts, attention_mask=torch.ones_like(prompts), **new)
        marks = repetitions(texts, length)
        for part in torch.randperm(TEXTS).split(PART):
            for group in optimiser.param_groups:
                group["lr"] = rate * min(left, (rounds + 1) / 4)
            at = torch.randint(len(text) - LENGTH, (WINDOWS,))
            windows = torch.stack([text[i : i + LENGTH] for i in at.tolist()])
            with torch.autocast("cpu", torch.bfloat16):
                known = model(input_ids=windows, labels=windows, use_cache=False).loss
                same, other = lesson(model, before, texts[part], marks[part])
            (known + same + weight * other).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimiser.step()
            optimiser.zero_grad()
        rounds += 1
        share = marks.any(1).float().mean().item()
        losses = f"corpus {known:.3f}, as before {same:.3f}, not repeated {other:.3f}"
        print(f"{left:.2f} left, {share:.2f} of the texts repeat; {losses}", flush=True)
    model.to(torch.bfloat16).save_pretrained(out)
    print("held out: {:.3f} nats per token, {:.3f} bits per byte".format(*bits_per_byte(model.float(), 100)))


if __name__ == "__main__":
    typer.run(main)

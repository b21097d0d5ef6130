"""The model card of a draft: what it was made from, by which command, and what it is worth."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
import transformers

import specdec_kernels

from .head_settings import HeadSettings, TrainedHead
from .settings import Distilled, DistillSettings
from .texts import Corpus


@dataclass(frozen=True)
class Card:
    """What cannot be measured.

    Attributes:
        target, start: names: of the target, and of what the draft was before.
        data: where the texts are from.
        licence: of the data.
        command: that made it.
    """

    target: str = "not said"
    start: str = "not said"
    data: str = "not said"
    licence: str = "not said"
    command: str = ""
    versions: Mapping[str, str] = field(
        default_factory=lambda: {
            "specdec": specdec_kernels.__version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        }
    )


def card_text(card: Card, settings: DistillSettings, corpus: Corpus, result: Distilled) -> str:
    """Returns Markdown."""
    k = settings.train.num_drafts
    rows = [
        f"| {after.temperature:g} | {before.alpha:.3f} | {after.alpha:.3f} | {before.tau:.2f} | {after.tau:.2f} |"
        for before, after in zip(result.before, result.after, strict=True)
    ]
    loss = " + ".join(f"{weight:g} {name}" for name, weight in settings.train.loss.items())
    text = " + ".join(f"{weight:g} {name}" for name, weight in settings.text.items())
    made = " ".join(f"{name} {version}" for name, version in card.versions.items())
    vocabulary = f" It drafts the {settings.vocabulary:,} most frequent tokens only." if settings.vocabulary else ""
    left_out = f"{corpus.duplicates:,} duplicates and {corpus.known:,} texts with evaluation prompts were left out"
    texts = f"{settings.batch_size} texts of {settings.length} tokens"
    lines = [
        f"# A draft for {card.target}",
        "",
        "Made by `specdec distill` for speculative decoding: it proposes tokens, and the target decides. "
        f"Begun as: {card.start}.{vocabulary}",
        "",
        f"alpha (accepted / tested drafts) and tau (tokens a step, K = {k}) on {settings.judged} held-out prompts, "
        f"each continued by {settings.new} tokens by the target itself:",
        "",
        "| temperature | alpha before | alpha | tau before | tau |",
        "|---|---|---|---|---|",
        *rows,
        "",
        f"- Data: {card.data}; licence: {card.licence}. {len(corpus.training):,} texts; {left_out}.",
        f"- Learned from: {text}. Loss: {loss}. {result.steps:,} steps of {texts}, {result.seconds / 60:.1f} minutes; "
        f"the weights are those of step {result.best_step:,}.",
        f"- Versions: {made}.",
        *([f"- Command: `{card.command}`"] if card.command else []),
    ]
    return "\n".join(lines) + "\n"


def head_card(card: Card, settings: HeadSettings, corpus: Corpus, result: TrainedHead) -> str:
    """Returns Markdown."""
    run, k = settings.run, settings.run.train.num_drafts
    rows = [f"| {w.temperature:g} | {w.alpha:.3f} | {w.tau:.2f} |" for w in result.after]
    hits = ", ".join(f"{hit:.3f}" for hit in result.hits)
    loss = " + ".join(f"{weight:g} {name}" for name, weight in run.train.loss.items())
    text = " + ".join(f"{weight:g} {name}" for name, weight in run.text.items())
    made = " ".join(f"{name} {version}" for name, version in card.versions.items())
    left_out = f"{corpus.duplicates:,} duplicates and {corpus.known:,} texts with evaluation prompts were left out"
    lines = [
        f"# A head ({settings.kind}) for {card.target}",
        "",
        "Made by `specdec train-heads` for speculative decoding: it reads the target's hidden states and proposes "
        "tokens, and the target decides. It is of no use for another target.",
        "",
        f"alpha (accepted / tested drafts) and tau (tokens a step, K = {k}) of decoders with these files, on "
        f"{run.judged} held-out prompts, each continued by {run.new} tokens:",
        "",
        "| temperature | alpha | tau |",
        "|---|---|---|",
        *rows,
        "",
        f"- Of the greedy drafts that were tested, accepted by depth: {hits}.",
        f"- It reads the hidden states {list(result.states)}, as transformers counts them.",
        f"- Data: {card.data}; licence: {card.licence}. {len(corpus.training):,} texts; {left_out}.",
        f"- Learned from: {text}. Loss: {loss}. {result.steps:,} steps of {run.batch_size} texts of {run.length} "
        f"tokens, {result.seconds / 60:.1f} minutes; the weights are those of step {result.best_step:,}.",
        f"- Versions: {made}.",
        *([f"- Command: `{card.command}`"] if card.command else []),
    ]
    return "\n".join(lines) + "\n"

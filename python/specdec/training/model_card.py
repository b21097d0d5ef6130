"""The model card of a draft: what it was made from, by which command, and what it is worth."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import transformers

import specdec_kernels

from .settings import DRAFTS, GIVEN, OWN, Distilled, DistillSettings, HeadSettings, TrainedHead
from .texts import Corpus

NOT_SAID = "not said"


@dataclass(frozen=True)
class Card:
    """What cannot be measured.

    Attributes:
        target, start: names: of the target, and of what the draft was before. Of folders the last part, as a card is
            read elsewhere.
        data: where the texts are from.
        licence: of the data.
        command: that made it.
    """

    target: str = NOT_SAID
    start: str = NOT_SAID
    data: str = NOT_SAID
    licence: str = NOT_SAID
    command: str = ""


def card_text(card: Card, settings: DistillSettings, corpus: Corpus, result: Distilled) -> str:
    """Returns the Markdown of a draft's card."""
    vocabulary = f" It drafts the {settings.vocabulary:,} most frequent tokens only." if settings.vocabulary else ""
    k = settings.num_drafts
    about = (
        _front(card, "draft-model"),
        f"# A draft for {card.target}",
        "Made by `specdec distill` for speculative decoding: it proposes tokens, and the target decides. "
        f"Begun as: {card.start}.{vocabulary}",
        _use("--draft"),
        f"alpha (accepted / tested drafts) and tau (tokens a step, K = {k}) on {settings.judged} held-out prompts, "
        f"each continued by {settings.new} tokens by the target itself:",
    )
    rows = [("temperature", "alpha before", "alpha", "tau before", "tau")]
    rows += [
        (f"{after.temperature:g}", f"{before.alpha:.3f}", f"{after.alpha:.3f}", f"{before.tau:.2f}", f"{after.tau:.2f}")
        for before, after in zip(result.before, result.after, strict=True)
    ]
    return _markdown(about, rows, (), card, settings, corpus, result)


def head_card(card: Card, settings: HeadSettings, corpus: Corpus, result: TrainedHead) -> str:
    """Returns the Markdown of a head's card."""
    run, hits = settings.run, ", ".join(f"{hit:.3f}" for hit in result.hits)
    about = (
        _front(card, settings.kind),
        f"# A head ({settings.kind}) for {card.target}",
        "Made by `specdec train-heads` for speculative decoding: it reads the target's hidden states and proposes "
        "tokens, and the target decides. It is of no use for another target.",
        _use("--drafter"),
        f"alpha (accepted / tested drafts) and tau (tokens a step, K = {run.num_drafts}) of decoders with these "
        f"files, on {run.judged} held-out prompts, each continued by {run.new} tokens:",
    )
    rows = [("temperature", "alpha", "tau")]
    rows += [(f"{w.temperature:g}", f"{w.alpha:.3f}", f"{w.tau:.2f}") for w in result.after]
    notes = (
        f"Of the greedy drafts that were tested, accepted by depth: {hits}.",
        f"It reads the hidden states {list(result.states)}, as transformers counts them.",
    )
    return _markdown(about, rows, notes, card, run, corpus, result)


_TEXTS = {GIVEN: "the data", OWN: "texts of the target", DRAFTS: "texts of the draft"}


def _front(card: Card, *tags: str) -> str:
    """The YAML that the Hugging Face hub reads."""
    licence = card.licence.lower() if card.licence != NOT_SAID else "other"
    lines = [f"license: {licence}"]
    if licence == "other":  # the hub then wants a name
        lines.append("license_name: that-of-the-base-model")
    lines += [f"base_model: {card.target}", "library_name: transformers", "pipeline_tag: text-generation", "tags:"]
    lines += [f"- {tag}" for tag in ("speculative-decoding", "specdec", *tags)]
    return "\n".join(("---", *lines, "---"))


def _use(option: str) -> str:
    return f'Use, with this folder as FOLDER: `specdec generate "..." --target TARGET {option} FOLDER`.'


def _mixture(weights: Mapping[str, float]) -> str:
    """Weights that add up to 1, in words."""
    alone = len(weights) == 1
    return " + ".join(name if alone else f"{weight:g} {name}" for name, weight in weights.items())


def _markdown(
    about: Sequence[str],
    table: Sequence[Sequence[str]],
    notes: Sequence[str],
    card: Card,
    run: DistillSettings,
    corpus: Corpus,
    result: Distilled,
) -> str:
    """Paragraphs, a table whose first row is its head, and a list that ends with what all cards say."""
    loss, text = _mixture(run.loss), _mixture({_TEXTS[name]: weight for name, weight in run.text.items()})
    versions = f"torch {torch.__version__} transformers {transformers.__version__}"
    left_out = f"{corpus.duplicates:,} duplicates and {corpus.known:,} texts with evaluation prompts were left out"
    notes = [
        *notes,
        f"Data: {card.data}; licence: {card.licence}. {len(corpus.training):,} texts; {left_out}.",
        f"Learned from: {text}. Loss: {loss}. {result.steps:,} steps of {run.batch_size} texts of {run.length} tokens, "
        f"{result.seconds / 60:.1f} minutes; the weights are those of step {result.best_step:,}.",
        f"Versions: specdec {specdec_kernels.__version__} {versions}.",
        *([f"Command: `{card.command}`"] if card.command else []),
    ]
    head, *rows = (f"| {' | '.join(row)} |" for row in table)
    lines = [head, "|---" * len(table[0]) + "|", *rows]
    return "\n\n".join([*about, "\n".join(lines), "\n".join(f"- {note}" for note in notes)]) + "\n"

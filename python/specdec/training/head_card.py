"""The model card of a head."""

from __future__ import annotations

from .card import Card
from .head_settings import HeadSettings, TrainedHead
from .texts import Corpus


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

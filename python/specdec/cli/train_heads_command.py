"""``specdec train-heads``: trains a head for a target."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import typer

from . import training_options
from .option_groups import command, option
from .options import MachineOptions, read_counts
from .show import RATIOS
from .terminal import print_table, remark
from .training_begun import begun
from .training_options import HowOptions, LessonOptions, TrainedOptions, used

if TYPE_CHECKING:
    from ..training.settings import TrainedHead

COVERED = 0.95  # of the texts' tokens by those that it drafts: its last matrix is much of a step
HARDLY_DRAFTS = 1  # the exit code of a training whose head the self-check warns of


@dataclass(frozen=True)
class HeadOptions:
    """The head"""

    kind: str = option(
        "eagle3", "medusa, eagle3, dflash, dspark, or mtp, for targets of type qwen2, qwen3, mimo or qwen3_5."
    )
    depth: int = option(4, "Drafts that it learns to make in a step; Medusa: its heads.")
    layers: int | None = option(None, "Of DFlash and DSpark. Default: 2.")
    layer_ids: str | None = option(
        None,
        "Hidden states that EAGLE-3, DFlash and DSpark read, as transformers counts them: 2,16,29. Default: their "
        "formats' usual ones.",
        metavar="IDS",
    )
    vocabulary: int | None = option(
        None,
        "EAGLE-3 drafts the N most frequent tokens of the data alone; 0: all.",
        metavar="N",
        show_default=used(COVERED),
    )
    format: str = option("published", "Of the files: published, or speculators.")


@dataclass(frozen=True)
class HeadLessons(LessonOptions):
    """What it learns from"""

    text: str = option("data", "Learn from data, target (texts that it writes), or both: target:0.5,data:0.5")
    cache_features: bool = option(
        False, "Compute the target's hidden states in the data once, and keep them.", "--cache-features"
    )


@dataclass(frozen=True)
class HeadTraining(HowOptions):
    """How"""

    loss: str = option("forward_kl", "forward_kl, reverse_kl, total_variation, or a mixture.")
    seed: int = option(0, "Of the first weights, the order of texts, and all else.")


@command
def train_heads(
    head: HeadOptions,
    texts: HeadLessons,
    how: HeadTraining,
    results: TrainedOptions,
    machine: MachineOptions,
    target: training_options.Target = None,
) -> None:
    """Trains a head for TARGET: a small network that reads its hidden states and proposes tokens. --drafter FOLDER then
    drafts with it. On one GPU, or, for small models, a CPU.

    It can be stopped by Ctrl-C or killed at any time: the same command goes on from the last checkpoint. At the end the
    files are loaded back and tried; exit code 1 says that the head hardly drafts."""
    ids = None if head.layer_ids is None else (*read_counts("--layer-ids", head.layer_ids, 0),)
    own = not texts.data
    covered = COVERED if head.vocabulary is None and head.kind == "eagle3" else None
    with begun(target, texts, how, results, machine, covered, vocabulary=head.vocabulary or 0) as at:
        from ..training.settings import HeadSettings
        from ..training.train_heads import train_head

        cached = texts.cache_features or own
        settings = HeadSettings(head.kind, at.run, head.depth, head.layers, ids, cached, head.format)
        pair, card = (at.loaded.target, at.loaded.tokenizer), results.card(target, head.kind, own)
        done = train_head(*pair, at.corpus, settings, results.output, card, at.watch, at.prompts)
    results.show(done, _print)
    assert done is not None
    training_options.tell_next(target, "--drafter", results.output, done.after)
    if done.trouble is not None:
        remark(f"the self-check failed: {done.trouble}", "red")
        raise typer.Exit(HARDLY_DRAFTS)
    remark(f"the head of step {done.best_step} is in {str(results.output)!r}, with its model card")


def _print(done: TrainedHead, k: int) -> None:
    columns = ("temperature", "alpha", f"tau\n(K = {k})")
    print_table(columns, [(f"{w.temperature:g}", f"{w.alpha:.3f}", f"{w.tau:.2f}") for w in done.after])
    remark(RATIOS)

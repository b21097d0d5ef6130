"""``specdec distill``: trains a draft for a target."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from . import models, training_options
from .interrupt import stop_once
from .layout import print_table
from .option_groups import command, option
from .options import MachineOptions
from .progress_bar import progress
from .show import RATIOS
from .terminal import remark
from .training_options import HowOptions, LessonOptions, TrainedOptions
from .user_errors import refuse

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from ..training.settings import Distilled


@dataclass(frozen=True)
class StartOptions:
    """The draft"""

    draft: str | None = option(None, "A draft that exists. Default: the embedded pair's; else choose --layers.")
    layers: int | None = option(None, "A new draft of so many of the target's layers, with its embedding and head.")
    intermediate: int | None = option(None, "With --layers: neurons that each MLP keeps.")
    config: Path | None = option(None, "A new draft of random weights, by this config.json.", metavar="FILE")
    vocabulary: int = option(0, "Let it draft only the N most frequent tokens of the data; 0: all.", metavar="N")
    lora: int = option(0, "Train adapters of this rank, which are merged at the end; 0: all.")

    def check(self, target: str | None) -> None:
        starts = {"--draft": self.draft, "--layers": self.layers, "--config": self.config}
        given = [name for name, value in starts.items() if value is not None]
        if len(given) > 1:
            refuse(" / ".join(given), "several", "one of them")
        if not given and target is not None:
            refuse("--draft", "none", "--draft, --layers or --config, with a target")
        if self.intermediate is not None and self.layers is None:
            refuse("--intermediate", self.intermediate, "it with --layers")

    def make(self, loaded: models.Models, seed: int) -> tuple[PreTrainedModel, str]:
        """The draft before its training, and what it is."""
        from ..models.loading import load_model
        from ..training import starts

        if self.layers is not None:
            narrow = "" if self.intermediate is None else f", with MLPs of {self.intermediate} neurons"
            told = f"{self.layers} layers of the target{narrow}"
            return starts.cut(loaded.target, self.layers, self.intermediate), told
        if self.config is not None:
            return starts.fresh(loaded.target, self.config, seed), f"random weights by {self.config.name}"
        if self.draft is not None:
            return load_model(self.draft, "float32", loaded.target.device, name="draft"), self.draft
        assert loaded.draft is not None  # of the embedded pair
        return loaded.draft.float(), "the embedded draft"


@dataclass(frozen=True)
class DraftLessons(LessonOptions):
    """What it learns from"""

    text: str = option(
        "data", "Learn from data, target (texts that it writes), draft (texts of its own): target:0.5,data:0.5"
    )
    cache_logits: int = option(
        0, "Compute the target's N most likely tokens of the data once; 0: each time.", metavar="N"
    )


@dataclass(frozen=True)
class DraftTraining(HowOptions):
    """How"""

    loss: str = option(
        "total_variation", "data, forward_kl, reverse_kl, total_variation, or a mixture: forward_kl:0.9,data:0.1"
    )
    gradient_checkpointing: bool = option(False, "Less memory, more time.", "--gradient-checkpointing")


@command
def distill(
    start: StartOptions,
    texts: DraftLessons,
    how: DraftTraining,
    results: TrainedOptions,
    machine: MachineOptions,
    target: training_options.Target = None,
) -> None:
    """Trains a draft for TARGET, so that more of its tokens are accepted: one that exists, one cut from the target's
    layers, or a new one. On one GPU, or, for small models, a CPU. docs/training.md says which loss and text to take.

    It can be stopped by Ctrl-C or killed at any time: the same command goes on from the last checkpoint."""
    start.check(target)
    with progress("loading models") as show, stop_once() as stopped:
        from ..training.distill import distill as train
        from ..training.trainer import Watch

        own = {"cache_logits": texts.cache_logits, "vocabulary": start.vocabulary, "lora": start.lora}
        own["gradient_checkpointing"] = how.gradient_checkpointing
        settings = training_options.settings(texts, how, results, **own)
        loaded = models.load(models.ModelOptions(target=target, machine=machine), [])
        corpus = texts.corpus(loaded)
        draft, said = start.make(loaded, how.seed)
        card, pair = results.card(target, said), (loaded.target, draft, loaded.tokenizer)
        with results.kept(), results.logging() as logged:
            done = train(*pair, corpus, settings, results.output, card, Watch(show, stopped, logged, remark))
    if done is not None:
        _picture(results.output)
    results.show(done, _print)
    if done is not None and not results.as_json:
        remark(f"the draft of step {done.best_step} is in {str(results.output)!r}, with its model card")


def _picture(output: Path) -> None:
    from ..training.curves import NoMatplotlib, draw

    try:
        draw(output)
    except NoMatplotlib:
        remark('no picture of the curves without matplotlib: pip install -e ".[train]"')
    except OSError as error:  # the draft itself is saved
        remark(f"no picture of the curves: {error}", "red")


def _print(done: Distilled, k: int) -> None:
    columns = ("temperature", "alpha before", "alpha", f"tau before\n(K = {k})", "tau")
    rows = [
        (f"{a.temperature:g}", f"{b.alpha:.3f}", f"{a.alpha:.3f}", f"{b.tau:.2f}", f"{a.tau:.2f}")
        for b, a in zip(done.before, done.after, strict=True)
    ]
    print_table(columns, rows)
    remark(RATIOS)

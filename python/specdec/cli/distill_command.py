"""``specdec distill``: trains a draft for a target."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from . import models, training_options
from .option_groups import command, option
from .options import MachineOptions
from .show import RATIOS
from .terminal import print_table, remark
from .training_begun import begun
from .training_options import HowOptions, LessonOptions, TrainedOptions, used
from .user_errors import refuse

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from ..training.settings import Distilled

COVERED = 0.995  # of the texts' tokens by those that a draft keeps, where nobody says how many
CACHED = 64  # tokens of which the target's probabilities are kept


@dataclass(frozen=True)
class StartOptions:
    """The draft"""

    draft: str | None = option(None, "A draft that exists. Default: the embedded pair's; of another target --layers.")
    layers: int | None = option(
        None, "A new draft of so many of the target's layers, with its embedding and head.", show_default="a tenth"
    )
    intermediate: int | None = option(None, "With --layers: neurons that each MLP keeps.")
    config: Path | None = option(None, "A new draft of random weights, by this config.json.", metavar="FILE")
    vocabulary: int | None = option(
        None,
        "Let it draft only the N most frequent tokens of the data; 0: all.",
        metavar="N",
        show_default=used(COVERED),
    )
    lora: int = option(0, "Train adapters of this rank, which are merged at the end; 0: all.")

    def check(self, target: str | None) -> None:
        starts = {"--draft": self.draft, "--layers": self.layers, "--config": self.config}
        given = [name for name, value in starts.items() if value is not None]
        if len(given) > 1:
            refuse(" / ".join(given), "several", "one of them")
        cut = self.layers is not None or (not given and target is not None)
        if self.intermediate is not None and not cut:
            refuse("--intermediate", self.intermediate, "it with --layers")

    def make(self, loaded: models.Models, seed: int) -> tuple[PreTrainedModel, str]:
        """The draft before its training, and what it is."""
        from ..models.load.loading import load_model
        from ..models.load.location import Location
        from ..training import starts

        if self.config is not None:
            return starts.fresh(loaded.target, self.config, seed), f"random weights by {self.config.name}"
        if self.draft is not None:
            if (at := Location("draft", self.draft)).is_gguf:
                allowed = f"the folder that this command writes of it: {at.conversion}"
                refuse("--draft", f"{self.draft!r}, whose weights are not to be trained", allowed)
            return load_model(self.draft, "float32", loaded.target.device, name="draft"), self.draft
        if self.layers is None and loaded.draft is not None:
            return loaded.draft.float(), "the embedded draft"
        layers = self.layers or starts.usual_layers(loaded.target)
        narrow = "" if self.intermediate is None else f", with MLPs of {self.intermediate} neurons"
        return starts.cut(loaded.target, layers, self.intermediate), f"{layers} layers of the target{narrow}"


@dataclass(frozen=True)
class DraftLessons(LessonOptions):
    """What it learns from"""

    text: str = option(
        "data", "Learn from data, target (texts that it writes), draft (texts of its own): target:0.5,data:0.5"
    )
    cache_logits: int | None = option(
        None,
        "Compute the target's N most likely tokens of the data once; 0: each time.",
        metavar="N",
        show_default=f"0; without --data: {CACHED}",
    )


@dataclass(frozen=True)
class DraftTraining(HowOptions):
    """How"""

    loss: str = option(
        "total_variation:0.5,forward_kl:0.5",
        "data, forward_kl, reverse_kl, total_variation, or a mixture: forward_kl:0.9,data:0.1",
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
    own = not texts.data
    of_draft = {"vocabulary": start.vocabulary or 0, "lora": start.lora, "freeze_embedding": own and not start.lora}
    of_draft["cache_logits"] = (CACHED if own else 0) if texts.cache_logits is None else texts.cache_logits
    of_draft["gradient_checkpointing"] = how.gradient_checkpointing
    covered = COVERED if start.vocabulary is None else None
    with begun(target, texts, how, results, machine, covered, **of_draft) as at:
        from ..training.distill import distill as train

        draft, said = start.make(at.loaded, how.seed)
        pair, card = (at.loaded.target, draft, at.loaded.tokenizer), results.card(target, said, own)
        done = train(*pair, at.corpus, at.run, results.output, card, at.watch, at.prompts)
    if done is not None:
        _picture(results.output)
    results.show(done, _print)
    if done is not None and not results.as_json:
        remark(f"the draft of step {done.best_step} is in {str(results.output)!r}, with its model card")
    if done is not None:
        training_options.tell_next(target, "--draft", results.output, done.after)


def _picture(output: Path) -> None:
    from ..training.curves import draw

    try:
        draw(output)
    except ImportError:
        remark('no picture of the curves without matplotlib: pip install "specdec-kernels[train]"')
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

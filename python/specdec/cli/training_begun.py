"""What the commands that train have done before they do: the target is loaded, and has written its texts where none are
given."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..jobs.signals import stop_once
from . import models, training_options
from .options import MachineOptions
from .own_texts import OwnTexts, fast_dtype
from .progress_bar import progress
from .terminal import remark
from .training_options import HowOptions, LessonOptions, TrainedOptions

if TYPE_CHECKING:
    from ..training.settings import DistillSettings
    from ..training.texts import Corpus
    from ..training.trainer import Watch


@dataclass(frozen=True)
class Begun:
    """
    Attributes:
        prompts: that it is judged by; None: beginnings of held-out texts.
    """

    loaded: models.Models
    corpus: Corpus
    run: DistillSettings
    prompts: list[list[int]] | None
    watch: Watch


@contextmanager
def begun(
    target: str | None,
    texts: LessonOptions,
    how: HowOptions,
    results: TrainedOptions,
    machine: MachineOptions,
    covered: float | None,
    **others: Any,
) -> Iterator[Begun]:
    """Inside the block, Ctrl-C stops the training, and errors that end it are told in a line.

    Args:
        covered: the share of the target's own texts that the tokens are which are drafted; None: another number was
            asked for.
        others: settings that only one of the commands has.
    """
    texts.check()
    own = not texts.data
    run = training_options.settings(texts, how, results, machine, **others)
    at = models.ModelOptions(target=target, machine=fast_dtype(machine) if own else machine)
    run.check(at.vocab_size)
    written = texts.written(OwnTexts(target, at.machine, results.folder, (how.limit(own) or 0) / 2))
    with progress("loading models") as show, stop_once() as stopped:
        from ..training.trainer import Watch

        loaded = models.load(at, [])
        corpus = written.corpus(loaded)
        run = training_options.fitted(run, loaded, corpus, covered) if own else run
        prompts = texts.judging(loaded, results.judged)
        with results.kept():
            yield Begun(loaded, corpus, run, prompts, Watch(show, stopped, remark))

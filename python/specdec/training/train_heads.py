"""Trains a head for a target: a small network that reads the target's own hidden states."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..checks import read_as
from ..files import write_whole
from ..models.supported import cached_model
from .card import Card
from .distill import RUN, Tell, check_folder, encoded
from .features import CachedFeatures, Features
from .head_card import head_card
from .head_files import loaded_back, write_files
from .head_settings import SPECULATORS, HeadSettings, TrainedHead
from .head_trainer import HeadTrainer
from .heads.kinds import new_learner
from .held_out import beginnings
from .lessons import Lessons
from .measured import measure
from .packing import Packed
from .settings import DTYPES
from .shards import digest, fingerprint
from .texts import Corpus
from .trainer import BEST, CHECKPOINT, Logged


def train_head(
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    corpus: Corpus,
    settings: HeadSettings,
    folder: Path,
    told: Tell = lambda done, total, what: None,
    stopped: Callable[[], bool] = lambda: False,
    card: Card | None = None,
    logged: Logged = lambda row: None,
) -> TrainedHead | None:
    """Trains a head and writes the best of it to ``folder``, with a model card, in the layout in which
    :func:`~specdec.load_head` reads it. A call with the same arguments goes on where one was stopped or killed; on a
    CPU with as many threads, to the same files, byte for byte.

    Args:
        target: any model that the loop drives and that has a final norm.
        corpus: from ``texts.split``.
        folder: which is made; what is not finished stands in its folder ``training``.
        told: called with how many steps there are of how many, and how it goes.
        stopped: asked after each step: whether to stop; the same call can resume later.
        card: what the model card says besides the measured numbers.
        logged: called with each line of the log.

    Returns:
        None if it was stopped.

    Raises:
        ValueError: names the argument, what was given and what is allowed.
        Diverged: the loss is not a number; the last checkpoint is as it was.
        WrongFiles: what was written is not what was trained.
        OSError: a file cannot be written; the last checkpoint is as it was.
    """
    whole, run = cached_model(target, "target"), settings.run
    settings.check(whole)
    seed, steps, name = run.train.seed, run.train.steps, (card or Card()).target
    check_folder(folder)
    told(0, steps, "reading the texts")
    given = Packed(encoded(tokenizer, corpus.training), run.length, run.batch_size, seed)
    held = read_as("held_out", Packed, encoded(tokenizer, corpus.held_out), run.length, 1, seed).blocks
    torch.manual_seed(seed)
    learner = new_learner(settings, whole, given.blocks, tokenizer.pad_token_id)
    (folder / RUN).mkdir(parents=True, exist_ok=True)
    features, known = Features(whole, learner.head.states), None
    if settings.cache_features:
        known = CachedFeatures(folder / RUN / "features", features, given.blocks)
        known.fill(run.batch_size, lambda done, total: told(done, total, "caching the target's hidden states"))
    lessons = Lessons(given, target, None, run)
    prompts = beginnings(held, run.judged, run.prompt, seed)
    asked: dict[str, Any] = dataclasses.asdict(settings)
    asked |= {"run": {k: v for k, v in asked["run"].items() if k != "train"}, "target": fingerprint(target)}
    asked |= {"data": digest(given.blocks), "held_out": digest(held), "threads": torch.get_num_threads()}
    with _frozen(target):
        trainer = HeadTrainer(learner, lessons, prompts, run.new, run.train, folder / RUN, asked, features, known)
        if not trainer.run(told, stopped, logged):
            return None
    trainer.take_best()
    learner.head.eval()
    k, progress = run.train.num_drafts, trainer.progress
    files = learner.container(name, k) if settings.format == SPECULATORS else learner.published(name)
    write_files(folder, files, DTYPES[run.output_dtype])
    told(steps, steps, "loading it back")
    drafter, trouble = loaded_back(folder, learner, tokenizer, held[0].tolist())
    after, hits = measure(target, drafter, prompts, run.new, k, seed)
    counted = (progress.best_step, progress.step, progress.seconds, progress.tokens)
    result = TrainedHead(progress.before, after, hits, learner.head.states, *counted, trouble)
    write_whole(folder / "README.md", head_card(card or Card(), settings, corpus, result))
    write_whole(folder / RUN / "result.json", json.dumps(result.to_dict(), indent=1) + "\n")
    for file in (CHECKPOINT, BEST):
        (folder / RUN / file).unlink()
    return result


@contextmanager
def _frozen(target: PreTrainedModel) -> Iterator[None]:
    """Inside the block, no weight of the target has a gradient: a head that uses its last matrix would fill them."""
    learning = [parameter for parameter in target.parameters() if parameter.requires_grad]
    for parameter in learning:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in learning:
            parameter.requires_grad_(True)

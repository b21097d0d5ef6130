"""Trains a head for a target: a small network that reads the target's own hidden states."""

from __future__ import annotations

import dataclasses
import json
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors.torch import save
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..checks import read_as
from ..drafters.heads import HeadDrafter, load_head
from ..drafters.heads.layer_ids import resolve
from ..drafters.heads.self_check import LENGTH, acceptance_on
from ..files import write_whole
from ..models.forward.cached_model import CachedModel
from ..models.supported import cached_model
from ..prompts import read_eos
from .head_features import CachedFeatures, Features
from .head_trainer import HeadTrainer, measure
from .heads.learn_dflash import DflashLearner, DsparkLearner
from .heads.learn_eagle3 import Eagle3Learner
from .heads.learn_medusa import MedusaLearner
from .heads.learn_mtp import MtpLearner
from .heads.learner import Files, Learner
from .held_out import beginnings
from .lessons import Lessons, Packed, encoded
from .model_card import Card, head_card
from .reduced_vocabulary import most_frequent
from .settings import BLOCKS, DTYPES, SPECULATORS, HeadSettings, TrainedHead
from .shards import digest, fingerprint
from .texts import Corpus
from .trainer import Watch, finish, unfinished


def train_head(
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    corpus: Corpus,
    settings: HeadSettings,
    folder: Path,
    card: Card | None = None,
    watch: Watch | None = None,
    prompts: Sequence[Sequence[int]] | None = None,
) -> TrainedHead | None:
    """Trains a head and writes the best of it to ``folder``, with a model card, in the layout in which
    :func:`~specdec.load_head` reads it. A call with the same arguments goes on where one was stopped or killed; on a
    CPU with as many threads, to the same files, byte for byte.

    Args:
        target: any model that the loop drives and that has a final norm.
        corpus: from ``texts.split``.
        folder: which is made; what is not finished stands in its folder ``training``.
        card: what the model card says besides the measured numbers.
        prompts: token ids of what it is judged by; None: beginnings of held-out texts.

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
    seed, steps, name = run.seed, run.steps, (card or Card()).target
    watch = watch or Watch()
    begun = unfinished(folder)
    watch.told(0, steps, "reading the texts")
    given = Packed(encoded(tokenizer, corpus.training), run.length, run.batch_size, seed)
    held = read_as("held_out", Packed, encoded(tokenizer, corpus.held_out), run.length, 1, seed).blocks
    torch.manual_seed(seed)
    learner = new_learner(settings, whole, given.blocks, tokenizer.pad_token_id)
    features, known = Features(whole, learner.head.states, learner.head.d2t), None
    if settings.cache_features:
        known = CachedFeatures(begun / "features", features, given.blocks)
        known.fill(run.batch_size, lambda done, total: watch.told(done, total, "caching the target's hidden states"))
    lessons = Lessons(given, target, None, run)
    prompts = prompts or beginnings(held, run.judged, run.prompt, seed)
    asked = {
        **{name: value for name, value in dataclasses.asdict(settings).items() if name != "run"},
        "target": fingerprint(target),
        "data": digest(given.blocks),
        "held_out": digest(held),
        "prompts": digest(torch.tensor([t for p in prompts for t in p])),
        "threads": torch.get_num_threads(),
    }
    with _frozen(target):
        trainer = HeadTrainer(learner, lessons, prompts, run, begun, asked, features, known)
        if not trainer.run(watch):
            return None
    trainer.take_best()
    learner.head.eval()
    k, progress = run.num_drafts, trainer.progress
    files = learner.container(name, k) if settings.format == SPECULATORS else learner.published(name)
    write_files(folder, files, DTYPES[run.output_dtype])
    watch.told(steps, steps, "loading it back")
    drafter, trouble = loaded_back(folder, learner, tokenizer, held[0].tolist())
    after, hits = measure(target, drafter, prompts, run.new, k, seed)
    counted = (progress.best_step, progress.step, progress.seconds, progress.tokens)
    result = TrainedHead(progress.before, after, *counted, hits, learner.head.states, trouble)
    finish(folder, head_card(card or Card(), settings, corpus, result), result.to_dict())
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


def new_learner(settings: HeadSettings, target: CachedModel, blocks: torch.Tensor, pad: int | None) -> Learner:
    """Returns a head that has learned nothing yet. What is random comes from torch's generator.

    Args:
        blocks: [n, L] int64, the data.
        pad: the tokenizer's padding token.

    Raises:
        ValueError: names the setting, or what of the target such a head cannot have.
    """
    loss, depth = settings.run.loss, settings.depth
    if settings.kind == "medusa":
        return MedusaLearner(target, loss, depth)
    if settings.kind == "mtp":
        return MtpLearner(target, loss, depth)
    block = settings.dflash_layers if settings.kind in BLOCKS else None
    states = resolve({}, target.config.num_hidden_layers, settings.layer_ids, block).states
    if block is not None:
        counts = torch.bincount(blocks.flatten(), minlength=target.vocab_size)
        new = DflashLearner if settings.kind == "dflash" else DsparkLearner
        return new(target, loss, depth, block, states, mask_token(counts, pad))
    kept = None
    if settings.run.vocabulary:
        kept = most_frequent(blocks, target.vocab_size, settings.run.vocabulary, read_eos(None, target.model))
    return Eagle3Learner(target, loss, depth, states, kept)


def mask_token(counts: torch.Tensor, pad: int | None) -> int:
    """Returns a token that no text has, or the rarest one: the padding, if it is among these.

    Args:
        counts: [V] int64: how often the data has each token.
    """
    if pad is not None and pad < len(counts) and counts[pad] == counts.min():
        return pad
    return int(counts.argmin())


WEIGHTS, CONFIG = "model.safetensors", "config.json"
ROUNDING = 0.1  # of a draft's acceptance: what the files' dtype may cost. Wrong wiring costs most of it


class WrongFiles(Exception):
    """What was loaded back is not what was trained, which is a bug."""


def write_files(folder: Path, files: Files, dtype: torch.dtype) -> None:
    """Writes weights in ``dtype``, and config.json. An embedding keeps the target's dtype, so that loading finds it
    equal to the target's, which it then shares. Raises OSError."""
    config, tensors = files
    placed = {}
    for name, tensor in tensors.items():
        cast = tensor.is_floating_point() and name != "embed_tokens.weight"
        placed[name] = tensor.detach().to("cpu", dtype if cast else tensor.dtype).contiguous()
    write_whole(folder / WEIGHTS, save(placed, {"format": "pt"}))
    config = {**config, "dtype": str(dtype).removeprefix("torch.")}
    write_whole(folder / CONFIG, json.dumps(config, indent=2, sort_keys=True) + "\n")


def loaded_back(
    folder: Path, learner: Learner, tokenizer: PreTrainedTokenizerBase | None, text: Sequence[int]
) -> tuple[HeadDrafter, str | None]:
    """Returns the head as a user will load it, and what its self-check warns of.

    Args:
        tokenizer: of the self-check's text; None: the target writes one.
        text: of the target's tokens, on which it is compared with ``learner``.

    Raises:
        WrongFiles: its drafts are accepted less often than those of what was trained.
        ValueError, OSError: what :func:`~specdec.load_head` raises.
    """
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always", RuntimeWarning)
        drafter = load_head(folder, learner.target.model, tokenizer=tokenizer)
    some, as_said = [*text[:LENGTH]], load_head(folder, learner.target.model, check=False)
    with torch.inference_mode():
        trained, written = (acceptance_on(head, learner.target, some) for head in (learner.head, as_said.head))
    if any(after < before - ROUNDING for before, after in zip(trained, written, strict=True)):
        before, after = (", ".join(f"{a:.0%}" for a in found) for found in (trained, written))
        told = f"{after} accepted, not {before}"
        raise WrongFiles(f"the files in {str(folder)!r} draft worse than what was trained: {told}")
    troubles = [str(warning.message) for warning in said if issubclass(warning.category, RuntimeWarning)]
    return drafter, "; ".join(troubles) or None

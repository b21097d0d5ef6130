"""Distillation: a draft learns to give the target's distribution, so that more of its tokens are accepted."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..checks import refuse
from ..files import write_whole
from ..models.reduced_head import reduce_head
from ..prompts import read_eos
from .cached_logits import CachedLogits
from .held_out import beginnings, worth, write
from .lessons import Lessons, Packed
from .losses import LOSSES, read_mixture
from .model_card import Card, card_text
from .reduced_vocabulary import most_frequent, price
from .settings import DTYPES, SOURCES, Distilled, DistillSettings
from .shards import digest, fingerprint
from .texts import Corpus
from .trainer import BEST, CHECKPOINT, LOG, Logged, Trainer

Tell = Callable[[int, int, str], None]
RUN = "training"  # the folder of checkpoint and log, in that of the draft


def read_loss(given: str) -> dict[str, float]:
    return read_mixture("loss", given, LOSSES)


def read_text(given: str) -> dict[str, float]:
    return read_mixture("text", given, SOURCES)


def distill(
    target: PreTrainedModel,
    draft: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    corpus: Corpus,
    settings: DistillSettings,
    folder: Path,
    told: Tell = lambda done, total, what: None,
    stopped: Callable[[], bool] = lambda: False,
    card: Card | None = None,
    logged: Logged = lambda row: None,
    say: Callable[[str], None] = lambda words: None,
) -> Distilled | None:
    """Trains ``draft`` and saves the best of it in ``folder``, with its tokenizer and a model card. A call with the
    same arguments goes on where one was stopped or killed; on a CPU with as many threads, to the same weights, byte for
    byte.

    Args:
        draft: float32, with the vocabulary of ``target``; it is changed.
        corpus: from ``texts.split``.
        folder: which is made; what is not finished stands in its folder ``training``.
        told: called with how many steps there are of how many, and how it goes.
        stopped: asked after each step: whether to stop, and to go on another time.
        say: called with what a reduced vocabulary will cost and gain, and what cached logits leave out, before anything
            is trained.
        card: what the model card says besides the measured numbers.
        logged: called with each line of the log.

    Returns:
        None if it was stopped.

    Raises:
        ValueError: names the argument, what was given and what is allowed.
        Diverged: the loss is not a number; the last checkpoint is as it was.
        OSError: a file cannot be written; the last checkpoint is as it was.
    """
    vocab_size = target.config.get_text_config(decoder=True).vocab_size
    settings.check(vocab_size)
    _check_draft(draft, vocab_size)
    check_folder(folder)
    told(0, settings.train.steps, "reading the texts")
    given = Packed(encoded(tokenizer, corpus.training), settings.length, settings.batch_size, settings.train.seed)
    if settings.vocabulary:
        ids = most_frequent(given.blocks, vocab_size, settings.vocabulary, read_eos(None, target))
        held = [token for text in encoded(tokenizer, corpus.held_out) for token in text]
        say(price(draft, ids, held).words)
        reduce_head(draft, ids)
    prompts = _prompts(tokenizer, corpus.held_out, settings)
    (folder / RUN).mkdir(parents=True, exist_ok=True)
    draft = _with_adapters(draft.eval(), settings.lora, settings.train.seed)
    told(0, settings.train.steps, "the target writes what drafts are judged by")
    written = write(target, prompts, settings.new, settings.train.seed)
    cached = None
    if settings.cache_logits:
        cached = CachedLogits(folder / RUN / "logits", target, given.blocks, settings.cache_logits)
        cached.fill(settings.batch_size, lambda done, total: told(done, total, "caching the target's logits"))
        known = f"the {settings.cache_logits} tokens that are cached have {cached.covered:.1%} of the probability"
        say(f"{known}; how the rest is spread is not learned")
    lessons = Lessons(given, target, draft, settings)
    asked = {k: v for k, v in dataclasses.asdict(settings).items() if k != "train"}
    asked |= {"target": fingerprint(target), "draft": fingerprint(draft), "threads": torch.get_num_threads()}
    asked |= {"data": digest(given.blocks), "held_out": digest(torch.tensor(prompts))}
    trainer = Trainer(target, draft, lessons, written, settings.train, folder / RUN, asked, cached)
    if not trainer.run(told, stopped, logged):
        return None
    trainer.take_best()
    trained: Any = draft
    finished = trained.merge_and_unload() if settings.lora else trained
    finished.to(DTYPES[settings.output_dtype]).eval()
    finished.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    after, progress = worth(finished.float(), written, settings.train.num_drafts), trainer.progress
    result = Distilled(progress.before, after, progress.best_step, progress.step, progress.seconds, progress.tokens)
    write_whole(folder / "README.md", card_text(card or Card(), settings, corpus, result))
    write_whole(folder / RUN / "result.json", json.dumps(result.to_dict(), indent=1) + "\n")
    for name in (CHECKPOINT, BEST):
        (folder / RUN / name).unlink()
    return result


def log_of(folder: Path) -> list[dict[str, Any]]:
    """The lines of a training's log: the step, the mean loss since the line before, and what the draft was worth."""
    return [json.loads(line) for line in (folder / RUN / LOG).read_text().splitlines()]


def check_folder(folder: Path) -> None:
    """Raises ValueError naming ``output``: the folder has what a training wrote that is done."""
    if (folder / "config.json").exists() and not (folder / RUN / CHECKPOINT).exists():
        refuse(
            "output", f"{str(folder)!r}, which has a model", "a folder without one, or of a training that is not done"
        )


def _check_draft(draft: PreTrainedModel, vocab_size: int) -> None:
    own = draft.config.get_text_config(decoder=True).vocab_size
    if own != vocab_size:
        refuse("draft", f"a vocabulary of {own} tokens", f"{vocab_size}, the target's")


def encoded(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> list[list[int]]:
    """Token ids, each text with an end of sequence, where the tokenizer has one."""
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    found = tokenizer(list(texts), add_special_tokens=False, verbose=False).input_ids if texts else []
    return [[*ids, *end] for ids in found if ids]


def _prompts(tokenizer: PreTrainedTokenizerBase, held_out: Sequence[str], settings: DistillSettings) -> list[list[int]]:
    text = [token for ids in encoded(tokenizer, held_out) for token in ids]
    blocks = torch.tensor(text).long()[: len(text) // settings.prompt * settings.prompt].view(-1, settings.prompt)
    if not len(blocks):
        refuse("held_out", f"{len(text)} tokens", f"at least {settings.prompt}, those of one prompt")
    return beginnings(blocks, settings.judged, settings.prompt, settings.train.seed)


def _with_adapters(draft: PreTrainedModel, rank: int, seed: int) -> PreTrainedModel:
    """``draft`` with a LoRA adapter (arXiv 2106.09685) at every linear layer but the head, and its weights frozen."""
    if not rank:
        return draft
    if importlib.util.find_spec("peft") is None:
        refuse("lora", f"{rank} without peft", "0, or: pip install peft")
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(seed)
    adapted: Any = get_peft_model(draft, LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear"))
    return adapted.eval()

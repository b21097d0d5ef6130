"""Distillation: a draft learns to give the target's distribution, so that more of its tokens are accepted."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..checks import refuse
from ..models.load.reduced_head import reduce_head
from ..prompts import read_eos
from .cached_logits import CachedLogits
from .held_out import beginnings, worth, write
from .lessons import Lessons, Packed, encoded
from .losses import LOSSES, read_mixture
from .model_card import Card, card_text
from .reduced_vocabulary import most_frequent, price
from .settings import DTYPES, SOURCES, Distilled, DistillSettings
from .shards import digest, fingerprint
from .texts import Corpus
from .trainer import Trainer, Watch, finish, unfinished


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
    card: Card | None = None,
    watch: Watch | None = None,
    prompts: Sequence[Sequence[int]] | None = None,
) -> Distilled | None:
    """Trains ``draft`` and saves the best of it in ``folder``, with its tokenizer and a model card. A call with the
    same arguments goes on where one was stopped or killed; on a CPU with as many threads, to the same weights, byte for
    byte.

    Args:
        draft: float32, with the vocabulary of ``target``; it is changed.
        corpus: from ``texts.split``.
        folder: which is made; what is not finished stands in its folder ``training``.
        card: what the model card says besides the measured numbers.
        watch: its ``say`` is told what a reduced vocabulary will cost and gain, and what cached logits leave out.
        prompts: token ids of what it is judged by; None: beginnings of held-out texts.

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
    watch = watch or Watch()
    begun = unfinished(folder)
    watch.told(0, settings.steps, "reading the texts")
    given = Packed(encoded(tokenizer, corpus.training), settings.length, settings.batch_size, settings.seed)
    ids = None
    if settings.vocabulary:
        ids = most_frequent(given.blocks, vocab_size, settings.vocabulary, read_eos(None, target))
        held = [token for text in encoded(tokenizer, corpus.held_out) for token in text]
        watch.say(price(draft, ids, held).words)
        reduce_head(draft, ids)
    embedding: Any = draft.get_input_embeddings()
    if settings.freeze_embedding and embedding.weight is not draft.get_output_embeddings().weight:
        embedding.requires_grad_(False)
    if prompts is None:
        prompts = _prompts(tokenizer, corpus.held_out, settings)
    draft = _with_adapters(draft.eval(), settings.lora, settings.seed)
    watch.told(0, settings.steps, "the target writes what drafts are judged by")
    written = write(target, prompts, settings.new, settings.seed)
    cached = None
    if settings.cache_logits:
        device = target.device
        cached = CachedLogits(
            *(begun / "logits", target, given.blocks, settings.cache_logits, ids),
            autocast=lambda: settings.autocast(device),
        )
        cached.fill(settings.batch_size, lambda done, total: watch.told(done, total, "caching the target's logits"))
        known = f"the {settings.cache_logits} tokens that are cached have {cached.covered:.1%} of the probability"
        watch.say(f"{known}; how the rest is spread is not learned")
    lessons = Lessons(given, target, draft, settings)
    asked = {"target": fingerprint(target), "draft": fingerprint(draft), "threads": torch.get_num_threads()}
    asked |= {"data": digest(given.blocks), "held_out": digest(torch.tensor([t for p in prompts for t in p]))}
    trainer = Trainer(target, draft, lessons, written, settings, begun, asked, cached)
    if not trainer.run(watch):
        return None
    trainer.take_best()
    trained: Any = draft
    finished = trained.merge_and_unload() if settings.lora else trained
    finished.to(DTYPES[settings.output_dtype]).eval()
    finished.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    after, progress = worth(finished.float(), written, settings.num_drafts), trainer.progress
    result = Distilled(progress.before, after, progress.best_step, progress.step, progress.seconds, progress.tokens)
    finish(folder, card_text(card or Card(), settings, corpus, result), result.to_dict())
    return result


def _check_draft(draft: PreTrainedModel, vocab_size: int) -> None:
    own = draft.config.get_text_config(decoder=True).vocab_size
    if own != vocab_size:
        refuse("draft", f"a vocabulary of {own} tokens", f"{vocab_size}, the target's")


def _prompts(tokenizer: PreTrainedTokenizerBase, held_out: Sequence[str], settings: DistillSettings) -> list[list[int]]:
    text = [token for ids in encoded(tokenizer, held_out) for token in ids]
    blocks = torch.tensor(text).long()[: len(text) // settings.prompt * settings.prompt].view(-1, settings.prompt)
    if not len(blocks):
        refuse("held_out", f"{len(text)} tokens", f"at least {settings.prompt}, those of one prompt")
    return beginnings(blocks, settings.judged, settings.prompt, settings.seed)


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

"""Rollouts: samples of a model that is being trained, with their log-probabilities, drafted from earlier epochs."""

from __future__ import annotations

import inspect
import struct
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from specdec_kernels import Rule, SamplingParams

from ..checks import read_count, refuse, shown
from ..decoder import SpeculativeDecoder
from ..drafters.protocol import Drafter
from ..drafters.suffix import SuffixDrafter, SuffixMemories
from ..loop.draft_length import DEFAULT_DRAFTS, AdaptiveDrafts
from ..loop.request import Request
from ..loop.sequence import SequenceState
from ..prompts import TokenIds, check_room, join, read_eos, read_pad, read_prompts
from ..result import FinishReason
from ..serving.scheduler import Scheduler
from ..stats import Stats
from ..stopping import StoppingCriteria

OF_THE_MODEL = SamplingParams(temperature=1.0)
# Of the default drafter: at about 0.1 KB a token, all memories together stay below 0.3 GB.
MEMORY_TOKENS, MEMORIES = 2048, 1024


@dataclass(frozen=True)
class RolloutBatch:
    """R = prompts x samples texts; the samples of a prompt are in neighbouring rows. All padding is on the right.

    T is the longest text's number of new tokens, and S that of the longest text with its prompt. All tensors are on the
    model's device, and none has gradients.
    """

    tokens: torch.Tensor  # [R, T] int64: the new tokens, an end-of-sequence token included
    mask: torch.Tensor  # [R, T] bool: which of these are no padding
    lengths: torch.Tensor  # [R] int64: how many these are
    log_probs: torch.Tensor  # [R, T] float32: of the new tokens, under what they were drawn from; 0 at padding
    raw_log_probs: torch.Tensor  # [R, T] float32: the same under the softmax of the model's own logits
    sequences: torch.Tensor  # [R, S] int64: a prompt and its new tokens, as a trainer's forward takes them
    prompt_lengths: torch.Tensor  # [R] int64
    seeds: list[int]
    finish_reason: list[FinishReason]  # LENGTH: the text was cut off at ``max_new_tokens``
    stats: Stats  # of all texts together; ``seconds["total"]`` is the time that they took

    @property
    def attention_mask(self) -> torch.Tensor:
        """[R, S] int64, 1 where ``sequences`` is no padding."""
        columns = torch.arange(self.sequences.shape[1], device=self.sequences.device)
        return (columns < (self.prompt_lengths + self.lengths)[:, None]).long()

    def log_probs_under(self, logits: torch.Tensor, temperature: float = 1.0) -> torch.Tensor:
        """Returns what a trainer computes of the new tokens, with gradients: their log-probabilities [R, T] under the
        softmax of ``logits / temperature``, at least in float32, and 0 at padding.

        Args:
            logits: [R, S, V], of a forward of ``sequences`` with ``attention_mask``.
            temperature: > 0.

        Raises:
            ValueError: names the argument, what was given and what is allowed.
        """
        if logits.dim() != 3 or logits.shape[:2] != self.sequences.shape:
            refuse("logits", f"shape {[*logits.shape]}", f"[{', '.join(map(str, self.sequences.shape))}, V]")
        if not temperature > 0:
            refuse("temperature", repr(temperature), "a number > 0")
        # The logits after a token say what follows it, so those of the first new token are the prompt's last.
        places = self.prompt_lengths[:, None] - 1 + torch.arange(self.tokens.shape[1], device=logits.device)
        places = places.masked_fill(~self.mask, 0)[:, :, None]
        rows = logits.gather(1, places.expand(-1, -1, logits.shape[2]))
        rows = rows if rows.dtype == torch.float64 else rows.float()
        known = self.tokens.masked_fill(~self.mask, 0)[:, :, None]
        scored = (rows / temperature).log_softmax(-1).gather(2, known)[:, :, 0]
        return scored.masked_fill(~self.mask, 0.0)


class Rollout:
    """Samples texts of a model that is being trained, on the very module, for reinforcement learning.

    The texts are those of plain sampling: rule ``coupled`` makes a text a function of weights, prompt, settings and
    seed, whatever drafts, how much, and in how many rows. So a training that drafts is the same training as one that
    does not, step by step. On a CPU in float32, where products are those of ``nn.Linear``, this holds to the last bit.
    In 16 bits, on a GPU, or with adapters, another number of rows or drafts rounds otherwise, and a text may change
    where two tokens nearly tie.

    Weights may change between two calls in any way: in place, by ``load_state_dict``, with new ``data``, new parameters
    or modules, by adapters. Modules in training mode are in evaluation mode during a call, so that nothing is dropped
    out, and in training mode again after it. Autocast of accelerate is put aside as well.

    Args:
        target: the model, as for :class:`~specdec.SpeculativeDecoder`; with a wrapper for several processes (DDP), what
            is inside of it.
        draft: who drafts, as there. None: a ``SuffixDrafter`` with a memory of 2048 tokens for each of the last 1024
            prompts, so that a prompt's texts of one epoch draft those of the next. For more prompts in an epoch, or
            longer texts: ``SuffixDrafter(SuffixMemories(max_tokens, max_owners))``, at about 0.1 KB a token.
        num_drafts: K, as there; 0 is plain decoding.
        rows: how many texts are decoded at one time, >= 1. When one ends, the next takes its row.
        backend: the kernels' backend, as there.

    Raises:
        ValueError: names the argument, what was given and what is allowed.

    Example:
        >>> from specdec import Rollout, load_embedded_pair
        >>> model, _, tokenizer = load_embedded_pair()
        >>> rollout = Rollout(model.train())
        >>> batch = rollout(tokenizer(["import os", "def add("]).input_ids, samples=3, max_new_tokens=8, seed=1)
        >>> batch.tokens.shape, model.training
        (torch.Size([6, 8]), True)
        >>> logits = model.eval()(batch.sequences, batch.attention_mask).logits
        >>> bool((batch.log_probs_under(logits) - batch.log_probs).abs().max() < 1e-4)
        True
    """

    def __init__(
        self,
        target: PreTrainedModel,
        draft: PreTrainedModel | Drafter | None = None,
        num_drafts: int | AdaptiveDrafts = DEFAULT_DRAFTS,
        rows: int = 16,
        backend: str = "auto",
    ):
        self.rows = read_count("rows", rows, 1)
        if draft is None:
            draft = SuffixDrafter(SuffixMemories(MEMORY_TOKENS, MEMORIES))
        self._whole = target  # with what is around the model that is decoded, such as peft's
        with evaluating(target):
            self.decoder = SpeculativeDecoder(target, draft, num_drafts, backend)

    def __call__(
        self,
        input_ids: TokenIds,
        attention_mask: torch.Tensor | None = None,
        samples: int = 1,
        max_new_tokens: int = 128,
        params: SamplingParams = OF_THE_MODEL,
        seed: int = 0,
        *,
        eos_token_id: int | Sequence[int] | None = None,
        pad_token_id: int | None = None,
        stop: StoppingCriteria | None = None,
    ) -> RolloutBatch:
        """Samples texts, with the weights that the model has now.

        Args:
            input_ids, attention_mask, eos_token_id, pad_token_id, stop: as in ``SpeculativeDecoder.generate``. There
                may be no prompt.
            samples: n >= 1, texts for each prompt. A prompt that is given twice gets 2 n different ones.
            max_new_tokens: new tokens of every text that does not end earlier, >= 1.
            params: temperature, filters and penalties of all texts, as numbers.
            seed: a signed 64-bit integer, such as the number of the training step. The seed of each text is
                :func:`seed_of` this, its prompt and its number, so other prompts beside it change nothing.

        Raises:
            ValueError: names the argument, what was given and what is allowed.
            RuntimeError: the logits of a text are no distribution, as after a step that diverged.
        """
        target = self.decoder.target
        prompts = read_prompts(input_ids, attention_mask, target.vocab_size)
        read_count("samples", samples, 1)
        check_room(prompts, read_count("max_new_tokens", max_new_tokens, 1), "target", target.max_length)
        if isinstance(seed, bool) or not isinstance(seed, int) or not -(2**63) <= seed < 2**63:
            refuse("seed", shown(seed), "a signed 64-bit integer")
        eos = read_eos(eos_token_id, target.model)
        requests, given = list[Request](), Counter[tuple[int, ...]]()
        same: dict[str, Any] = {"eos_token_id": [*eos], "stop": stop, "log_probs": True}
        for prompt in prompts:
            owner = tuple(prompt)
            for sample in range(given[owner], given[owner] + samples):
                own = prompt, max_new_tokens, params, seed_of(seed, prompt, sample)
                requests.append(Request(*own, id=len(requests), owner=owner, **same))
            given[owner] += samples
        with evaluating(self._whole):
            sequences, stats = self._decode(requests, max(map(len, prompts), default=0) + max_new_tokens)
        return _batch_of(sequences, stats, read_pad(pad_token_id, eos, target.model), target.device)

    def _decode(self, requests: Sequence[Request], max_length: int) -> tuple[list[SequenceState], Stats]:
        """Decodes all requests, which are numbered by their ids. No scheduler outlives its call: its rows hold keys and
        values of the weights that there were."""
        decoder, sequences = self.decoder, list[SequenceState]()
        if not requests:
            return sequences, Stats.empty(decoder.most_drafts)
        rows = min(self.rows, len(requests))
        scheduler = Scheduler(decoder, rows=rows, max_length=max_length, rule=Rule.COUPLED)
        for sequence in scheduler.run(requests):
            if sequence.exception is not None:
                raise sequence.exception
            if sequence.finish_reason == FinishReason.FAILED:
                told = f"text {sequence.request.id}: its logits are no distribution ({sequence.status.name})"
                raise RuntimeError(f"{told} after {len(sequence.tokens)} tokens; have the weights become NaN?")
            sequences.append(sequence)
        sequences.sort(key=lambda sequence: sequence.number)
        scheduler.batch.release()
        return sequences, scheduler.batch.stats_of(sequences)


def seed_of(seed: int, prompt: Sequence[int], sample: int) -> int:
    """Returns the seed of one text of a rollout, a signed 64-bit integer: a hash (BLAKE2b) of all three.

    Args:
        seed: of the call, a signed 64-bit integer.
        prompt: its token ids.
        sample: its number among the texts of this prompt, from 0.
    """
    words = struct.pack(f"<{2 + len(prompt)}q", seed, sample, *prompt)
    return int.from_bytes(blake2b(words, digest_size=8).digest(), "little", signed=True)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Within it, no module of ``model`` is in training mode, and what a trainer has put around the forward of a
    transformers model (autocast by accelerate, fused losses by TRL) is put aside: copies of the model, whose modules
    are exchanged, would call the original through it. After it, all is as it was."""
    modules = [*model.modules()] if isinstance(model, nn.Module) else []
    training = [module for module in modules if module.training]
    wrapped = [(vars(module), vars(module)["forward"]) for module in modules if _is_wrapped(module)]
    for module in training:
        module.training = False
    for attributes, _ in wrapped:
        del attributes["forward"]
    try:
        yield
    finally:
        for module in training:
            module.training = True
        for attributes, forward in wrapped:
            attributes["forward"] = forward


def _is_wrapped(module: nn.Module) -> bool:
    """Whether the forward in place of its class's is one around that, and none that brings weights to a device."""
    if not isinstance(module, PreTrainedModel) or "forward" not in vars(module) or hasattr(module, "_hf_hook"):
        return False
    forward = vars(module)["forward"]
    return inspect.unwrap(getattr(forward, "__func__", forward)) is inspect.unwrap(type(module).forward)


def _batch_of(sequences: Sequence[SequenceState], stats: Stats, pad: int, device: torch.device) -> RolloutBatch:
    prompts = [s.text[: s.prompt_length] for s in sequences]
    new = [s.tokens for s in sequences]
    tokens = join([], [[] for _ in new], new, pad, device)
    lengths = torch.tensor([len(own) for own in new], dtype=torch.int64, device=device)
    mask = torch.arange(tokens.shape[1], device=device) < lengths[:, None]

    def padded(rows: list[list[float] | None]) -> torch.Tensor:
        values = torch.zeros(tokens.shape, dtype=torch.float32, device=device)
        values[mask] = torch.tensor([x for row in rows for x in row or ()], dtype=torch.float32, device=device)
        return values

    return RolloutBatch(
        tokens,
        mask,
        lengths,
        log_probs=padded([s.log_probs for s in sequences]),
        raw_log_probs=padded([s.raw_log_probs for s in sequences]),
        sequences=join([], prompts, new, pad, device),
        prompt_lengths=torch.tensor([len(p) for p in prompts], dtype=torch.int64, device=device),
        seeds=[s.request.seed for s in sequences],
        finish_reason=[s.finish_reason or FinishReason.LENGTH for s in sequences],
        stats=stats,
    )

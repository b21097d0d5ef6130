"""Checks that a head drafts. One that is wired wrongly loads and runs, and only its drafts are never accepted."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from specdec_kernels import SamplingParams, draft_step

from ...models.cache.kv_cache import StaticKVCache, visible_slots
from ...models.forward.cached_model import CachedModel
from ...prompts import read_eos
from .interface import WHOSE, Head, Variant, known_rows
from .layer_ids import LayerIds
from .layer_ids import written as written_ids

PLACES, DRAFTS = 24, 4  # 96 drafts
LENGTH = 72  # most tokens of the text
LITTLE = 0.25  # of the first drafts: fewer are accepted only where the wiring, or the target, is wrong
COLLAPSE = 0.25  # of the first draft's acceptance: a later one has less only where the wrong state is fed back
CLEARLY = 1.2  # times as many accepted drafts make another reading the better one
TEXT = """The harbour was quiet when the first boats came in. Anna counted the crates on the pier, wrote the number into
her book, and asked the men how far out they had been. "Past the second light," said the oldest of them, "and there was
no wind at all." She nodded. In spring the wind often failed for days, and then everyone in the town talked about the
price of fish."""


@dataclass
class Report:
    """What drafts on a short text showed.

    Attributes:
        acceptance: of each draft of a step, the mean probability that it is accepted after those before it were.
        accepted: how many of ``DRAFTS`` drafts are accepted in a step, on average.
        reading: which of the readings in doubt was taken; None: there was no doubt, or it was unfounded.
        others: the results of the other readings.
        hints: if drafts are rarely accepted: the results with other hidden states.
    """

    states: tuple[int, ...]
    acceptance: list[float]
    accepted: float
    reading: str | None = None
    others: Mapping[str, float] = field(default_factory=dict)
    hints: Mapping[str, float] = field(default_factory=dict)

    @property
    def little(self) -> bool:
        """Whether the drafts are rarely accepted, or collapse after the first."""
        return self.acceptance[0] < LITTLE or min(self.acceptance) < COLLAPSE * self.acceptance[0]

    def troubles(self, ids: LayerIds) -> list[str]:
        """Returns what the user should know."""
        of = ", ".join(f"{a:.0%}" for a in self.acceptance)
        lines = []
        if self.reading is not None:
            others = ", ".join(f"{name}: {accepted:.2f}" for name, accepted in self.others.items())
            lines.append(f"taken is {self.reading}, with {self.accepted:.2f} accepted drafts a step ({others})")
        if self.little:
            said = f"hidden states {list(self.states)} ({ids.source})"
            hints = "".join(f"; {accepted:.2f} with {name}" for name, accepted in self.hints.items())
            lines.append(
                f"the head's drafts are rarely accepted: {self.accepted:.2f} of {len(self.acceptance)} a step (of each "
                f"in turn {of}), with {said}{hints}. {WHOSE}"
            )
        return lines


@torch.inference_mode()
def self_check(head: Head, target: CachedModel, tokenizer: PreTrainedTokenizerBase | None = None) -> Report:
    """Has the head draft on a text, and sets the reading in doubt that drafts best.

    Args:
        tokenizer: of the built-in text; None: the target writes one.
    """
    length = min(LENGTH, target.max_length or LENGTH)
    text = [] if tokenizer is None else tokenizer(TEXT)["input_ids"][:length]
    if len(text) < length // 2:
        text = written(target, length)
    first = {name: getattr(head, name) for variant in head.doubts for name in variant.changes}
    readings = [Variant("what config.json says", first), *head.doubts] if head.doubts else [Variant("", {})]
    found: list[tuple[float, list[float], Variant]] = []
    for variant in readings:
        _set(head, {**first, **variant.changes})
        acceptance = acceptance_on(head, target, text)
        found.append((_accepted(acceptance), acceptance, variant))
    best = found[0]
    for each in found[1:]:
        best = each if each[0] > CLEARLY * best[0] else best
    _set(head, {**first, **best[2].changes})
    others = {v.name: accepted for accepted, _, v in found if v is not best[2]}
    reading = None if not head.doubts or (head.certain and best is found[0]) else best[2].name
    report = Report(head.states, best[1], best[0], reading, others)
    if report.little:
        report.hints = _neighbours(head, target, text)
    return report


def _neighbours(head: Head, target: CachedModel, text: list[int]) -> dict[str, float]:
    """Returns how many drafts are accepted with hidden states one before and one after those that the head reads."""
    taken, found, count = head.states, {}, target.config.num_hidden_layers
    for shift in (-1, 1):
        states = tuple(i + shift for i in written_ids(taken, count))
        if len(states) > 1 and 0 <= min(states) and max(states) < count:
            head.states = states
            found[f"layer_ids={list(states)}"] = _accepted(acceptance_on(head, target, text))
    head.states = taken
    return found


def _set(head: Head, changes: Mapping[str, Any]) -> None:
    for name, value in changes.items():
        setattr(head, name, value)


def _accepted(acceptance: list[float]) -> float:
    return torch.tensor(acceptance).cumprod(0).sum().item()


def acceptance_on(head: Head, target: CachedModel, text: list[int]) -> list[float]:
    """Returns, for each of the next drafts in turn, the mean of sum min(p, q) at temperature 1 over places of ``text``.
    That is the probability that rule ``token`` accepts a draft drawn there (Leviathan et al., arXiv 2211.17192,
    section 3.2). The head is fed the text's own tokens instead of drafts."""
    count = min(DRAFTS, head.most_drafts or DRAFTS)
    device, capacity = target.device, target.capacity(len(text) + DRAFTS)
    store, cache, logits = head.new_store(1, capacity), target.new_cache(1, capacity), list[torch.Tensor]()
    cache.features = store
    target.prefill(cache, [text], lambda _, position, fed: logits.append(fed.float()))
    p = torch.cat(logits).softmax(-1)
    # Places in the second half of the text: ``known`` tokens each, of one text.
    known = torch.linspace(len(text) // 2, len(text) - count, PLACES, device=device).long()
    tokens = torch.tensor(text, device=device)
    every = copy.copy(store)
    every.features, every.tokens = (t.expand(PLACES, *t.shape[1:]) for t in (store.features, store.tokens))
    places = known[:, None] + torch.arange(-len(text), -1, device=device)
    rows = known_rows(head, every, places, known - 1, tokens[known - 1], visible_slots(capacity, capacity))
    after = known[:, None] - 1 + torch.arange(count - 1, device=device)
    ahead = head.layout(after, after, rows.layout.visible)
    own = _repeated(cache) if head.reads_target_cache else head.new_cache(PLACES, capacity)
    distributions = head.draft(rows, ahead, own, count)
    means: list[float] = []
    q = next(distributions)
    for i in range(count):
        target_p = p[known - 1 + i]
        target_p = target_p if head.d2t is None else target_p[:, head.d2t]
        means.append(torch.minimum(target_p, q.float().softmax(-1)).sum(-1).mean().item())
        if i + 1 < count:
            q = distributions.send(tokens[known + i][:, None])
    return means


def _repeated(cache: StaticKVCache) -> StaticKVCache:
    """Returns a view of a cache of one row as one of ``PLACES`` rows, to be read."""
    every = copy.copy(cache)
    every.layers = [copy.copy(layer) for layer in cache.layers]
    for layer in every.layers:
        if layer.is_initialized:
            layer.keys, layer.values = (t.expand(PLACES, -1, -1, -1) for t in (layer.keys, layer.values))
    return every


def written(target: CachedModel, count: int) -> list[int]:
    """Returns a text of ``count`` tokens that the target samples."""
    ends = [i for i in read_eos(None, target.model) if i < target.vocab_size]
    config = target.config
    begin = getattr(config, "bos_token_id", None)
    text = [begin if isinstance(begin, int) and begin < target.vocab_size else 0]
    cache = target.new_cache(1, target.capacity(count))
    while len(text) < count:
        place = torch.tensor([[len(text) - 1]], device=target.device)
        cache.lengths = place[0]
        layout = target.layout(place, place, visible_slots(len(text), cache.capacity))
        logits = target(torch.tensor([text[-1:]], device=target.device), cache, layout)[:, -1].float()
        logits[:, ends] = -torch.inf
        draw = draft_step(logits, SamplingParams(1.0), seed=0, position=len(text), offset=0)
        text.append(max(int(draw.tokens[0]), 0))
    return text

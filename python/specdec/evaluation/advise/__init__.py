"""Should this pair speculate, and how? Measures acceptance and the times of steps for about a minute, and predicts."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace

import torch
from torch import nn
from transformers import PreTrainedModel

from specdec_kernels import Rule, SamplingParams

from ...checks import read_count, refuse
from ...decoder import SpeculativeDecoder
from ...drafters.early_exit import EarlyExitDrafter
from ...drafters.heads import HeadDrafter
from ...drafters.protocol import Drafter
from ...loop.draft_length import AdaptiveDrafts
from ...models.cache.kv_cache import visible_slots
from ...models.exchanged.packed_weights import num_parameters
from ...models.forward.cached_model import CachedModel
from ...prompts import check_room
from ..contenders import Prompt
from ..machine import machine
from ..work_counter import Tell, Work, silent
from .compatibility import Compatibility
from .costs import Measured, Workload, measure, shortest_text
from .machine_trouble import Shares, Threads, profile_forward, time_threads
from .new_draft import NewDraft, new_draft
from .prediction import Memory, Prediction, Tried, best, more_accepted, predict
from .words import Verdict, say, verdict

__all__ = ["Advice", "AdviseSettings", "advise"]

# Of the time: all drafters greedily; then, where drafts pay, the best one at a temperature, and in batches.
FIRST, SAMPLED, BATCHES = 0.45, 0.25, 0.30
LEAST_TEXTS, LEAST_TOKENS = 8, 24  # each of the first prompts is continued by as many tokens, whatever time it takes
A_TOKEN = 2.0  # times a forward over one token: what a token of a text takes, with the plain steps beside it
MORE_ALPHA, FASTER = 0.05, 2.0  # what a better draft would be
WIDE = (1, 2, 4, 8)  # K that are timed with several rows


@dataclass(frozen=True)
class AdviseSettings:
    """
    Args:
        seconds: for which steps are measured, > 0; loading models comes on top, and slow models take longer.
        tokens: new tokens of a text, >= 2: reading a prompt counts for less in longer texts.
        most_drafts: the largest K, >= 1. A text has a use for up to ``tokens`` - 1.
        temperature: of sampled texts, > 0.
        batch_sizes: beside 1.
        seed: of sampled texts.
    """

    seconds: float = 50.0
    tokens: int = 64
    most_drafts: int = 8
    temperature: float = 0.8
    batch_sizes: tuple[int, ...] = (2, 4, 8)
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.seconds > 0:
            refuse("seconds", self.seconds, "a number > 0")
        read_count("max_new_tokens", self.tokens, 2)
        read_count("num_drafts", self.most_drafts, 1)
        if not self.temperature > 0:
            refuse("temperature", self.temperature, "a number > 0: greedy texts are measured anyway")
        for size in self.batch_sizes:
            read_count("batch_sizes", size, 2)

    @property
    def largest(self) -> int:
        """The largest K that is timed."""
        return min(self.most_drafts, self.tokens - 1)

    def written(self, forward: float, texts: int, seconds: float) -> int:
        """New tokens of the texts whose steps are timed: ``tokens``, or as many as ``texts`` of them have in so many
        ``seconds`` where a forward takes ``forward``."""
        affordable = int(seconds / (A_TOKEN * forward * texts)) if forward else self.tokens
        return max(min(self.tokens, max(affordable, LEAST_TOKENS)), shortest_text(self.largest))


@dataclass(frozen=True)
class Advice:
    """
    Attributes:
        verdict: what to do, in numbers.
        words: the same in plain English, a sentence or two each.
        tried: each drafter, greedily with one sequence; the fastest first.
        sampled: by rule, the best K of the advised drafter at the temperature; empty where drafts do not pay.
        batches: the best K of the advised drafter by the number of rows, greedily; only 1 where drafts do not pay.
        new_draft: what a draft would have to reach that does not exist; None: the target's layers were not tried.
        costs: seconds of steps by drafter, number of rows and K.
    """

    verdict: Verdict
    words: list[str]
    threads: Threads
    shares: Shares | None
    tried: list[Tried]
    sampled: dict[str, Prediction]
    batches: dict[int, Prediction]
    settings: AdviseSettings
    costs: dict[str, dict[int, dict[int, float]]]
    new_draft: NewDraft | None = None

    def to_dict(self) -> dict:
        whole = asdict(self)
        whole["threads"] |= {"best": self.threads.best, "oversubscribed": self.threads.oversubscribed}
        return whole


def advise(
    target: PreTrainedModel,
    drafters: Mapping[str, PreTrainedModel | Drafter],
    prompts: Sequence[Prompt],
    settings: AdviseSettings | None = None,
    progress: Tell = silent,
    compatibility: Mapping[str, Compatibility] | None = None,
) -> Advice:
    """Measures every drafter beside plain decoding, and the best one at a temperature and in batches, if it pays.

    Where threads wait for CPUs, or a forward of the target mostly copies, that is the advice: it would change every
    other number, so with too many threads nothing else is measured.

    Args:
        target: as ``SpeculativeDecoder`` takes it.
        drafters: by name, as ``SpeculativeDecoder`` takes them; at least one.
        prompts: lists of token ids, at least one. They should be like those that will be decoded, as acceptance
            depends on the text.
        settings: None is ``AdviseSettings()``.
        progress: called with the seconds of the work that are over, of about how many, and what is measured.
        compatibility: what was found of the drafters' tokens, for the words.

    Raises:
        ValueError: names the argument. Also a drafter that cannot be used with this target, or that fails.
    """
    s, found = settings or AdviseSettings(), dict(compatibility or {})
    if not prompts:
        refuse("input_ids", "no prompts", "at least one")
    if not drafters:
        refuse("drafters", "none", "at least one")
    plain = SpeculativeDecoder(target, None, 0)
    decoders = {name: SpeculativeDecoder(target, drafter, s.largest) for name, drafter in drafters.items()}
    longest = max(s.tokens, shortest_text(s.largest))
    for model in (plain.target, *(m for d in decoders.values() if isinstance(m := _model(d), CachedModel))):
        check_room([list(p) for p in prompts], longest, model.name, model.max_length)
    progress(0, 1, "timing threads")
    threads, shares = _machine(plain.target)
    if threads.oversubscribed:
        trouble = Verdict("threads", threads=threads.best)
        return Advice(
            trouble, say(trouble, threads, shares, [], {}, {}, s.tokens, None), threads, shares, [], {}, {}, s, {}
        )

    measured: dict[str, Measured] = {}
    each, least = s.seconds * FIRST / len(decoders), min(len(prompts), LEAST_TEXTS)
    forward = threads.seconds[threads.count]
    texts = Workload(prompts, s.written(forward, least, each), least=least)
    each_takes = max(each, A_TOKEN * forward * least * texts.tokens)
    work = Work(progress, round(each_takes * len(decoders) + s.seconds * (SAMPLED + BATCHES)))
    widths = range(1, s.largest + 1)
    for name, decoder in decoders.items():
        work.begin(f"decoding with {name}")
        # The acceptance of models depends less on the text, and their steps take longer.
        few = texts if _model(decoder) is None else replace(texts, least=(least + 1) // 2)
        measured[name] = measure(plain, decoder, few, 1, widths, each)
        work.did(round(each_takes))
    tried = [_tried(n, m, decoders[n], s.tokens, found.get(n)) for n, m in measured.items()]
    tried.sort(key=lambda t: -t.best.speedup)
    first = tried[0]

    sampled, params = dict[str, Prediction](), SamplingParams(s.temperature)
    batches, costs = {1: first.best}, {n: {1: _seconds(m, s.most_drafts)} for n, m in measured.items()}
    decoder, chances = decoders[first.name], measured[first.name].acceptance.by_position()
    for rule in (Rule.TOKEN, Rule.BLOCK) if first.best.pays else ():
        work.begin(f"sampling with {first.name}")
        drawn = Workload(prompts, texts.tokens, params, rule, s.seed)
        sampled[str(rule)] = best(measure(plain, decoder, drawn, 1, widths, s.seconds * SAMPLED / 2), s.tokens)
        work.did(round(s.seconds * SAMPLED / 2))
    wide = sorted({min(k, s.largest) for k in WIDE})
    for size in sorted(s.batch_sizes) if first.best.pays else ():
        work.begin(f"decoding {size} sequences at a time")
        time = s.seconds * BATCHES / len(s.batch_sizes)
        # Acceptance is that of more steps, on the same texts.
        one = measure(plain, decoder, replace(texts, least=1), size, wide, time)
        batches[size] = max((predict(one, k, s.tokens, by_position=chances) for k in wide), key=lambda p: p.speedup)
        costs[first.name][size] = _seconds(one, s.most_drafts)
        work.did(round(time))
    result = verdict(tried, sampled, batches, threads, shares)
    new = _new_draft(tried, decoders)
    words = say(result, threads, shares, tried, sampled, batches, s.tokens, s.temperature, new)
    return Advice(result, words, threads, shares, tried, sampled, batches, s, costs, new)


def _new_draft(tried: Sequence[Tried], decoders: Mapping[str, SpeculativeDecoder]) -> NewDraft | None:
    """Where the target's layers were tried and no draft model was."""
    found = None
    for t in tried:
        drafter, target = decoders[t.name].drafter, decoders[t.name].target
        if isinstance(drafter, EarlyExitDrafter) and isinstance(drafter.model, CachedModel):
            first, of = (m.config.get_text_config(decoder=True).num_hidden_layers for m in (drafter.model, target))
            found = new_draft(t, first, of, num_parameters(target.model))
        elif t.has_model:
            return None
    return found


def _tried(
    name: str, measured: Measured, decoder: SpeculativeDecoder, tokens: int, compatibility: Compatibility | None
) -> Tried:
    chances = measured.acceptance.by_position()
    steps = {k: predict(measured, k, tokens) for k in sorted(measured.steps)}
    parts = {}
    for k, times in sorted(measured.steps.items()):  # T(k) may be more than the median: it never falls
        parts[k] = {part: times.part(part) * steps[k].step / times.median for part in times.parts}
    return Tried(
        name=name,
        has_model=_model(decoder) is not None,
        best=best(measured, tokens),
        steps=steps,
        alpha=measured.acceptance.alpha,
        by_position=chances,
        tested=measured.acceptance.tested,
        plain_forward=measured.plain.part("target_forwards"),
        parts=parts,
        memory=_memory(decoder),
        compatibility=compatibility,
        half_the_draft=best(measured, tokens, faster_draft=FASTER),
        more_alpha=best(measured, tokens, by_position=more_accepted(chances, measured.acceptance.alpha, MORE_ALPHA)),
    )


def _model(decoder: SpeculativeDecoder) -> CachedModel | nn.Module | None:
    drafter = decoder.drafter
    if isinstance(drafter, HeadDrafter):
        return drafter.head
    return None if drafter is None else drafter.model


def _memory(decoder: SpeculativeDecoder) -> Memory:
    model = _model(decoder)
    module = model.model if isinstance(model, CachedModel) else model
    target = {p.data_ptr(): p.nbytes for p in decoder.target.model.parameters()}
    own = module.parameters() if isinstance(module, nn.Module) else ()
    weights = {p.data_ptr(): p.nbytes for p in own if p.data_ptr() not in target}
    drafter, most = decoder.drafter, decoder.most_drafts
    slots = decoder.target.slot_bytes(), 0 if drafter is None else drafter.cache_bytes()
    rows = decoder.target.row_bytes(most + 1), 0 if drafter is None else drafter.row_bytes(most)
    return Memory(sum(target.values()), sum(weights.values()), *slots, *rows)


def _seconds(measured: Measured, most: int) -> dict[int, float]:
    """T(K) by K, as far as a decoder asks for it by default; a line goes on where fewer drafts were measured."""
    return {k: measured.seconds(k) for k in range(max(most, AdaptiveDrafts().max_drafts) + 1)}


@torch.inference_mode()
def _machine(target: CachedModel) -> tuple[Threads, Shares]:
    """Times a plain forward with several numbers of threads, and profiles one of five tokens."""
    about = machine()
    cpus: dict = about["cpus"]  # type: ignore[assignment]
    usable, load = cpus["usable"], os.getloadavg()[0] if hasattr(os, "getloadavg") else None
    if target.device.type != "cpu":  # torch's threads only launch
        count = torch.get_num_threads()
        threads = Threads(count, max(usable, count), None, {count: 0.0})
    else:
        threads = time_threads(lambda: _forward(target, 1), usable, load)
    return threads, profile_forward(lambda: _forward(target, 5), target.device.type == "cuda")


def _forward(target: CachedModel, width: int, stored: int = 32) -> object:
    """A forward over ``width`` tokens after ``stored`` ones. Making its cache takes no time worth speaking of."""
    cache = target.new_cache(1, target.capacity(64), width)
    places = torch.arange(stored, stored + width, device=target.device)[None]
    cache.lengths = places[0, :1]
    layout = target.layout(places, places, visible_slots(stored + width, cache.capacity))
    return target(places % target.vocab_size, cache, layout)

"""The loop of one ``generate``: the draft proposes, the target scores, one operation decides, the host keeps count."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from typing import NamedTuple

import torch

from specdec_kernels import SpeculativeStep, speculative_step

from .adaptive import AdaptiveDrafts, AdaptiveLengths, DraftLengths, FixedLengths, step_costs
from .cache import visible_slots
from .drafters import Drafter, Drafts, Generation, Step
from .drafters.guard import GuardedSession
from .forward import CachedModel
from .record import Ends, SequenceRecord
from .result import Emission, GenerationResult
from .stats import Stats
from .token_table import HostTable


class Wanted(NamedTuple):
    """What is to be reported beside the tokens."""

    log_probs: bool = False
    logits: bool = False
    on_emit: Callable[[Emission], None] | None = None


class Decided(NamedTuple):
    """One step, before it is entered."""

    step: Step
    drafts: Drafts
    logits: torch.Tensor  # [B, k + 1, V], the target's own
    out: SpeculativeStep
    processed: bool  # whether processors changed what was decided on


class Batch:
    """One call of ``generate``: the host's record of every sequence, and the loop.

    The host decides when a sequence ends, so each step has one copy to the device (last tokens, lengths) and
    one back (the emitted tokens).

    Args:
        num_drafts: K, or how to choose it.
        costs: T(0), T(1), ... of a batch of this size as measured before; None: not yet.
        processor_prompts: what processors and penalties see of the prompts where that differs from them.
    """

    def __init__(
        self,
        generation: Generation,
        target: CachedModel,
        num_drafts: int | AdaptiveDrafts,
        costs: list[float] | None,
        ends: Ends,
        table: HostTable | None,
        wanted: Wanted,
        processor_prompts: list[list[int]] | None = None,
    ):
        self.generation, self.target, self.num_drafts, self.costs = generation, target, num_drafts, costs
        self.ends, self.table, self.wanted = ends, table, wanted
        self.most = num_drafts.max_drafts if isinstance(num_drafts, AdaptiveDrafts) else num_drafts
        self.records = []
        for b, prompt in enumerate(generation.prompts):
            text = list(prompt)
            seen = text if processor_prompts is None else list(processor_prompts[b])
            self.records.append(SequenceRecord(b, text, seen, Stats.empty(self.most), len(prompt)))
            self.records[b].live = ends.max_new_tokens > 0
        self.texts = [r.text for r in self.records]
        self.steps = self.draft_forwards = 0
        self.session: GuardedSession | None = None

    def run(self, drafter: Drafter | None) -> None:
        """The target's cache is to hold every prompt but for its last token."""
        if not any(r.live for r in self.records):
            return
        if drafter is not None and self.most > 0:
            self.session = GuardedSession(drafter, self.generation)
        lengths = self._lengths()
        while any(r.live for r in self.records):
            step, allowed = self._plan([lengths.next(r.number) if self._may_draft(r) else 0 for r in self.records])
            self._take(self._decide(step, allowed), lengths)
        if self.session is not None:
            self.session.finish([r.tokens for r in self.records])

    def _may_draft(self, record: SequenceRecord) -> bool:
        return record.live and record.drafts and self.session is not None and self.session.alive

    def _lengths(self) -> DraftLengths:
        if not isinstance(self.num_drafts, AdaptiveDrafts):
            return FixedLengths(self.num_drafts)
        if self.costs is None and self.session is not None and self.session.alive:
            self.costs = self._measure()
            self.generation.stopwatch.lap("measuring")
        return AdaptiveLengths(self.costs or [1.0], len(self.records))

    def _measure(self) -> list[float]:
        """T(0), T(1), ... of this batch: its first step, several times, with nothing entered."""

        def seconds(call: Callable[[], object]) -> float:
            start = time.perf_counter()
            call()
            if self.target.device.type == "cuda":
                torch.cuda.synchronize(self.target.device)
            return time.perf_counter() - start

        def plan(num_drafts: int) -> Step:
            return self._plan([num_drafts] * len(self.records))[0]

        def verify(tokens: int) -> float:
            step = plan(tokens - 1)
            drafts = step.last_two[:, :1].expand(-1, step.num_drafts)
            return seconds(lambda: self._forward(step, drafts))

        def draft(num_drafts: int) -> float:
            step = plan(num_drafts)
            return seconds(lambda: self.session.draft(step)) if step.num_drafts else 0.0

        return step_costs(self.most, draft, verify)

    def _decide(self, step: Step, allowed: torch.Tensor) -> Decided:
        """One step: ``allowed`` is ``step.allowed`` on the device. Changes nothing but what lies behind the caches'
        lengths."""
        g, lap = self.generation, self.generation.stopwatch.lap
        drafts = self.session.draft(step) if step.num_drafts and self.session is not None else None
        drafts = drafts or Drafts(step.last_two[:, :0])
        lap("loop")
        logits = self._forward(step, drafts.tokens)
        lap("target_forwards")
        processed = logits
        if g.processors is not None:
            processed = g.processors(logits, step.processed, step.allowed, drafts.tokens)
        width = drafts.tokens.shape[1]
        out = speculative_step(
            processed,
            drafts.tokens,
            drafts.logits,
            params=g.params,
            seed=g.seed,
            position=step.position,
            num_drafts=allowed if width == step.num_drafts else allowed.clamp(max=width),
            draft_stats=drafts.stats,
            compact_q=drafts.compact,
            d2t=drafts.d2t,
            table=step.table,
            rule=g.rule,
            log_probs=self.wanted.log_probs,
            backend=g.backend,
        )
        lap("kernels")
        return Decided(step, drafts, logits, out, processed is not logits)

    def _forward(self, step: Step, drafts: torch.Tensor) -> torch.Tensor:
        """The target sees the last known token and the drafts: row i decides the token after i drafts."""
        cache, fed = self.generation.target_cache, drafts.shape[1] + 1
        cache.lengths = step.lengths
        columns = slice(1, 1 + fed)
        layout = self.target.layout(step.positions[:, columns], step.slots[:, columns], step.visible)
        # A draft outside the vocabulary ends the drafts, but what is fed must be a token.
        tokens = torch.cat((step.last_two[:, 1:], drafts.clamp(0, self.target.vocab_size - 1)), 1)
        return self.target(tokens, cache, layout)

    def _plan(self, lengths: list[int]) -> tuple[Step, torch.Tensor]:
        """The inputs of a step of so many drafts, from the host's record in one copy; ``Step.allowed`` also on the
        device."""
        g, trash = self.generation, self.generation.capacity - 1
        # One token is always drawn from the target, so no draft can go past max_new_tokens.
        room = [self.ends.max_new_tokens - r.emitted - 1 if r.live else 0 for r in self.records]
        allowed = [min(n, most) for n, most in zip(lengths, room, strict=True)]
        num_drafts, longest, columns = max(allowed), 0, []
        # Plain lists and one tensor: measured 94 us a step, a dozen torch operations 124, numpy 200 (B = 1, K = 4).
        for record, drafts in zip(self.records, allowed, strict=True):
            text, known = record.text, len(record.text)
            places = range(known - 2, known + drafts) if record.live else ()
            positions = [max(p, 0) for p in places] + [0] * (num_drafts + 2 - len(places))
            slots = [p if p >= 0 else trash for p in places] + [trash] * (num_drafts + 2 - len(places))
            columns.append((text[max(known - 2, 0)], text[-1], known, known - 1, drafts, *positions, *slots))
            longest = max(longest, known + drafts)
        state = torch.tensor(list(zip(*columns, strict=True)), device=self.target.device)
        sizes = (2, 1, 1, 1, num_drafts + 2, num_drafts + 2)
        last_two, position, lengths_stored, allowed_on_device, positions, slots = state.split(sizes)
        step = Step(
            index=self.steps,
            num_drafts=num_drafts,
            lengths=lengths_stored[0],
            position=position[0],
            last_two=last_two.T,
            positions=positions.T,
            slots=slots.T,
            visible=visible_slots(longest, g.capacity),
            allowed=allowed,
            table=None if self.table is None else self.table.on_device(),
            texts=self.texts,
            processed=[] if g.processors is None else [r.processed if r.live else [] for r in self.records],
        )
        return step, allowed_on_device[0]

    def _take(self, decided: Decided, lengths: DraftLengths) -> None:
        """Enters what a step decided."""
        step, drafts, logits, out, _ = decided
        width = drafts.tokens.shape[1]
        report = [out.tokens, drafts.tokens, out.num_accepted[:, None], out.status[:, None]]
        if drafts.status is not None:
            report.append(drafts.status)
        rows = torch.cat(report, 1).tolist()
        values = self._log_probs(decided) if self.wanted.log_probs else None
        self.steps += 1
        self.draft_forwards += drafts.forwards
        for b, record in enumerate(self.records):
            if not record.live:
                continue
            sizes = (width, min(step.allowed[b], width), self.target.vocab_size, drafts.forwards)
            tokens, tested, accepted = record.take(rows[b], *sizes, self.ends)
            lengths.record(b, tested, accepted)
            if record.drafts and record.drafter_failed():
                record.drafts = False
                names = record.status.name
                warnings.warn(
                    f"sequence {b}: its drafts are no numbers ({names}), it drafts no more", RuntimeWarning, 2
                )
            if values is not None:
                record.log_probs += values[0][b][: len(tokens)]
                record.raw_log_probs += values[1][b][: len(tokens)]
            if self.wanted.logits:
                record.logits += logits[b, : len(tokens)].clone().unbind()
            if self.table is not None:
                self.table.add(b, tokens)
            if self.wanted.on_emit is not None and tokens:
                self.wanted.on_emit(Emission(b, tokens, record.produced_by[-len(tokens) :]))
        self.generation.stopwatch.lap("loop")

    def _log_probs(self, decided: Decided) -> list[list[list[float]]]:
        """Under the law that was drawn from, and under softmax of the model's own logits."""
        out = decided.out
        raw = out.raw_log_probs
        if decided.processed:  # the step saw others than the model's own
            log_probs = decided.logits.float().log_softmax(-1)
            raw = log_probs.gather(2, out.tokens.clamp(min=0)[:, :, None])[:, :, 0]
        return torch.stack((out.log_probs, raw)).tolist()

    def result(self, sequences: torch.Tensor) -> GenerationResult:
        records, wanted = self.records, self.wanted
        stats = Stats.total((r.stats for r in records), self.most)
        stats.target_forwards, stats.draft_forwards = self.steps, self.draft_forwards
        stats.seconds = self.generation.stopwatch.with_total()
        return GenerationResult(
            sequences,
            tokens=[r.tokens for r in records],
            produced_by=[r.produced_by for r in records],
            status=[r.status for r in records],
            stats=stats,
            sequence_stats=[r.stats for r in records],
            log_probs=[r.log_probs for r in records] if wanted.log_probs else None,
            raw_log_probs=[r.raw_log_probs for r in records] if wanted.log_probs else None,
            logits=[_stacked(r.logits, self.target) for r in records] if wanted.logits else None,
            drafter_error=None if self.session is None else self.session.error,
            step_costs=self.costs if isinstance(self.num_drafts, AdaptiveDrafts) else None,
        )


def _stacked(rows: list[torch.Tensor], target: CachedModel) -> torch.Tensor:
    return torch.stack(rows) if rows else torch.empty(0, target.vocab_size, device=target.device)

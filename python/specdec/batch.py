"""The loop of one ``generate``: the draft proposes, the target scores, one operation decides, the host keeps count."""

from __future__ import annotations

from collections.abc import Callable
from itertools import takewhile

import torch

from specdec_kernels import SpeculativeStep, Status, speculative_step
from specdec_kernels.types import TARGET_FAULTS

from .cache import StaticKVCache, visible_slots
from .drafters import Drafter, Drafts, DraftSession, Generation, Step
from .forward import CachedModel
from .result import Emission, GenerationResult, Producer
from .stats import Stats
from .token_table import HostTable

_TARGET_FAULTS = int(TARGET_FAULTS)  # plain: arithmetic on flags is slow


class Batch:
    """One call of ``generate``: the host's record of every sequence, and the loop.

    The host decides when a sequence ends, so each step has one copy to the device (last tokens, lengths) and
    one back (the emitted tokens).
    """

    def __init__(
        self,
        generation: Generation,
        max_new_tokens: int,
        num_drafts: int,
        eos: frozenset[int],
        table: HostTable | None,
        log_probs: bool,
        on_emit: Callable[[Emission], None] | None,
    ):
        self.generation, self.max_new_tokens, self.num_drafts = generation, max_new_tokens, num_drafts
        self.eos, self.table, self.on_emit = eos, table, on_emit
        size = len(generation.prompts)
        self.tokens: list[list[int]] = [[] for _ in range(size)]
        self.produced_by: list[list[Producer]] = [[] for _ in range(size)]
        self.log_probs: list[list[float]] | None = [[] for _ in range(size)] if log_probs else None
        self.raw_log_probs: list[list[float]] | None = [[] for _ in range(size)] if log_probs else None
        self.status = [Status.OK] * size
        self.stats = [Stats.empty(num_drafts) for _ in range(size)]
        self.live = list(range(size)) if max_new_tokens > 0 else []
        self.target_forwards = self.draft_forwards = 0
        self._last_two = [(p[-2:-1] or p[-1:]) + p[-1:] for p in generation.prompts]

    def run(self, target: CachedModel, drafter: Drafter | None) -> None:
        g = self.generation
        if not self.live:
            return
        cache = target.new_cache(len(g.prompts), g.capacity)
        target.prefill(cache, [p[:-1] for p in g.prompts])
        g.stopwatch.lap("prefill")
        session = drafter.start(g) if drafter is not None and self.num_drafts > 0 else None
        while self.live:
            self._step(target, cache, session)

    def _step(self, target: CachedModel, cache: StaticKVCache, session: DraftSession | None) -> None:
        g, lap = self.generation, self.generation.stopwatch.lap
        step, allowed_on_device = self._plan(target.device)
        drafts = session.draft(step) if step.num_drafts else _no_drafts(step)

        # The target sees the last known token and the drafts: row i decides the token after i drafts.
        cache.lengths = step.lengths
        layout = target.layout(step.positions[:, 1:], step.slots[:, 1:], step.visible)
        # A draft outside the vocabulary ends the drafts, but what is fed must be a token.
        fed = torch.cat((step.last_two[:, 1:], drafts.tokens.clamp(0, target.vocab_size - 1)), 1)
        lap("loop")
        logits = target(fed, cache, layout)
        lap("target_forwards")
        processed = logits
        if g.processors is not None:
            processed = g.processors(logits, step.texts, step.allowed, drafts.tokens)
        out = speculative_step(
            processed,
            drafts.tokens,
            drafts.logits,
            params=g.params,
            seed=g.seed,
            position=step.position,
            num_drafts=allowed_on_device,
            draft_stats=drafts.stats,
            compact_q=drafts.compact,
            d2t=drafts.d2t,
            table=step.table,
            rule=g.rule,
            log_probs=self.log_probs is not None,
            backend=g.backend,
        )
        lap("kernels")
        self.target_forwards += 1
        self.draft_forwards += drafts.forwards
        report = [out.tokens, drafts.tokens, out.num_accepted[:, None], out.status[:, None]]
        if drafts.status is not None:
            report.append(drafts.status)
        rows = torch.cat(report, 1).tolist()
        before = [len(tokens) for tokens in self.tokens]
        self._take(rows, step, target.vocab_size, drafts.forwards)
        if self.log_probs is not None:
            self._take_log_probs(out, logits if processed is not logits else None, before)
        lap("loop")

    def _plan(self, device: torch.device) -> tuple[Step, torch.Tensor]:
        """The step's inputs, from the host's record in one copy; ``Step.allowed`` also on the device."""
        trash = self.generation.capacity - 1
        # One token is always drawn from the target, so no draft can go past max_new_tokens.
        allowed, live = [0] * len(self.tokens), [False] * len(self.tokens)
        for b in self.live:
            live[b] = True
            allowed[b] = min(self.num_drafts, self.max_new_tokens - len(self.tokens[b]) - 1)
        num_drafts, longest, columns = max(allowed), 0, []
        # Plain lists and one tensor: measured 94 us a step, a dozen torch operations 124, numpy 200 (B = 1, K = 4).
        for b, (prompt, tokens) in enumerate(zip(self.generation.prompts, self.tokens, strict=True)):
            known = len(prompt) + len(tokens)
            places = range(known - 2, known + allowed[b]) if live[b] else ()
            positions = [max(p, 0) for p in places] + [0] * (num_drafts + 2 - len(places))
            slots = [p if p >= 0 else trash for p in places] + [trash] * (num_drafts + 2 - len(places))
            columns.append((*self._last_two[b], known, known - 1, allowed[b], *positions, *slots))
            longest = max(longest, known + allowed[b])
        state = torch.tensor(list(zip(*columns, strict=True)), device=device)
        sizes = (2, 1, 1, 1, num_drafts + 2, num_drafts + 2)
        last_two, position, lengths, allowed_on_device, positions, slots = state.split(sizes)
        visible = visible_slots(longest, self.generation.capacity)
        texts = None
        if self.generation.processors is not None:
            known = zip(live, self.generation.prompts, self.tokens, strict=True)
            texts = [prompt + tokens if lives else [] for lives, prompt, tokens in known]
        table = None if self.table is None else self.table.on_device()
        on_device = (lengths[0], position[0], last_two.T, positions.T, slots.T)
        return Step(num_drafts, *on_device, visible, allowed, table, texts), allowed_on_device[0]

    def _take(self, rows: list[list[int]], step: Step, vocab_size: int, draft_forwards: int) -> None:
        """Enters what the step decided: ``rows`` are [tokens (K+1), drafts (K), accepted, status, draft status (K)]."""
        k, allowed, live = step.num_drafts, step.allowed, []
        for b in self.live:
            row = rows[b]
            accepted, status = row[2 * k + 1], row[2 * k + 2]
            drafts = row[k + 1 : k + 1 + allowed[b]]
            drafted = sum(1 for _ in takewhile(lambda token: 0 <= token < vocab_size, drafts))
            for draft_status in row[2 * k + 3 : 2 * k + 3 + allowed[b]]:
                status |= draft_status
            tokens = row[:accepted]
            producers = [Producer.ACCEPTED] * accepted
            failed = status & _TARGET_FAULTS != 0
            tested = accepted if failed else min(accepted + 1, drafted)
            if not failed:
                tokens.append(row[accepted])
                producers.append(Producer.RECOVERED if accepted < drafted else Producer.BONUS)
            end = next((i + 1 for i, token in enumerate(tokens) if token in self.eos), None)
            if end is not None:
                tokens, producers = tokens[:end], producers[:end]
                accepted, tested = min(accepted, end), min(tested, end)
                status &= ~_TARGET_FAULTS  # of a row behind the end
            self.tokens[b] += tokens
            if self.table is not None:
                self.table.add(b, tokens)
            self.produced_by[b] += producers
            if status:
                self.status[b] |= Status(status)
            self.stats[b].record(drafted, tested, accepted, len(tokens), draft_forwards)
            if self.on_emit is not None and tokens:
                self.on_emit(Emission(b, tokens, producers))
            if not failed and end is None and len(self.tokens[b]) < self.max_new_tokens:
                self._last_two[b] = ([*self._last_two[b], *tokens])[-2:]
                live.append(b)
        self.live = live

    def _take_log_probs(self, out: SpeculativeStep, logits: torch.Tensor | None, before: list[int]) -> None:
        """Of the tokens that each sequence got since it had ``before`` of them. ``logits``: the model's own, where
        processors changed those that the step saw."""
        raw = out.raw_log_probs
        if logits is not None:
            raw = logits.float().log_softmax(-1).gather(2, out.tokens.clamp(min=0)[:, :, None])[:, :, 0]
        values = torch.stack((out.log_probs, raw)).tolist()
        for record, rows in zip((self.log_probs, self.raw_log_probs), values, strict=True):
            for mine, row, tokens, start in zip(record, rows, self.tokens, before, strict=True):
                mine += row[: len(tokens) - start]

    def result(self, sequences: torch.Tensor) -> GenerationResult:
        stats = Stats.total(self.stats, self.num_drafts)
        stats.target_forwards, stats.draft_forwards = self.target_forwards, self.draft_forwards
        stats.seconds = self.generation.stopwatch.with_total()
        counts = (self.status, stats, self.stats)
        return GenerationResult(sequences, self.tokens, self.produced_by, *counts, self.log_probs, self.raw_log_probs)


def _no_drafts(step: Step) -> Drafts:
    return Drafts(step.last_two[:, :0])

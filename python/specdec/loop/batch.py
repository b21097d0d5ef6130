"""The loop: the draft proposes, the target scores, one operation decides, the rows advance, the host keeps count."""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Mapping
from contextlib import nullcontext
from typing import NamedTuple

import torch
from transformers import LogitsProcessorList

from specdec_kernels import Rule, TokenTable, speculative_step

from ..drafters.draft_length import AdaptiveDrafts, AdaptiveLengths, DraftLengths, FixedLengths
from ..drafters.guard import GuardedSession
from ..drafters.protocol import Drafter, Drafts, Generation, Step
from ..models.cached_model import CachedModel
from ..models.kv_cache import visible_slots
from ..result import Emission, error_text
from ..sampling.params import Bias
from ..sampling.processors import Processors
from ..sampling.token_table import HostTable
from ..stats import Stopwatch
from .cuda_graphs import StepGraphs
from .device_rows import RowSettings, RowState
from .sequence import SequenceRecord
from .step_costs import measured_costs
from .step_report import Decided, Launched, Wanted, launched, log_probs


class Entry(NamedTuple):
    """A sequence, and what it asks for."""

    record: SequenceRecord
    params: Mapping[str, float]  # every one of SamplingParams
    seed: int
    bias: Bias
    min_new_tokens: int
    processors: LogitsProcessorList


class Batch:
    """R rows and the loop over them. Every row holds one sequence at a time.

    A step runs on the device alone, from the rows' state to the rows' state; the host reads what it reports, and edits
    rows between steps. Where nothing needs the host (``runs_ahead``), it may read a report one step late.

    Args:
        num_drafts: K, or how to choose it.
        costs: T(0), T(1), ... of a batch of this size as measured before; None: not yet.
        eos: tokens that ``min_new_tokens`` holds back.
        max_eos: end-of-sequence tokens that a sequence may have, at most.
        steady: all steps have the same shape, so a row's numbers do not depend on how far others are.
        isolate: a drafter that fails for one row is asked for the others.
        ahead: steps that the device may be ahead of the host, 0 or 1.
        graphs: runs a step as one CUDA graph; None: no graphs.
    """

    def __init__(
        self,
        target: CachedModel,
        drafter: Drafter | None,
        num_drafts: int | AdaptiveDrafts,
        size: int,
        capacity: int,
        *,
        rule: Rule,
        compact_q: int,
        backend: str,
        eos: list[int],
        max_eos: int,
        costs: list[float] | None = None,
        wanted: Wanted | None = None,
        steady: bool = False,
        isolate: bool = False,
        ahead: int = 0,
        graphs: StepGraphs | None = None,
    ):
        self.target, self.num_drafts, self.costs, self.wanted = target, num_drafts, costs, wanted or Wanted()
        self.steady, self.ahead, self.graphs = steady, ahead, graphs
        adaptive = isinstance(num_drafts, AdaptiveDrafts)
        self.most = num_drafts.max_drafts if adaptive else num_drafts
        self.rows: list[SequenceRecord | None] = [None] * size
        self.state = RowState(size, capacity, self.most, max_eos, target.device)
        self.table = HostTable(size, eos, target.device)
        self.stopwatch = Stopwatch()
        self.generation = Generation(
            size=size,
            capacity=capacity,
            rule=rule,
            compact_q=compact_q,
            backend=backend,
            stopwatch=self.stopwatch,
            target_cache=target.new_cache(size, capacity),
            processors=Processors(size, target.vocab_size),
            params=self.state.params,
            seed=self.state.seed,
        )
        self.steps = self.draft_forwards = 0
        self.session: GuardedSession | None = None
        if drafter is not None and self.most > 0:
            self.session = GuardedSession(drafter, self.generation, isolate=isolate)
        models = [target, getattr(drafter, "model", target)]
        self._reads_only_filled = all(model.reads_only_filled for model in models)
        self._lengths: DraftLengths | None = None if adaptive else FixedLengths(self.most)
        self._pending: deque[Launched] = deque()
        # Graphs are captured on the current device, which belongs to a thread.
        self._on_device = torch.cuda.device(target.device) if target.device.type == "cuda" else nullcontext()

    # ---- rows ----------------------------------------------------------------------------------------------

    @property
    def live(self) -> bool:
        return any(record is not None and record.live for record in self.rows)

    def admit(self, entries: Mapping[int, Entry]) -> None:
        """These rows begin sequences of >= 1 new token, whose prompts but for their last tokens are in the target's
        cache."""
        for row, entry in entries.items():
            record = self.rows[row] = entry.record
            settings = RowSettings(record.text, record.room, entry.seed, record.ends.eos, entry.params)
            self.state.set(row, settings)
            self.table.begin(
                row, entry.params, entry.bias, record.processed, record.prompt_length, entry.min_new_tokens
            )
            self.generation.processors.of_rows[row] = entry.processors
            if self._lengths is not None:
                self._lengths.begin(row)
        if self.session is not None:
            self.session.admit({row: entry.record.text for row, entry in entries.items()})
            self._note_failed_drafts(self.session)

    def end(self, row: int) -> None:
        """The row's sequence gets no more steps, and its settings no longer count."""
        self.state.clear(row)
        self.table.end(row)
        self.generation.processors.of_rows[row] = LogitsProcessorList()
        self.generation.processors.errors.pop(row, None)

    def release(self, row: int) -> SequenceRecord:
        """Empties a row whose sequence has ended."""
        record, self.rows[row] = self.rows[row], None
        if self.session is not None:
            self.session.release(row, record.tokens)
        return record

    # ---- steps ---------------------------------------------------------------------------------------------

    @property
    def runs_ahead(self) -> bool:
        """Whether the next step needs nothing that the host would have to read first."""
        drafts_alone = self.session is None or not self.session.alive or not self.session.reads_texts
        fixed = not isinstance(self.num_drafts, AdaptiveDrafts)
        return drafts_alone and fixed and not (self.generation.processors or self.table.counts or any(self.wanted))

    def step(self) -> list[Emission]:
        """One step of all rows. Returns what was emitted, by this one or, where the host is late, by the one before.
        An error that is not of one row ends all their sequences, which have it as theirs."""
        ahead, emissions = self.ahead if self.runs_ahead else 0, []
        try:
            with self._on_device:
                self._catch_up(ahead, emissions)
                if self.live:
                    self._launch()
                self._catch_up(ahead, emissions)
        except BaseException as error:  # of a forward of all rows, or an interrupt: nobody knows what the rows have
            self._fail(error)
            if not isinstance(error, Exception):
                raise
        self.stopwatch.lap("loop")
        return emissions

    def _catch_up(self, ahead: int, emissions: list[Emission]) -> None:
        """Reads reports until the device is so many steps ahead, or has no more to do."""
        while len(self._pending) > (ahead if self.live else 0):
            emissions += self._take(self._pending.popleft())

    def _fail(self, error: BaseException) -> None:
        """Ends all sequences; nobody learns what steps on their way decide."""
        for row, record in enumerate(self.rows):
            if record is not None and record.live:
                record.fail(error)
                self.end(row)
        self._pending.clear()

    def _launch(self) -> None:
        # Where a graph runs the step, or the device is ahead, a step sees nothing of what the host knows.
        table = self.table.on_device()
        graphs = self.graphs if self.runs_ahead and table is None else None
        alone = graphs is not None or (self.runs_ahead and self.ahead > 0)
        self.state.flush()
        self.generation.params, self.generation.greedy = self.state.params, self.state.greedy
        wanted = self._wanted_drafts()
        self.state.set_wanted(wanted)
        allowed, texts = wanted, []
        if not alone:
            if not self.steady:  # one token is always drawn from the target, so no draft can go past the room
                allowed = [min(n, r.room - 1) if n else 0 for n, r in zip(wanted, self.rows, strict=True)]
            texts = [[] if r is None else r.text for r in self.rows]
        num_drafts = max(allowed)
        visible = self.visible(num_drafts)

        def run() -> Decided:
            return self._decide(self.plan(num_drafts, visible, allowed, texts, table))

        if graphs is None:
            decided = run()
        else:
            decided = graphs.run((num_drafts, visible, *self.state.signature), run, self.session)
            self.stopwatch.lap("replays")
        if self.session is not None:
            self._note_failed_drafts(self.session)
        self._pending.append(launched(list(self.rows), decided))
        self.steps += 1
        self.draft_forwards += decided.drafts.forwards

    def visible(self, num_drafts: int) -> int:
        """Slots that attention is shown: what the longest sequence has, with what steps on their way may add."""
        capacity = self.generation.capacity
        if self._reads_only_filled:
            return capacity
        longest = max(len(r.text) for r in self.rows if r is not None and r.live)
        return visible_slots(longest + len(self._pending) * (self.most + 1) + num_drafts, capacity)

    def _note_failed_drafts(self, session: GuardedSession) -> None:
        for row, error in session.failed_rows.items():
            if (record := self.rows[row]) is not None:
                record.drafts, record.drafter_error = False, error_text(error)
        session.failed_rows.clear()

    def _wanted_drafts(self) -> list[int]:
        may_draft = self.session is not None and self.session.alive
        if self._lengths is None:
            if self.costs is None and may_draft:
                self.costs = measured_costs(self)
                self.stopwatch.lap("measuring")
            self._lengths = AdaptiveLengths(self.costs or [1.0], len(self.rows))
        return [
            self._lengths.next(row) if may_draft and r is not None and r.live and r.drafts else 0
            for row, r in enumerate(self.rows)
        ]

    def plan(
        self,
        num_drafts: int,
        visible: int,
        allowed: list[int],
        texts: list[list[int]],
        table: TokenTable | None,
        wanted: torch.Tensor | None = None,
    ) -> Step:
        """A step from where the rows are."""
        places, of_rows = self.state.places(num_drafts, wanted), self.generation.processors.of_rows
        return Step(
            index=self.steps,
            num_drafts=num_drafts,
            lengths=places.stored,
            position=self.state.known,
            last_two=self.state.last_two,
            positions=places.positions,
            slots=places.slots,
            visible=visible,
            allowed=allowed,
            allowed_on_device=places.allowed,
            table=table,
            texts=texts,
            processed=[r.processed if r and r.live and own else [] for r, own in zip(self.rows, of_rows, strict=True)],
        )

    def forward(self, step: Step, drafts: torch.Tensor) -> torch.Tensor:
        """The target sees the last known token and the drafts: row i decides the token after i drafts."""
        cache, fed = self.generation.target_cache, drafts.shape[1] + 1
        cache.lengths = step.lengths
        columns = slice(1, 1 + fed)
        layout = self.target.layout(step.positions[:, columns], step.slots[:, columns], step.visible)
        # A draft outside the vocabulary ends the drafts, but what is fed must be a token.
        tokens = torch.cat((step.last_two[:, 1:], drafts.clamp(0, self.target.vocab_size - 1)), 1)
        return self.target(tokens, cache, layout)

    def _decide(self, step: Step) -> Decided:
        """One step, entered in the rows' state: the device alone, nothing waits for it."""
        g, lap = self.generation, self.stopwatch.lap
        drafts = self.session.draft(step) if step.num_drafts and self.session is not None else None
        drafts = drafts or Drafts(step.last_two[:, :0])
        if self.steady:
            drafts = drafts.widened(step.num_drafts)
        lap("loop")
        logits = self.forward(step, drafts.tokens)
        lap("target_forwards")
        processed = logits
        if g.processors:
            processed = g.processors(logits, step.processed, step.allowed, drafts.tokens)
        width = drafts.tokens.shape[1]
        allowed = step.allowed_on_device
        if width < step.num_drafts:
            allowed = allowed.clamp(max=width)
        out = speculative_step(
            processed,
            drafts.tokens,
            drafts.logits,
            params=g.params,
            seed=g.seed,
            position=step.position,
            num_drafts=allowed,
            draft_stats=drafts.stats,
            compact_q=drafts.compact,
            d2t=drafts.d2t,
            table=step.table,
            rule=g.rule,
            log_probs=self.wanted.log_probs,
            backend=g.backend,
        )
        counts = torch.stack((allowed, self.state.advance(out), out.num_accepted, out.status), 1)
        report = (out.tokens, drafts.tokens, counts, *(() if drafts.status is None else (drafts.status,)))
        lap("kernels")
        return Decided(drafts, logits, out, processed is not logits, torch.cat(report, 1))

    def _take(self, step: Launched) -> list[Emission]:
        """Enters what a step decided, in the sequences that had not ended before it."""
        drafts, emissions = step.decided.drafts, []
        if step.event is not None:
            step.event.synchronize()
        width, reports = drafts.tokens.shape[1], step.report.tolist()
        values = log_probs(step.decided) if self.wanted.log_probs else None
        for row, (record, report) in enumerate(zip(step.records, reports, strict=True)):
            if record is None or not record.live:
                continue
            try:
                if (error := self.generation.processors.errors.get(row)) is not None:
                    raise error
                tokens, tested, accepted = record.take(report, width, self.target.vocab_size, drafts.forwards)
            except Exception as error:  # of its processors, or its stop: the others have no part in it
                record.fail(error)
                self.end(row)
                continue
            if self._lengths is not None:
                self._lengths.record(row, tested, accepted)
            if record.drafts and record.drafter_failed():
                record.drafts = False
                names = record.status.name
                warnings.warn(
                    f"sequence {record.number}: its drafts are no numbers ({names}), it drafts no more",
                    RuntimeWarning,
                    2,
                )
            if values is not None:
                record.log_probs += values[0][row][: len(tokens)]
                record.raw_log_probs += values[1][row][: len(tokens)]
            if self.wanted.logits:
                record.logits += step.decided.logits[row, : len(tokens)].clone().unbind()
            self.table.add(row, tokens)
            if tokens:
                emissions.append(Emission(record.number, tokens, record.produced_by[-len(tokens) :]))
            if not record.live:
                self.end(row)
        return emissions

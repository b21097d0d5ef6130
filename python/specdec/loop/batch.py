"""The host's side of a batch: assigns sequences to rows, launches steps, and applies their reports to the sequences."""

from __future__ import annotations

import time
import warnings
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import NamedTuple

import torch
from transformers import LogitsProcessorList

from specdec_kernels import Rule

from ..drafters.adaptive_lengths import Learned, OwnLengths, SharedLength, learned, sampled_lengths
from ..drafters.draft_length import AdaptiveDrafts, DraftLengths, FixedLengths, Remaining, RowResult, most_drafts
from ..drafters.guard import GuardedSession
from ..drafters.predicted import PredictedDrafter
from ..drafters.protocol import Drafter, Generation
from ..models.cached_model import CachedModel
from ..models.kv_cache import visible_slots
from ..result import Emission, error_text
from ..sampling.processors import Processors
from ..sampling.token_table import HostTable
from ..stats import Stopwatch
from .cuda_graphs import StepGraphs
from .device_rows import DeviceRows, RowStart, StepPlan
from .rows_in_use import RowsInUse
from .sequence import Entry, SequenceRecord
from .step import SpeculativeLoop
from .step_report import PendingReport, StepResult
from .step_timer import StepTimer
from .token_log_probs import MAX_TOP
from .tree_step import TreeLoop
from .typical import Typical
from .unseen_tokens import UnseenTokens


@dataclass(frozen=True)
class BatchConfig:
    """The configuration of a batch.

    Attributes:
        num_drafts: K, or how to choose it.
        size: the number of rows. A row holds one sequence at a time.
        capacity: slots of a row, the trash slot included.
        max_eos: the largest number of end-of-sequence tokens of one sequence.
        learned: with ``AdaptiveDrafts``: what the decoder knows of steps with so many rows; else None.
        logits: whether the target's logits are recorded for every emitted token.
        steady: all steps of one K have the same shape, unless K is chosen and there are no graphs. A row's results
            then do not depend on the room of other rows.
        isolate: a drafter that fails for one row still drafts for the others.
        fewer_rows: where K adapts to the batch, steps have no more rows than are in use, or few more.
        ahead: how many steps the device may be ahead of the host, 0 or 1.
        graphs: runs a step as one CUDA graph; None: no graphs.
        nodes: the most nodes of a tree that a step verifies, whose paths have up to K; 0: chains.
        typical: accepts the nodes of trees by this lossy rule, with ``rule`` coupled elsewhere; None: exactly.
        predictions: sequences may have predictions. Not with trees.
    """

    target: CachedModel
    drafter: Drafter | None
    num_drafts: int | AdaptiveDrafts
    size: int
    capacity: int
    rule: Rule
    compact_q: int
    backend: str
    max_eos: int
    learned: Callable[[int], Learned] | None = None
    logits: bool = False
    steady: bool = False
    isolate: bool = False
    fewer_rows: bool = False
    ahead: int = 0
    graphs: StepGraphs | None = None
    nodes: int = 0
    typical: Typical | None = None
    predictions: bool = False

    @property
    def most_drafts(self) -> int:
        """The largest K."""
        return most_drafts(self.num_drafts)


class _Launched(NamedTuple):
    """A step that the host has not read yet."""

    records: list[SequenceRecord | None]  # the rows' sequences when it was launched
    report: PendingReport
    num_drafts: int
    wanted: list[int]  # drafts of each row, not limited by its room
    timer: StepTimer | None  # where K adapts


class Batch:
    """A batch of rows, and the host's part of their steps.

    A step reads and updates the rows' state on the device without the host. The host reads the step's report, and
    edits rows between steps. If the next step does not need the host (``runs_ahead``), the host may read a report one
    step late.

    Args:
        lengths: chooses K, in the place of what ``config.num_drafts`` asks for; that is then the largest K.

    Attributes:
        steps, draft_forwards: forwards of target and draft so far.
        num_drafts: K of the last step.
        waiting: how many tokens each sequence that waits for a row may emit; set by who admits them. None: there are
            many.
    """

    def __init__(self, config: BatchConfig, lengths: DraftLengths | None = None):
        self.config, self.graphs = config, config.graphs
        target, size, capacity, most = config.target, config.size, config.capacity, config.most_drafts
        self.rows: list[SequenceRecord | None] = [None] * size
        self.device_rows = DeviceRows(size, capacity, most, config.max_eos, target.device)
        self.table = HostTable(size, config.max_eos, target.device)
        self.stopwatch = Stopwatch()
        self.generation = Generation(
            size=size,
            capacity=capacity,
            most_drafts=most,
            rule=config.rule,
            compact_q=config.compact_q,
            backend=config.backend,
            stopwatch=self.stopwatch,
            target_cache=target.new_cache(size, capacity),
            processors=Processors(size, target.vocab_size),
            params=self.device_rows.params,
            seed=self.device_rows.seed,
            ends=[frozenset()] * size,
            predictions=[()] * size,
            owners=[None] * size,
            nodes=config.nodes,
        )
        self.steps = self.draft_forwards = self.num_drafts = 0
        self.waiting: list[int] | None = []
        self.session: GuardedSession | None = None
        drafter = PredictedDrafter(config.drafter) if config.predictions else config.drafter
        if drafter is not None and most > 0:
            self.session = GuardedSession(drafter, self.generation, isolate=config.isolate)
        parts = (target, self.session, self.generation, self.device_rows)
        self.loop = TreeLoop(*parts, config.typical) if config.nodes else SpeculativeLoop(*parts)
        models = [target, getattr(config.drafter, "model", target)]
        self._reads_only_filled = all(model.reads_only_filled for model in models)
        self._draft_lengths = lengths or _draft_lengths(config)
        adaptive = config.num_drafts if isinstance(config.num_drafts, AdaptiveDrafts) else None
        self._adapts = adaptive is not None and self.session is not None
        fewer = config.fewer_rows and adaptive is not None and not adaptive.alone
        # A compiled forward has the number of rows as a constant. On a GPU each number takes kernels and graphs.
        fewer = fewer and not any(getattr(model, "is_compiled", False) for model in models)
        self._rows_in_use = RowsInUse(size, 4 if config.graphs is not None else 2) if fewer else None
        # What chooses K while a row's text depends on K.
        depends = config.rule != Rule.COUPLED or config.typical is not None
        few = config.graphs is not None
        self._sampled = sampled_lengths(adaptive, few, size) if adaptive is not None and depends else None
        self._unseen = UnseenTokens()
        self._pending: deque[_Launched] = deque()
        # Graphs are captured on the current device, which is set for each thread.
        self._on_device = torch.cuda.device(target.device) if target.device.type == "cuda" else nullcontext()

    # ---- rows ----------------------------------------------------------------------------------------------

    @property
    def live(self) -> bool:
        return any(record is not None and record.live for record in self.rows)

    def admit(self, entries: Mapping[int, Entry]) -> None:
        """Begins a sequence in each of these rows. The target's cache must already hold each prompt except its last
        token, and each sequence must have room for at least one new token."""
        for row, entry in entries.items():
            record = self.rows[row] = entry.record
            drafting = record.drafting
            record.drafts = drafting.most != 0 and (self.config.drafter is not None or len(drafting.prediction) > 0)
            start = RowStart(record.text, record.room, entry.seed, record.ends.eos, entry.params)
            self.device_rows.set(row, start)
            shortest = record.ends.eos, entry.min_new_tokens
            self.table.begin(row, entry.params, entry.bias, record.processed, record.prompt_length, *shortest)
            self.generation.processors.of_rows[row] = entry.processors
            self.generation.ends[row] = record.ends.eos
            self.generation.predictions[row] = drafting.prediction if record.drafts else ()
            self.generation.owners[row] = drafting.owner
            for lengths in self._lengths:
                lengths.begin(row)
            self._unseen.begin(row)
        if self.session is not None:
            self.session.admit({row: entry.record.text for row, entry in entries.items()})
            self._note_failed_drafts(self.session)

    def end(self, row: int) -> None:
        """Ends the steps of the row's sequence, and removes its settings."""
        self.device_rows.clear(row)
        self.table.end(row)
        self.generation.processors.of_rows[row] = LogitsProcessorList()
        self.generation.ends[row] = frozenset()
        self.generation.predictions[row], self.generation.owners[row] = (), None
        self.generation.processors.errors.pop(row, None)

    def release(self, row: int) -> None:
        """Empties a row whose sequence has ended."""
        record, self.rows[row] = self.rows[row], None
        if self.session is not None and record is not None:
            self.session.release(row, record.tokens)

    # ---- steps ---------------------------------------------------------------------------------------------

    @property
    def runs_ahead(self) -> bool:
        """Whether the next step can be launched before the host has read the reports of earlier steps."""
        config = self.config
        drafts_alone = self.session is None or not self.session.alive or not self.session.reads_texts
        return drafts_alone and not (self.generation.processors or self.table.counts or config.logits)

    def step(self) -> list[Emission]:
        """Runs one step of all rows. Returns what this step emitted or, if the device is ahead, what the previous step
        emitted. An error that does not belong to one row ends all sequences, and is recorded in each."""
        ahead = self.config.ahead if self.runs_ahead else 0
        emissions: list[Emission] = []
        try:
            with self._on_device:
                self._catch_up(ahead, emissions)
                if self.live:
                    self._launch(emissions)
                self._catch_up(ahead, emissions)
        except BaseException as error:  # in a forward of all rows, or an interrupt: the rows' state is now unknown
            self._fail(error)
            if not isinstance(error, Exception):
                raise
        self.stopwatch.lap("loop")
        return emissions

    def _catch_up(self, ahead: int, emissions: list[Emission]) -> None:
        """Reads reports until the device is at most ``ahead`` steps ahead, or all reports if no sequence is live.
        Emissions are added report by report, so that they are kept even if the next report raises."""
        while len(self._pending) > (ahead if self.live else 0):
            emissions += self._take(self._pending.popleft())

    def _fail(self, error: BaseException) -> None:
        """Ends all sequences with ``error``, and drops the reports that were not read yet."""
        for row, record in enumerate(self.rows):
            if record is not None and record.live:
                record.fail(error)
                self.end(row)
        self._pending.clear()

    def _launch(self, emissions: list[Emission]) -> None:
        self._use_rows(emissions)
        if not self.live:  # as the reports that were read for it say
            return
        wanted, chosen = self._wanted_drafts()
        if max(wanted) > 0:
            self._show_unseen(wanted, emissions)
            if not self.live:
                return
            wanted = [n if r and r.live and r.drafts else 0 for n, r in zip(wanted, self.rows, strict=True)]
        graphs = self.graphs if self.runs_ahead and self.table.on_device() is None else None
        # A step that is a graph, or runs ahead, does not get what only the host knows.
        alone = graphs is not None or (self.runs_ahead and self.config.ahead > 0)
        self.device_rows.flush()
        self.generation.params, self.generation.seed = self.device_rows.params, self.device_rows.seed
        self.generation.greedy = self.device_rows.greedy
        self.device_rows.set_wanted(wanted)
        # Columns without drafts would only cost time where the steps differ in K anyway.
        steady = self.config.steady and (self.graphs is not None or not chosen)
        plan = self._with_log_probs(self._plan(wanted, steady, alone))
        self._unseen.note(self.rows, plan.num_drafts)

        def run() -> StepResult:
            return self.loop.step(plan)

        timer = StepTimer(self.config.target.device) if self._adapts else None
        if graphs is None:
            result = run()
        else:
            shape = (plan.num_drafts, plan.visible, plan.log_probs, plan.num_scored, plan.top)
            result = graphs.run((*shape, *self.device_rows.signature), run, self.session)
            self.stopwatch.lap("replays")
        if timer is not None:
            timer.stop(counts=graphs is None or graphs.settled)
        if self.session is not None:
            self._note_failed_drafts(self.session)
        records = self.rows[: self.device_rows.count]
        self._pending.append(_Launched(records, PendingReport(result), plan.num_drafts, wanted, timer))
        self.steps += 1
        self.num_drafts = plan.num_drafts
        self.draft_forwards += result.drafts.forwards

    def _use_rows(self, emissions: list[Emission]) -> None:
        """Sets how many rows the next step has. The times of steps with other numbers of rows are others, so all
        reports are read before."""
        size = len(self.rows)
        if self._rows_in_use is None or (self.session is not None and not self.session.takes_fewer_rows):
            count = size
        else:
            highest = max(row for row, record in enumerate(self.rows) if record is not None)
            count = self._rows_in_use.next(highest + 1 if self._chooses else size)
        if count != self.device_rows.count:
            while self._pending:
                emissions += self._take(self._pending.popleft())
            self.device_rows.use(count)
            self._draft_lengths.use(count)

    def _plan(self, wanted: list[int], steady: bool, alone: bool = False) -> StepPlan:
        """Plans a step in which each row drafts up to ``wanted`` tokens. If the host knows the rows' room, it limits
        K by it: the device enforces the room anyway, but a step with fewer columns is cheaper.

        Args:
            alone: the step does not get what only the host knows.
        """
        count, texts = self.device_rows.count, []
        rows, allowed, of_rows = self.rows[:count], wanted[:count], self.generation.processors.of_rows[:count]
        if not alone:
            if not steady:
                allowed = [min(n, max(r.room - 1, 0)) if r else 0 for n, r in zip(allowed, rows, strict=True)]
            texts = [[] if r is None else r.text for r in rows]
        num_drafts = max(allowed)
        return StepPlan(
            step=self.steps,
            num_drafts=num_drafts,
            steady=steady,
            visible=self._visible(max(num_drafts, self.config.nodes)),
            allowed=allowed,
            table=self.table.on_device(count),
            texts=texts,
            processed=[r.processed if r and r.live and own else [] for r, own in zip(rows, of_rows, strict=True)],
        )

    def _with_log_probs(self, plan: StepPlan) -> StepPlan:
        """Returns ``plan`` with the log-probabilities that the rows' sequences asked for. There are two values of
        ``top`` only, because captured steps fix it."""
        asked = {row: record.asked for row, record in enumerate(self.rows) if record and record.asked.emitted}
        if not asked:
            return plan
        # The kernel's raw log-probabilities are of the logits that it reads, which are those after processors.
        processed = self.generation.processors.of_rows
        scored = [row for row, own in asked.items() if own.top is not None or processed[row]]
        top = MAX_TOP if any(own.top for own in asked.values()) else 0
        return plan._replace(log_probs=True, num_scored=self.device_rows.set_scored(scored), top=top)

    def _visible(self, num_drafts: int) -> int:
        """Returns the slots that attention reads: those of the longest sequence, and those that steps without a report
        may have added."""
        capacity = self.config.capacity
        if self._reads_only_filled:
            return capacity
        longest = max(len(r.text) for r in self.rows if r is not None and r.live)
        return visible_slots(longest + len(self._pending) * (self.config.most_drafts + 1) + num_drafts, capacity)

    def _note_failed_drafts(self, session: GuardedSession) -> None:
        for row, error in session.failed_rows.items():
            if (record := self.rows[row]) is not None:
                record.drafts, record.drafter_error = False, error_text(error)
        session.failed_rows.clear()

    @property
    def _lengths(self) -> list[DraftLengths]:
        return [self._draft_lengths, *([] if self._sampled is None else [self._sampled])]

    @property
    def _chooses(self) -> bool:
        """Whether one K is chosen for all rows, as no row's text needs a K that does not depend on other rows."""
        return self._adapts and (self._sampled is None or self.device_rows.greedy)

    def _wanted_drafts(self) -> tuple[list[int], bool]:
        """Returns how many tokens each row should draft in the next step, and whether that was chosen for this step."""
        live = [row for row, record in enumerate(self.rows) if record is not None and record.live]
        if self.session is None or not self.session.alive:
            return [0] * len(self.rows), False
        drafting = [row for row in live if (record := self.rows[row]) is not None and record.drafts]
        if not drafting:
            return [0] * len(self.rows), False
        caps = {row: n for row in drafting if (r := self.rows[row]) is not None and (n := r.drafting.most) is not None}
        lengths = self._draft_lengths if self._sampled is None or self._chooses else self._sampled
        rooms = {row: r.room for row in live if (r := self.rows[row]) is not None}
        remaining = None if self.waiting is None else Remaining(rooms, self.waiting)
        wanted, chosen = lengths.next(drafting, len(live), remaining, caps), not isinstance(lengths, FixedLengths)
        return [min(n := wanted.get(row, 0), caps.get(row, n)) for row in range(len(self.rows))], chosen

    def _show_unseen(self, wanted: list[int], emissions: list[Emission]) -> None:
        """Shows the drafter what was emitted in steps without drafts, and the prompts of new sequences, in the rows
        that draft now. The host must know these texts, so it first reads the reports of their steps."""
        rows = self._unseen.rows(wanted)
        if not rows or self.session is None:
            return
        if any(step.records[row] is self.rows[row] for step in self._pending for row in rows):
            while self._pending:
                emissions += self._take(self._pending.popleft())
        texts = {row: r.text for row in rows if (r := self.rows[row]) is not None and r.live}
        started = time.perf_counter()
        self.session.show(texts, self._unseen.pop(rows))
        self._draft_lengths.caught_up(time.perf_counter() - started)
        self._note_failed_drafts(self.session)

    def _take(self, step: _Launched) -> list[Emission]:
        """Applies a step's report to the sequences that had not ended before the step."""
        reports, result = step.report.read(), step.report.result
        emissions, results = [], []
        for row, (record, report) in enumerate(zip(step.records, reports, strict=True)):
            if record is None or not record.live:
                continue
            asked = min(step.wanted[row], record.room - 1)
            try:
                if (error := self.generation.processors.errors.get(row)) is not None:
                    raise error
                tokens, accepted = record.take(report, result.drafts.forwards)
            except Exception as error:  # from its processors or its stop, so it does not concern other sequences
                record.fail(error)
                self.end(row)
                continue
            results.append(RowResult(row, asked, accepted, len(tokens), not record.live))
            if record.drafts and record.drafter_failed():
                record.drafts = False
                # Without the sequence's number: Python remembers every text that it was warned with, and a server's
                # numbers never end.
                why = f"its draft logits are NaN or infinite ({record.status.name})"
                warnings.warn(f"a sequence drafts no more: {why}", RuntimeWarning, 2)
            if record.asked.emitted:
                record.add_log_probs(report, len(tokens))
            if self.config.logits:
                record.logits += result.emitted_logits(row, len(tokens)).unbind()
            self.table.add(row, tokens)
            if tokens:
                emissions.append(record.emission(len(tokens), report))
            if not record.live:
                self.end(row)
        if step.timer is not None and (seconds := step.timer.seconds) is not None:
            self._draft_lengths.took(step.num_drafts, seconds)
        for lengths in self._lengths:
            lengths.record(step.num_drafts, results)
        return emissions


def _draft_lengths(config: BatchConfig) -> DraftLengths:
    if not isinstance(config.num_drafts, AdaptiveDrafts):
        return FixedLengths(config.num_drafts)
    drafts, few = config.num_drafts, config.graphs is not None
    if drafts.alone:
        return OwnLengths(lambda: learned(drafts, few), config.size)
    assert config.learned is not None
    return SharedLength(config.learned(config.size), config.size, config.learned)

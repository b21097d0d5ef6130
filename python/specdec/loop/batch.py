"""The host's driver of a batch: begins sequences in rows, launches steps, and enters their reports in the sequences.

``decode`` fills a batch and drains it. A ``Scheduler`` feeds it piece by piece.
"""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from typing import NamedTuple

import torch

from ..checks import is_failure
from ..drafters.guard import GuardedSession
from ..result import FinishReason
from ..sampling.grammar import Grammar
from ..sampling.token_table import HostTable
from ..stats import Stats
from .batch_config import BatchConfig
from .draft_length import CopyResult, RowResult, StepOutcome
from .prompt_reader import PromptReader
from .report import PendingReport, RowReport, StepResult, StepTimer
from .rows import Rows
from .sequence import Output, SequenceState, decoding
from .step import StepRunner
from .step_planner import StepPlanner
from .unseen import UnseenTexts


class _Launched(NamedTuple):
    """A step that the host has not read yet."""

    sequences: list[SequenceState | None]  # that decode in the rows; None: the row is free, or its prompt is being read
    report: PendingReport
    wanted: list[int]  # drafts of each row, not limited by its room
    timer: StepTimer | None  # where K adapts, and the step's time says what later ones take
    outcome: StepOutcome  # without what the report says


class Batch:
    """A batch of rows, and the host's part of their steps.

    A step reads and updates the rows' state on the device without the host. The host reads the step's report, and
    edits rows between steps. If the next step does not need the host (``runs_ahead``), the host may read a report one
    step late.

    A row is given to a sequence, whose prompt is then read: of all at once (``add``, ``prefill``), or of one after the
    other (``admit``, ``read_part``). From then on the sequence takes part in steps, until it ends and leaves the row.

    Attributes:
        sequences: the one that each row is given to; None: the row is free.
        rows: their state on the device.
        steps, draft_forwards: forwards of target and draft so far.
        num_drafts: K of the last step.
    """

    def __init__(self, config: BatchConfig):
        self.config = config
        target, size, most = config.target, config.size, config.num_drafts.most
        self.sequences: list[SequenceState | None] = [None] * size
        self.state = config.new_state()
        self.timer = self.state.timer
        self.rows = Rows(size, config.capacity, most, config.nodes, config.max_eos, target.device)
        self.table = HostTable(size, config.max_eos, target.device)
        self.session: GuardedSession | None = None
        if config.drafter is not None and most > 0:
            self.session = GuardedSession(config.drafter, self.state)
        self.runner = StepRunner(target, self.session, self.state, self.rows, config.rule)
        self.planner = StepPlanner(config, self.sequences, self.state, self.rows, self.session)
        self.unseen = UnseenTexts(self.sequences, self.session, self._read_of)
        self.prompts = PromptReader(
            config,
            self.sequences,
            self.state.target_cache,
            self.session,
            begin=self._begin,
            show=self.unseen.show_row,
            lowest=self.planner.varies_rows,
        )
        self.steps = self.draft_forwards = self.num_drafts = 0
        self._pending: deque[_Launched] = deque()
        self._outputs: list[Output] = []
        # Graphs are captured on the current device, which is set for each thread.
        self._on_device = torch.cuda.device(target.device) if target.device.type == "cuda" else nullcontext()

    # ---- rows ----------------------------------------------------------------------------------------------

    @property
    def decoding(self) -> dict[int, SequenceState]:
        """The sequences that take part in steps, by row."""
        return decoding(self.sequences)

    @property
    def live(self) -> int:
        """How many these are."""
        return len(self.decoding)

    @property
    def prefilling(self) -> int:
        """How many rows wait until their prompt is read."""
        return len(self.prompts.unread)

    @property
    def has_outputs(self) -> bool:
        """Whether there is anything that the next step returns, even if no row decodes."""
        return bool(self._outputs)

    def add(self, sequences: Mapping[int, SequenceState]) -> None:
        """Gives free rows to sequences, whose prompts are to be read."""
        self.prompts.add(sequences)

    def admit(self, sequence: SequenceState) -> None:
        """Gives a free row to a sequence, with what the rows hold of its prompt's beginning. The prompts of all others
        should have been read, since they may begin in the same way."""
        try:
            self.prompts.place(sequence)
        except Exception as error:  # memory for the copy, perhaps
            sequence.fail(error)
            self.finish(sequence)

    def prefill(self) -> None:
        """Reads all prompts at once, and begins their sequences. All rows of the batch must have been added. An error
        is raised."""
        self.prompts.read_all()
        self.timer.lap("prefill")

    def read_part(self) -> int:
        """Reads the next part of the prompt that was admitted first, alone, and begins its sequence after the last one.
        An error ends this sequence alone. Returns how many tokens were read."""
        sequence = self.prompts.unread[0]
        try:
            count = self.prompts.read_part()
        except BaseException as error:  # from the forward of this prompt alone
            if not is_failure(error):
                raise
            sequence.fail(error)
            self.finish(sequence)
            count = 0
        self.timer.lap("prefill")
        return count

    def _begin(self, sequences: list[SequenceState]) -> None:
        """Lets sequences whose prompts are stored take part in steps."""
        prompts: dict[int, list[int]] = {}
        for sequence in sequences:
            if sequence.room == 0:  # only its prompt was asked for
                sequence.finish_reason = FinishReason.LENGTH
                self.finish(sequence)
                continue
            row, request = self.sequences.index(sequence), sequence.request
            sequence.begun, prompts[row] = True, sequence.text
            sequence.may_draft = sequence.may_draft and self.session is not None and self.session.alive
            self.rows.set(row, sequence)
            ends = sequence.eos, request.min_new_tokens
            self.table.begin(row, sequence.params, sequence.bias, sequence.seen, sequence.prompt_length, *ends)
            grammar = request.grammar if isinstance(request.grammar, Grammar) else None
            prediction = sequence.prediction if sequence.may_draft else ()
            self.state.begin(row, sequence.processors, grammar, sequence.eos, prediction, request.owner)
        if self.session is not None and prompts:
            self.session.begin(prompts)

    def finish(self, sequence: SequenceState) -> None:
        """Emits the last output of a sequence that has ended without a step, and empties its row if it has one."""
        self._outputs.append(sequence.output())
        if sequence in self.sequences:
            self._leave(self.sequences.index(sequence), sequence)

    def _leave(self, row: int, sequence: SequenceState) -> None:
        """Empties the row of a sequence that has ended."""
        self.prompts.leave(row)
        self.sequences[row] = None
        if not sequence.begun:
            return
        self.rows.clear(row)
        self.table.end(row)
        self.state.end(row)
        if self.session is not None:
            self.session.end(row, sequence.tokens)

    def release(self) -> None:
        """Leaves the caches to the next batch, after the last step of this one."""
        self.config.target.keep(self.state.target_cache)
        if self.session is not None:
            self.session.release()

    def stats_of(self, sequences: Iterable[SequenceState]) -> Stats:
        """Returns the statistics of all that the batch decoded, with the forwards and times that its ``sequences``
        shared."""
        stats = Stats.total((s.stats for s in sequences), self.state.most_drafts)
        stats.target_forwards, stats.draft_forwards = self.steps, self.draft_forwards
        stats.seconds = self.timer.with_total()
        return stats

    # ---- steps ---------------------------------------------------------------------------------------------

    @property
    def runs_ahead(self) -> bool:
        """Whether the next step can be launched before the host has read the reports of earlier steps."""
        drafts_alone = self.session is None or not self.session.needs_host
        state = self.state
        return drafts_alone and not (state.processors or state.grammars or self.table.counts or self.config.logits)

    def step(self) -> list[Output]:
        """Runs one step of all rows. Returns what has been emitted since the last call: by this step or, if the device
        is ahead, by the previous one. An error that does not belong to one row ends all sequences that decode."""
        try:
            with self._on_device:
                ahead = int(self.config.async_scheduling and self.runs_ahead)
                self._read(ahead)
                if self.live:
                    self._launch()
                self._read(ahead)
                if not self.live:  # what is still ahead has no sequences
                    self._read()
        except BaseException as error:  # in a forward of all rows, or an interrupt: the rows' state is now unknown
            self._fail(error)
            if not is_failure(error):
                raise
        self.timer.lap("loop")
        outputs, self._outputs = self._outputs, []
        return outputs

    def _fail(self, error: BaseException) -> None:
        """Ends all sequences that decode with ``error``, and drops the reports that were not read yet."""
        self._pending.clear()
        for sequence in self.decoding.values():
            sequence.fail(error)
            self.finish(sequence)

    def _launch(self) -> None:
        """Launches a step. Some steps need reports that were not read yet, by which all sequences may have ended."""
        config, planner, rows = self.config, self.planner, self.rows
        if (count := planner.count_rows()) != rows.count:
            self._read()  # the times of steps with other numbers of rows are others
            rows.use(count)
        wanted, chosen = planner.wanted_drafts()
        if max(wanted) > 0:
            self.unseen.show(row for row, most in enumerate(wanted) if most)
        if not self.live:
            return
        if self.session is None or not self.session.alive:
            wanted = [0] * len(self.sequences)
        graphs = config.graphs if self.runs_ahead and self.table.on_device() is None else None
        rows.flush()
        rows.set_wanted(wanted)
        host = planner.host_step(
            self.steps,
            wanted[:count],
            chosen=chosen,
            host_knows=graphs is None and not (config.async_scheduling and self.runs_ahead),
            # Columns without drafts would only cost time where steps differ in K anyway.
            fixed_shape=config.graphs is not None or not chosen,
            unread=len(self._pending),
        )
        self.unseen.note(host.num_drafts > 0)
        table = self.table.on_device(count)

        def run() -> StepResult:
            return self.runner.run(rows.place(host, table))

        adapts = config.num_drafts.adapts and self.session is not None
        timer = StepTimer(config.target.device) if adapts else None
        if graphs is None:
            before = self._first_runs() if adapts else 0
            result = run()
            settled = adapts and self._first_runs() == before
        else:
            result = graphs.run((*host.key, *rows.key), run, self.session)
            self.timer.lap("replays")
            settled = graphs.settled
        drafts = result.drafts
        timer = timer if settled and not drafts.caught_up else None
        if timer is not None:
            timer.stop()
        num_drafts = host.num_drafts if drafts.share is None else drafts.share.num_drafts
        width = num_drafts if drafts.parents is not None else min(drafts.tokens.shape[1], num_drafts)
        reading = self.unseen.take_seconds()
        looking = self.session.take_seconds() if self.session is not None else 0.0
        outcome = StepOutcome(count, num_drafts, width, (), None, reading, drafts.forwards, looking)
        sequences = [s if s is not None and s.begun else None for s in self.sequences[:count]]
        self._pending.append(_Launched(sequences, PendingReport(result), wanted, timer, outcome))
        self.steps += 1
        self.num_drafts = num_drafts
        self.draft_forwards += drafts.forwards

    def _first_runs(self) -> int:
        """How many forwards so far took longer than they will when they come again."""
        drafter = self.config.drafter
        models = self.config.target, drafter.model if drafter else None
        return sum(model.first_runs for model in models if model is not None)

    # ---- reports -------------------------------------------------------------------------------------------

    def _read(self, ahead: int = 0) -> None:
        """Reads reports until the device is at most ``ahead`` steps ahead."""
        while len(self._pending) > ahead:
            self._enter(self._pending.popleft())

    def _read_of(self, sequences: Mapping[int, SequenceState]) -> None:
        """Reads all reports if any is of one of these sequences, which are given by row."""
        if any(step.sequences[row] is s for step in self._pending for row, s in sequences.items()):
            self._read()

    def _enter(self, step: _Launched) -> None:
        """Enters a step's report in the sequences that had not ended before the step."""
        result, results = step.report.result, []
        drafts, copies = result.drafts, result.drafts.copies
        for row, (sequence, report) in enumerate(zip(step.sequences, step.report.read(), strict=True)):
            if sequence is None or not sequence.live:
                continue
            asked = min(step.wanted[row], self.planner.room_for_drafts(sequence)) if step.wanted[row] else 0
            try:
                tokens, accepted, report = self._enter_row(row, sequence, report, drafts.forwards)
            except BaseException as error:  # from its processors or its stop, so it concerns no other sequence
                if not is_failure(error):
                    raise
                sequence.fail(error)
                self.finish(sequence)
                continue
            if self.config.first_drafts is not None:
                self.config.first_drafts.note(report.drafted, accepted)
            copy = None
            if copies is not None:
                copy = CopyResult(copies.matched[row], copies.tokens[row], tokens, copies.votes_of(row))
            beside = drafts.one_hot is not None and drafts.one_hot[row]
            results.append(RowResult(asked, accepted, len(tokens), not sequence.live, copy, beside))
            if sequence.may_draft and sequence.drafter_failed():
                sequence.may_draft = False
                # Without the sequence's number: Python remembers every text that it was warned with, and a server's
                # numbers never end.
                why = f"its draft logits are NaN or infinite ({sequence.status.name})"
                warnings.warn(f"a sequence drafts no more: {why}", RuntimeWarning, 2)
            if self.config.logits:
                sequence.logits += result.emitted_logits(row, len(tokens)).unbind()
            self.table.add(row, tokens)
            if tokens or not sequence.live:
                self._outputs.append(sequence.output(len(tokens), report))
            if not sequence.live:
                self._leave(row, sequence)
        seconds = None if step.timer is None else step.timer.seconds
        self.config.num_drafts.observe(step.outcome._replace(results=results, seconds=seconds))

    def _enter_row(
        self, row: int, sequence: SequenceState, report: RowReport, draft_forwards: int
    ) -> tuple[list[int], int, RowReport]:
        """Returns the tokens that a sequence emitted, how many drafts of it were accepted, and its report, as far as
        its grammar goes. Raises what its processors or its stop raised."""
        if (error := self.state.processors.errors.get(row)) is not None:
            raise error
        failure = self.state.grammars.failures.get(row)
        fails = failure is not None and len(report.tokens) > failure.after
        if failure is not None and fails:
            report = report.cut(failure.after)
        emitted, accepted = sequence.take(report, draft_forwards)
        tokens = sequence.text[len(sequence.text) - emitted :]
        if sequence.live and failure is not None and fails:
            sequence.fail(failure.error)
        elif sequence.live:
            self.state.grammars.follow(row, tokens)
        return tokens, accepted, report

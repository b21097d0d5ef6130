"""The host's side of a batch: gives rows to sequences, launches steps, and applies their reports to the sequences.

``generate`` fills a batch and drains it. A ``Scheduler`` feeds it piece by piece.
"""

from __future__ import annotations

import functools
import warnings
from collections import deque
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from time import perf_counter
from typing import NamedTuple

import torch
from transformers import LogitsProcessorList

from specdec_kernels import Rule

from ..checks import is_failure
from ..drafters.guard import GuardedSession
from ..drafters.protocol import BatchState, Drafter
from ..models.cache.kv_cache import visible_slots
from ..models.forward.cached_model import CachedModel
from ..models.forward.prompt_parts import PromptParts
from ..result import FinishReason
from ..sampling.grammar import Grammar
from ..sampling.grammar_masks import GrammarMasks
from ..sampling.processors import Processors
from ..sampling.token_table import HostTable
from ..stats import Timer
from .draft_length import FixedK, RowResult
from .graphs import StepGraphs
from .log_probs import MAX_TOP
from .prefixes import Prefixes, PrefixReuse
from .report import PendingReport, StepResult, StepTimer
from .rows import RowBuckets, Rows
from .sequence import Output, Sequence
from .step import AcceptRule, SpeculativeLoop


@dataclass(frozen=True)
class BatchConfig:
    """The settings of a batch, which are independent of each other, but for the last one.

    Attributes:
        num_drafts: chooses K.
        size: the number of rows. A row holds one sequence at a time.
        capacity: slots of a row, the trash slot included.
        max_eos: the largest number of end-of-sequence tokens of one sequence.
        nodes: the most nodes of a tree that a step verifies, whose paths have up to K; 0: chains.
        logits: whether the target's logits are recorded for every emitted token.
        async_scheduling: whether the device may be one step ahead of the host.
        graphs: runs a step as one CUDA graph; None: no graphs.
        prefill_chunk: prompts are read one at a time, in parts of so many tokens; None: all at once.
        prefix_reuse: what such prompts take over from earlier ones.
    """

    target: CachedModel
    drafter: Drafter | None
    num_drafts: FixedK
    rule: AcceptRule
    size: int
    capacity: int
    max_eos: int
    backend: str = "auto"
    nodes: int = 0
    logits: bool = False
    async_scheduling: bool = False
    graphs: StepGraphs | None = None
    prefill_chunk: int | None = None
    prefix_reuse: PrefixReuse = PrefixReuse.OFF


class _Launched(NamedTuple):
    """A step that the host has not read yet."""

    sequences: list[Sequence | None]  # that decode in the rows; None: the row is empty, or its prompt is being read
    report: PendingReport
    num_drafts: int
    width: int  # the most drafts that were found in a row, where the step verified no more columns than these
    wanted: list[int]  # drafts of each row, not limited by its room
    timer: StepTimer | None  # where K adapts, and the step's time says what later ones take


class Batch:
    """A batch of rows, and the host's part of their steps.

    A step reads and updates the rows' state on the device without the host. The host reads the step's report, and
    edits rows between steps. If the next step does not need the host (``runs_ahead``), the host may read a report one
    step late.

    A row is given to a sequence, whose prompt is then read: of all at once (``add``, ``prefill``), or of one after the
    other (``admit``, ``read_part``). From then on the sequence takes part in steps, until it ends and leaves the row.

    Attributes:
        steps, draft_forwards: forwards of target and draft so far.
        num_drafts: K of the last step.
    """

    def __init__(self, config: BatchConfig):
        self.config = config
        target, size, capacity = config.target, config.size, config.capacity
        most, device = config.num_drafts.most, target.device
        self.rows: list[Sequence | None] = [None] * size
        self.timer = Timer()
        self.state = BatchState(
            size=size,
            capacity=capacity,
            most_drafts=most,
            nodes=config.nodes,
            rule=config.rule.rule,
            backend=config.backend,
            timer=self.timer,
            target_cache=target.new_cache(size, capacity, max(most, config.nodes) + 1),
            processors=Processors(size, target.vocab_size),
            grammars=GrammarMasks(target.vocab_size, device),
            ends=[frozenset()] * size,
            predictions=[()] * size,
            owners=[None] * size,
            prefill_chunk=config.prefill_chunk,
        )
        self.device_rows = Rows(size, capacity, most, config.nodes, config.max_eos, device)
        self.table = HostTable(size, config.max_eos, device)
        self.session: GuardedSession | None = None
        if config.drafter is not None and most > 0:
            self.session = GuardedSession(config.drafter, self.state)
        self.loop = SpeculativeLoop(target, self.session, self.state, self.device_rows, config.rule)
        self.steps = self.draft_forwards = self.num_drafts = 0
        self._reads_only_filled = target.reads_only_filled and (
            config.drafter is None or config.drafter.reads_only_filled
        )
        self._adapts = config.num_drafts.adapts and self.session is not None
        # Where K adapts, steps have few more rows than are in use. A compiled forward has the number of rows as a
        # constant. On a GPU each number takes kernels and graphs.
        self._buckets: RowBuckets | None = None
        if config.num_drafts.adapts and not target.is_compiled:
            self._buckets = RowBuckets(size, 4 if config.graphs is not None else 2)
        self.parts = PromptParts(target.prefill_chunk, config.prefill_chunk or capacity, size)
        own = self.rows, self.state.target_cache, self.parts, self.session, self._show
        self.prefixes = Prefixes(config.prefix_reuse, *own, lowest=self._buckets is not None)
        self._unread: deque[Sequence] = deque()  # have a row, and their prompts are not read yet
        self._pending: deque[_Launched] = deque()
        self._outputs: list[Output] = []
        self._drafted = False  # in the step before
        # Graphs are captured on the current device, which is set for each thread.
        self._on_device = torch.cuda.device(device) if device.type == "cuda" else nullcontext()

    # ---- rows ----------------------------------------------------------------------------------------------

    @property
    def live(self) -> int:
        """How many rows decode."""
        return len(self._decoding())

    @property
    def prefilling(self) -> int:
        """How many rows wait until their prompt is read."""
        return len(self._unread)

    @property
    def has_outputs(self) -> bool:
        """Whether there is anything that the next step returns, even if no row decodes."""
        return bool(self._outputs)

    def _decoding(self) -> list[int]:
        return [row for row, s in enumerate(self.rows) if s is not None and s.live and s not in self._unread]

    def add(self, sequences: Mapping[int, Sequence]) -> None:
        """Gives free rows to sequences, whose prompts are to be read."""
        for row, sequence in sequences.items():
            self.rows[row] = sequence
            self._unread.append(sequence)

    def admit(self, sequence: Sequence) -> None:
        """Gives a free row to a sequence, with what the rows hold of its prompt's beginning. The prompts of all others
        should have been read, since they may begin in the same way."""
        try:
            self.add({self.prefixes.place(sequence): sequence})
        except Exception as error:  # memory for the copy, perhaps
            sequence.fail(error)
            self.finish(sequence)

    def read_part(self) -> int:
        """Reads the next part of the prompt that was admitted first, alone, and begins its sequence after the last one.
        An error ends this sequence alone. Returns how many tokens were read."""
        sequence = self._unread[0]
        try:
            count = self._read_part(sequence)
        except BaseException as error:  # from the forward of this prompt alone
            if not is_failure(error):
                raise
            sequence.fail(error)
            self.finish(sequence)
            count = 0
        self.timer.lap("prefill")
        return count

    def prefill(self) -> None:
        """Reads all prompts at once, and begins their sequences. All rows of the batch must have been added. An error
        is raised."""
        self._read_together()
        self.timer.lap("prefill")

    def _read_together(self) -> None:
        sequences = list(self._unread)
        if not sequences:
            return

        def score(i: int, *fed: object) -> None:
            if sequences[i].request.prompt_log_probs is not None:
                sequences[i].score_prompt(*fed)  # type: ignore[arg-type]

        scored = any(s.request.prompt_log_probs is not None for s in sequences)
        prompts = [s.text[:-1] for s in sequences]
        self.config.target.prefill(self.state.target_cache, prompts, score if scored else None)
        self._begin(sequences)

    def _read_part(self, sequence: Sequence) -> int:
        """Reads the next part of a prompt, and returns its number of tokens. Its bounds, and so its keys, depend on the
        prompt alone."""
        extend, cache, text = self.config.target.extend, self.state.target_cache, sequence.text
        row, start = self.rows.index(sequence), sequence.stored
        end = self.parts.end_of(start, len(text) - 1)
        if sequence.request.prompt_log_probs is None:
            self.parts.read(row, start, end, lambda a, b: extend(cache, [text[:b]], [a], row))
        elif end > start:  # in smaller forwards, so no other prompt can have what they store
            extend(cache, [text[:end]], [start], row, lambda _, *fed: sequence.score_prompt(*fed))
        sequence.stored = end
        if end == len(text) - 1:
            self._begin([sequence])
        return end - start

    def _begin(self, sequences: list[Sequence]) -> None:
        """Lets sequences whose prompts are stored take part in steps."""
        begun = {}
        for sequence in sequences:
            row = self.rows.index(sequence)
            self._unread.remove(sequence)
            if sequence.room == 0:  # only its prompt was asked for
                sequence.finish_reason = FinishReason.LENGTH
                self.finish(sequence)
                continue
            begun[row], request = sequence, sequence.request
            sequence.may_draft = sequence.may_draft and self.session is not None and self.session.alive
            self.device_rows.set(row, sequence)
            ends = sequence.eos, request.min_new_tokens
            self.table.begin(row, sequence.params, sequence.bias, sequence.seen, sequence.prompt_length, *ends)
            self.state.processors.of_rows[row] = sequence.processors
            if isinstance(request.grammar, Grammar):
                self.state.grammars.begin(row, request.grammar)
            self.state.ends[row] = sequence.eos
            self.state.predictions[row] = sequence.prediction if sequence.may_draft else ()
            self.state.owners[row] = request.owner
        if self.session is not None and begun:
            self.session.begin({row: sequence.text for row, sequence in begun.items()})

    def finish(self, sequence: Sequence) -> None:
        """Emits the last output of a sequence that has ended without a step, and empties its row if it has one."""
        self._outputs.append(sequence.output())
        if sequence in self.rows:
            self._leave(self.rows.index(sequence))

    def release(self) -> None:
        """Leaves the caches to the next batch, after the last step of this one."""
        self.config.target.keep(self.state.target_cache)
        if self.session is not None:
            self.session.release()

    def _leave(self, row: int) -> None:
        """Empties the row of a sequence that has ended."""
        self.prefixes.leave(row)
        sequence, self.rows[row] = self.rows[row], None
        assert sequence is not None
        if sequence in self._unread:
            self._unread.remove(sequence)
            return
        self.device_rows.clear(row)
        self.table.end(row)
        state = self.state
        state.processors.of_rows[row] = LogitsProcessorList()
        state.processors.errors.pop(row, None)
        state.grammars.end(row)
        state.ends[row], state.predictions[row], state.owners[row] = frozenset(), (), None
        if self.session is not None:
            self.session.end(row, sequence.tokens)

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

    def _read(self, ahead: int = 0) -> None:
        """Reads reports until the device is at most ``ahead`` steps ahead."""
        while len(self._pending) > ahead:
            self._take(self._pending.popleft())

    def _fail(self, error: BaseException) -> None:
        """Ends all sequences that decode with ``error``, and drops the reports that were not read yet."""
        self._pending.clear()
        for row in self._decoding():
            sequence = self.rows[row]
            assert sequence is not None
            sequence.fail(error)
            self.finish(sequence)

    def _launch(self) -> None:
        """Launches a step. Some steps need reports that were not read yet, by which all sequences may have ended."""
        self._use_rows()
        wanted, chosen = self._wanted_drafts()
        if max(wanted) > 0:
            self._observe(wanted)
        if not self.live:
            return
        if self.session is None or not self.session.alive:
            wanted = [0] * len(self.rows)
        config, count = self.config, self.device_rows.count
        graphs = config.graphs if self.runs_ahead and self.table.on_device() is None else None
        host_knows = graphs is None and not (config.async_scheduling and self.runs_ahead)
        self.device_rows.flush()
        self.device_rows.set_wanted(wanted)
        known = self._known(wanted[:count], chosen, host_knows)
        num_drafts, table = known["num_drafts"], self.table.on_device(count)
        self._note_unseen(num_drafts > 0)

        def run() -> StepResult:
            return self.loop.step(self.device_rows.place(table, **known))

        timer = StepTimer(config.target.device) if self._adapts else None
        if graphs is None:
            before = self._first_runs()
            result = run()
            timer = timer if self._first_runs() == before else None
        else:
            fixed = (known[name] for name in ("num_drafts", "visible", "log_probs", "num_ranked", "top"))
            result = graphs.run((*fixed, *self.device_rows.signature), run, self.session)
            self.timer.lap("replays")
            timer = timer if graphs.settled else None
        if timer is not None:
            timer.stop()
        decoding = [None if sequence in self._unread else sequence for sequence in self.rows[:count]]
        drafts = result.drafts
        width = num_drafts if drafts.parents is not None else min(drafts.tokens.shape[1], num_drafts)
        self._pending.append(_Launched(decoding, PendingReport(result), num_drafts, width, wanted, timer))
        self.steps += 1
        self.num_drafts = num_drafts
        self.draft_forwards += drafts.forwards

    def _first_runs(self) -> int:
        """How many forwards so far took longer than they will when they come again."""
        drafter = self.config.drafter
        models = self.config.target, drafter.model if drafter else None
        return sum(model.first_runs for model in models if model is not None)

    def _use_rows(self) -> None:
        """Sets how many rows the next step has. The times of steps with other numbers of rows are others, so all
        reports are read before."""
        count = len(self.rows)
        if self._buckets is not None:
            count = self._buckets.next(self._decoding()[-1] + 1 if self._free else count)
        if count != self.device_rows.count:
            self._read()
            self.device_rows.use(count)

    @property
    def _free(self) -> bool:
        """Whether K is chosen for each step, and steps may have fewer rows, because no row's text depends on that."""
        rule = self.config.rule
        depends = (rule.rule != Rule.COUPLED or not rule.exact) and not self.device_rows.greedy
        return self.config.num_drafts.chooses(depends)

    def _wanted_drafts(self) -> tuple[list[int], bool]:
        """Returns how many tokens each row should draft in the next step, and whether that was chosen for this step."""
        most, caps = self.config.num_drafts.most, {}
        if self.session is not None and self.session.alive:
            for row in self._decoding():
                sequence = self.rows[row]
                assert sequence is not None
                if sequence.may_draft:
                    cap = sequence.request.num_drafts
                    caps[row] = most if cap is None else cap
        if not caps:
            return [0] * len(self.rows), False
        lengths = self.config.num_drafts
        k = lengths.fixed
        if self._free:
            k = lengths.choose(self.device_rows.count, self.live, list(caps.values()))
        return [min(k, caps.get(row, 0)) for row in range(len(self.rows))], self._free

    def _known(self, wanted: list[int], chosen: bool, host_knows: bool) -> dict:
        """Returns the host's part of a step in which each row drafts up to ``wanted`` tokens. The device limits that by
        the rows' room. Where the host knows the room, it does so, too, if that saves columns, or keeps processors from
        texts that are too long.

        Args:
            chosen: whether K was chosen for this step.
            host_knows: whether the host has read all texts, and passes them to the step.
        """
        rows, texts, allowed = self.rows[: len(wanted)], [], wanted
        # Columns without drafts would only cost time where steps differ in K anyway.
        fixed_shape = self.config.graphs is not None or not chosen
        if host_knows:
            if not fixed_shape or self.state.processors:
                allowed = [min(n, max(s.room - 1, 0)) if s else 0 for n, s in zip(wanted, rows, strict=True)]
            texts = [[] if s is None else s.text for s in rows]
        num_drafts = max(wanted if fixed_shape else allowed)
        asked = [row for row, s in enumerate(rows) if s and s.log_probs is not None]
        # The kernel's raw log-probabilities are of the logits that it reads, which are those after processors.
        tops = {row: s.request.top_log_probs for row in asked if (s := rows[row]) is not None}
        ranked = [row for row, top in tops.items() if top is not None or self.state.processors.of_rows[row]]
        return {
            "index": self.steps,
            "num_drafts": num_drafts,
            "visible": self._visible(max(num_drafts, self.config.nodes)),
            "allowed": allowed,
            "texts": texts,
            "seen": [s.seen if s and s.processors else [] for s in rows],
            "fixed_shape": fixed_shape,
            "log_probs": bool(asked),
            "num_ranked": self.device_rows.set_ranked(ranked),
            # There are two values only, because captured steps fix it.
            "top": MAX_TOP if any(tops.values()) else 0,
            "cut": functools.partial(self.config.num_drafts.cut, len(wanted), self.live) if chosen else lambda _: None,
        }

    def _visible(self, num_drafts: int) -> int:
        """Returns the slots that attention reads: those of the longest sequence, and those that steps without a report
        may have added."""
        capacity, most = self.config.capacity, self.config.num_drafts.most
        if self._reads_only_filled:
            return capacity
        longest = max(len(s.text) for row in self._decoding() if (s := self.rows[row]) is not None)
        return visible_slots(longest + len(self._pending) * (most + 1) + num_drafts, capacity)

    # ---- what the drafter has seen -------------------------------------------------------------------------

    def _note_unseen(self, drafting: bool) -> None:
        """Notes a step that is about to run. The drafter sees the tokens of rows in steps with drafts. In the first of
        several steps without, it has seen all that the host knows, except the last two tokens, which it is fed in its
        next step anyway."""
        if self._drafted and not drafting:
            for row in self._decoding():
                sequence = self.rows[row]
                if sequence is not None and sequence.unseen is None:
                    sequence.unseen = max(len(sequence.text) - 2, 0)
        self._drafted = drafting

    def _observe(self, wanted: list[int]) -> None:
        """Shows the drafter what was emitted in steps without drafts, and the prompts of new sequences, in the rows
        that draft now. The host must know these texts, so it first reads the reports of their steps."""
        unseen = {row: s for row, s in enumerate(self.rows) if wanted[row] and s is not None and s.unseen is not None}
        if not unseen or self.session is None:
            return
        if any(step.sequences[row] is s for step in self._pending for row, s in unseen.items()):
            self._read()
        started = perf_counter()
        unseen = {row: s for row, s in unseen.items() if s.live}
        if unseen:
            starts = {row: s.unseen or 0 for row, s in unseen.items()}
            self.session.observe({row: s.text for row, s in unseen.items()}, starts)
        for sequence in unseen.values():
            sequence.unseen = None
        self.config.num_drafts.caught_up(perf_counter() - started)

    def _show(self, row: int) -> None:
        """Shows the drafter what it has not seen of a row's text, if it drafts for this row at all."""
        sequence = self.rows[row]
        if sequence is not None and sequence.may_draft and self.session is not None and self.session.alive:
            self._observe([int(other == row) for other in range(len(self.rows))])

    # ---- reports -------------------------------------------------------------------------------------------

    def _take(self, step: _Launched) -> None:
        """Applies a step's report to the sequences that had not ended before the step."""
        result, results = step.report.result, []
        errors, grammars = self.state.processors.errors, self.state.grammars
        for row, (sequence, report) in enumerate(zip(step.sequences, step.report.read(), strict=True)):
            if sequence is None or not sequence.live:
                continue
            asked = min(step.wanted[row], sequence.room - 1)
            try:
                if (error := errors.get(row)) is not None:
                    raise error
                failure = grammars.failures.get(row)
                reached = failure is not None and len(report.tokens) > failure.after
                report = report.cut(failure.after) if failure is not None and reached else report
                emitted, accepted = sequence.take(report, result.drafts.forwards)
                tokens = sequence.text[len(sequence.text) - emitted :]
                if sequence.live and failure is not None and reached:
                    sequence.fail(failure.error)
                elif sequence.live:
                    grammars.follow(row, tokens)
            except BaseException as error:  # from its processors or its stop, so it concerns no other sequence
                if not is_failure(error):
                    raise
                sequence.fail(error)
                self.finish(sequence)
                continue
            if (copies := result.drafts.copies) is not None:
                self.config.num_drafts.learn(copies.matched[row], copies.tokens[row], tokens)
            results.append(RowResult(asked, accepted, emitted, not sequence.live))
            if sequence.may_draft and sequence.drafter_failed():
                sequence.may_draft = False
                # Without the sequence's number: Python remembers every text that it was warned with, and a server's
                # numbers never end.
                why = f"its draft logits are NaN or infinite ({sequence.status.name})"
                warnings.warn(f"a sequence drafts no more: {why}", RuntimeWarning, 2)
            if self.config.logits:
                sequence.logits += result.emitted_logits(row, emitted).unbind()
            self.table.add(row, tokens)
            if emitted or not sequence.live:
                self._outputs.append(sequence.output(emitted, report))
            if not sequence.live:
                self._leave(row)
        rows, lengths = len(step.sequences), self.config.num_drafts
        if step.timer is not None:
            lengths.took(rows, step.num_drafts, step.width, step.timer.seconds)
        lengths.record(rows, step.num_drafts, step.width, results)

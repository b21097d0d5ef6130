"""Continuous batching: when a sequence ends, a waiting request is prefilled into its row."""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch

from ..checks import read_count
from ..decoder import SpeculativeDecoder
from ..loop.batch import Batch
from ..loop.sequence import Entry
from ..loop.typical import Typical
from ..prompts import read_eos
from ..result import Emission, End
from .ledger import TokenLedger
from .requests import MAX_EOS, Limits, Outcome, Request, read_request


class QueueFull(Exception):
    """The queue of waiting requests is full; the new request was not taken."""


class Usage(NamedTuple):
    """The current load of a scheduler."""

    rows: int
    live: int  # rows that decode
    prefilling: int  # rows whose prompt has not been read completely
    waiting: int  # requests without a row
    cache_tokens: int  # tokens that sequences may reserve at one time
    cache_tokens_used: int
    steps: int  # decoding steps so far
    busy: float  # mean of live rows / rows over these steps; 0 before the first step
    num_drafts: int  # K of the last step; 0 before the first


class Task(NamedTuple):
    """A request with its number and its entry."""

    number: int
    request: Request
    entry: Entry

    @property
    def need(self) -> int:
        """The tokens that its row of the cache must hold."""
        return self.entry.record.prompt_length + self.request.max_new_tokens


class Scheduler:
    """Decodes any number of requests on R rows. When a sequence ends, the next one begins in its row, while the other
    rows continue.

    Each step reads a part of the prompts of new sequences, and then decodes all rows. With a fixed K all decoding
    forwards have the same shape ([R, K + 1] tokens), and each prompt is read alone, so a row's results do not depend on
    the other rows: a request with a seed gets the same text alone, among others, and in any order. With
    ``AdaptiveDrafts``, K and the rows of a step depend on the other rows: greedy texts and those of ``coupled`` then
    differ in rounding only, and sampled ones of the other rules, unless ``sampled`` fixes their K, as it does by
    default, are other draws from the same distribution.

    An error of one request (in its logits, processors, stop or prefill) ends that request with a status or an error.
    An error of the drafter only costs drafts. An error in a forward of all rows ends all sequences that decode. An
    interrupt does so, too, and is then raised again. Other requests are not affected.

    Only one thread may use a scheduler; for asyncio there is ``Engine``. Code that a step calls (processors, stops,
    drafters) may call ``submit``, ``cancel`` and ``close``; a cancellation then takes effect at the end of the step.

    Args:
        decoder: the models, the drafter, K and the backend.
        rows: R, the sequences that decode at one time; None: as many as the budget allows.
        max_length: the most tokens of prompt and output of one sequence; None: as many as the budget and the models'
            positions allow.
        cache_tokens: the most slots of all rows together: the cache has rows x (max_length + 1) slots, and those of a
            tree, all allocated here. The tokens that sequences reserve at one time (prompt + ``max_new_tokens``) stay
            below.
        cache_bytes: the most bytes of the caches of target and draft together.
        prefill_chunk: how many tokens of a prompt are read at once. A step reads no more prompts after this many
            tokens, so it bounds the time by which a long prompt delays the other rows.
        max_waiting: the most requests that may wait for a row.
        rule, compact_q: as in ``generate``, for all requests.
        deferred: let the device run one step ahead of the host, so that it does not wait for reports, while no
            setting needs the host before a step (stop strings do not). The texts are the same.

    Raises:
        ValueError: names the argument, what was given and what is allowed.
    """

    def __init__(
        self,
        decoder: SpeculativeDecoder,
        *,
        rows: int | None = 8,
        max_length: int | None = None,
        cache_tokens: int | None = None,
        cache_bytes: int | None = None,
        prefill_chunk: int = 256,
        max_waiting: int = 1024,
        rule: str | Typical | None = None,
        compact_q: int = 0,
        deferred: bool = False,
    ):
        for name, value in (("prefill_chunk", prefill_chunk), ("max_waiting", max_waiting)):
            read_count(name, value, 1)
        self.decoder, self.prefill_chunk, self.max_waiting = decoder, prefill_chunk, max_waiting
        self.target = target = decoder.target
        self.budget = decoder.plan_caches(rows, max_length, cache_tokens, cache_bytes)
        max_eos = max(MAX_EOS, len(read_eos(None, target.model)))
        self.limits = Limits(self.budget.max_length, decoder.most_drafts, max_eos, decoder.nodes)
        self.ledger = TokenLedger(self.budget.tokens)
        self.rule = decoder.read_rule(rule, compact_q)
        config = decoder.batch_config(self.budget.rows, self.budget.capacity, self.rule, compact_q, max_eos)
        with torch.inference_mode():
            predictions = decoder.nodes == 0
            config = dataclasses.replace(config, steady=True, isolate=True, fewer_rows=True, predictions=predictions)
            self.batch = Batch(dataclasses.replace(config, ahead=int(deferred)))
        self._numbers = 0
        self._waiting: deque[Task] = deque()
        self._in_rows: dict[int, Task] = {}
        self._filled: dict[int, int] = {}  # rows in prefill -> how many tokens of the prompt are stored
        self._outcomes: deque[Outcome] = deque()
        self._busy_rows = 0
        self._stepping = False
        self._to_cancel: list[int] = []  # requests cancelled by code that the current step calls

    # ---- requests ------------------------------------------------------------------------------------------

    def submit(self, request: Request) -> int:
        """Takes a request and returns its number.

        Raises:
            ValueError: names its field, what was given and what is allowed.
            QueueFull: ``max_waiting`` requests wait already.
        """
        self.check_queue()
        task = self.read(request)
        self.take(task)
        return task.number

    def check_queue(self, coming: int = 0) -> None:
        """Raises QueueFull if there is no place after the waiting requests and ``coming`` others."""
        if (waiting := len(self._waiting) + coming) >= self.max_waiting:
            raise QueueFull(f"{waiting} requests wait, allowed: {self.max_waiting}")

    def read(self, request: Request) -> Task:
        """Checks a request and numbers it: the first part of ``submit``. Uses no state that ``step`` changes, so it may
        run in another thread."""
        entry = read_request(request, self._numbers, self.target, self.limits)
        self.decoder.check_entry(entry, self.rule)
        task = Task(self._numbers, request, entry)
        self._numbers += 1
        return task

    def take(self, task: Task) -> None:
        """Puts the request into the queue: the second part of ``submit``."""
        if task.request.max_new_tokens == 0 and task.request.prompt_log_probs is None:
            self._tell(task, End.LENGTH)
        else:
            self._waiting.append(task)

    def cancel(self, number: int) -> bool:
        """Ends a request, whether it waits or has a row. Its outcome, with the tokens emitted so far, comes with the
        next step. Returns False if the request has already ended or does not exist. A call from inside a step takes
        effect at the end of the step, unless the request has ended by then."""
        row = next((row for row, task in self._in_rows.items() if task.number == number), None)
        in_row = None if row is None else self._in_rows[row]
        task = next((task for task in self._waiting if task.number == number), in_row)
        if task is None or not task.entry.record.live:
            return False
        if self._stepping:
            self._to_cancel.append(number)
        elif row is None:
            self._waiting.remove(task)
            self._tell(task, End.CANCELLED)
        else:
            task.entry.record.end = End.CANCELLED
            self._leave(row)
        return True

    @property
    def idle(self) -> bool:
        """Whether there is no request left to decode and no outcome left to return."""
        return not (self._waiting or self._in_rows or self._outcomes)

    @property
    def usage(self) -> Usage:
        steps, rows = self.batch.steps, len(self.batch.rows)
        return Usage(
            rows=rows,
            live=len(self._in_rows) - len(self._filled),
            prefilling=len(self._filled),
            waiting=len(self._waiting),
            cache_tokens=self.ledger.budget,
            cache_tokens_used=self.ledger.used,
            steps=steps,
            busy=self._busy_rows / (steps * rows) if steps else 0.0,
            num_drafts=self.batch.num_drafts,
        )

    @property
    def drafter_error(self) -> str | None:
        """Why the drafter was dropped; None if it was not dropped, or there is none."""
        return None if self.batch.session is None else self.batch.session.error

    # ---- the loop ------------------------------------------------------------------------------------------

    def step(self) -> list[Emission | Outcome]:
        """Reads about ``prefill_chunk`` tokens of prompts (always less than twice as many), and decodes all rows once.
        The ``sequence`` of an ``Emission`` is the request's number. Each request has one ``Outcome``, after its last
        emission."""
        emissions = self._step()
        outcomes, self._outcomes = self._outcomes, deque()
        return [*emissions, *outcomes]

    def run(self, requests: Iterable[Request]) -> Iterator[Outcome]:
        """Decodes all ``requests``, which are taken from the iterable as rows become free. Yields their outcomes in the
        order in which they end; a refused request has number -1.

        An error of the iterable itself is raised at once. After it, or if the caller stops at any outcome, the requests
        already taken remain in the scheduler, and ``run(())`` yields their outcomes."""
        coming, more = iter(requests), True
        # Enough for the batch to see that its end is far away, also when many rows become free at once.
        ahead = min(2 * len(self.batch.rows) + 1, self.max_waiting)
        while more or not self.idle:
            while more and len(self._waiting) < ahead:
                try:
                    request = next(coming)
                except StopIteration:
                    more = False
                    break
                try:
                    self.submit(request)
                except ValueError as error:
                    yield Outcome.refused(request, error)
            self._step()
            while self._outcomes:
                yield self._outcomes.popleft()

    @torch.inference_mode()
    def _step(self) -> list[Emission]:
        if self._stepping:
            raise RuntimeError("step: called by what a step calls")
        self._stepping = True
        try:
            self._fill_rows()
            self._prefill()
            self.batch.waiting = self._rooms_of_waiting()
            before, live = self.batch.steps, sum(r is not None and r.live for r in self.batch.rows)
            emissions = self.batch.step() if live else []
            self._busy_rows += live * (self.batch.steps - before)
        finally:
            self._stepping = False
            for row in [r for r, task in self._in_rows.items() if not task.entry.record.live]:
                self._leave(row)
            for number in self._to_cancel:
                self.cancel(number)
            self._to_cancel.clear()
        return emissions

    def _rooms_of_waiting(self) -> list[int] | None:
        """Returns how many tokens each sequence that does not decode yet may emit; None: there are more than rows."""
        if len(self._waiting) + len(self._filled) > len(self.batch.rows):
            return None
        return [task.entry.record.room for task in (*(self._in_rows[row] for row in self._filled), *self._waiting)]

    def _fill_rows(self) -> None:
        """Gives free rows to waiting requests, in order. A request that needs more cache than is free holds up those
        after it, since otherwise it might wait for ever."""
        free = deque(row for row in range(len(self.batch.rows)) if row not in self._in_rows)
        while free and self._waiting and self.ledger.reserve(self._waiting[0].number, self._waiting[0].need):
            task, row = self._waiting.popleft(), free.popleft()
            self._in_rows[row], self._filled[row] = task, 0

    def _prefill(self) -> None:
        """Reads prompts, the earliest first, until at least ``prefill_chunk`` tokens were read."""
        read = 0
        while self._filled and read < self.prefill_chunk:
            row = next(iter(self._filled))
            task = self._in_rows[row]
            try:
                read += max(self._read_chunk(row, task.entry), 1)
            except Exception as error:  # from the forward of this prompt alone, so other requests are not affected
                task.entry.record.fail(error)
                self._leave(row)
        self.batch.stopwatch.lap("prefill")

    def _read_chunk(self, row: int, entry: Entry) -> int:
        """Reads the next chunk of a prompt, and returns its number of tokens. The chunk's bounds, and so its keys,
        depend on the prompt alone."""
        cache, text, done = self.batch.generation.target_cache, entry.record.text, self._filled[row]
        end = min(done + self.prefill_chunk, len(text) - 1)
        if done == 0:
            cache.begin(row)
        record = entry.record
        if end > done:
            on_logits = None if record.asked.prompt is None else lambda _, *fed: record.score_prompt(*fed)
            self.target.extend(cache, [text[:end]], [done], row, on_logits)
        self._filled[row] = end
        if end == len(text) - 1:
            del self._filled[row]
            if record.room == 0:  # only its prompt was asked for
                record.end = End.LENGTH
            else:
                self.batch.admit({row: entry})
        return end - done

    def _leave(self, row: int) -> None:
        """Frees the row of a sequence that has ended."""
        task = self._in_rows.pop(row)
        self._filled.pop(row, None)
        if self.batch.rows[row] is not None:
            self.batch.end(row)
            self.batch.release(row)
        self.ledger.release(task.number)
        self._tell(task)

    def _tell(self, task: Task, end: End | None = None) -> None:
        """Adds the outcome of a request to those that the next step returns.

        Args:
            end: how it ended, if it never had a row; None: its record says so.
        """
        if end is not None:
            task.entry.record.end = end
        self._outcomes.append(Outcome.of(task.number, task.request, task.entry.record))

    def close(self) -> None:
        """Cancels all requests; their outcomes come with the next step."""
        for task in [*self._waiting, *self._in_rows.values()]:
            self.cancel(task.number)

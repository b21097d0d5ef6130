"""Continuous admission: a sequence that ends frees its row, and a waiting prompt is prefilled into it."""

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
from ..prompts import read_eos
from ..result import Emission, End
from ..sampling.params import read_rule
from .ledger import TokenLedger
from .requests import MAX_EOS, Limits, Outcome, Request, read_request


class QueueFull(Exception):
    """So many requests wait already; nothing was taken."""


class Usage(NamedTuple):
    """Where a scheduler stands."""

    rows: int
    live: int  # rows that decode
    prefilling: int  # rows whose prompt is not read to its end
    waiting: int
    cache_tokens: int  # that may be promised to sequences at one time
    cache_tokens_used: int
    steps: int  # decoding steps so far
    busy: float  # live rows over rows, the mean of these steps; 0 before the first


class Task(NamedTuple):
    """A request that was taken."""

    number: int
    request: Request
    entry: Entry

    @property
    def need(self) -> int:
        """Tokens that its cache must hold."""
        return self.entry.record.prompt_length + self.request.max_new_tokens


class Scheduler:
    """Decodes any number of requests on R rows: as a sequence ends, the next one begins in its row, while the others
    go on.

    Each step of the loop reads a part of the prompts that wait for it, and then decodes all rows. All forwards have the
    same shape ([R, K + 1] tokens; a prompt is read alone), so what a row computes does not depend on what stands in the
    others: with one seed a request has the same text alone, in a crowd, and in another order. (With
    ``AdaptiveDrafts``, K and so the shape depends on the others; numbers then differ in rounding.)

    What fails in one request (its logits, its processors, its stop, its prompt's prefill) ends that one, with a status
    or an error; what a drafter fails at costs drafts. An error in a forward of all rows ends all that decode, and so
    does an interrupt, which then goes through. Nothing else is lost.

    One thread may use it: ``Engine`` is for asyncio. Of what a step calls (processors, stops, drafters) ``submit``,
    ``cancel`` and ``close`` may be called; a cancellation then takes effect at the end of the step.

    Args:
        decoder: the models, the drafter, K and the backend.
        rows: R, sequences that decode at one time; None: as many as the budget allows.
        max_length: tokens of prompt and output of one sequence, at most; None: as many as the budget allows and the
            models have positions.
        cache_tokens: of all rows together, at most: the cache has rows x (max_length + 1) slots, all allocated here.
            What sequences are promised at one time (prompt + ``max_new_tokens``) stays below.
        cache_bytes: of the caches of target and draft together, at most.
        prefill_chunk: tokens of a prompt that are read at once, and after which a step reads no more: what a long
            prompt delays the others by.
        max_waiting: requests that may wait for a row.
        rule, compact_q: as in ``generate``, of all requests.
        deferred: the device runs one step ahead of the host, where nothing that decides a step needs the host (stop
            strings do not): nothing waits for reports. Texts are the same.

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
        rule: str = "token",
        compact_q: int = 0,
        deferred: bool = False,
    ):
        for name, value in (("prefill_chunk", prefill_chunk), ("max_waiting", max_waiting)):
            read_count(name, value, 1)
        self.decoder, self.prefill_chunk, self.max_waiting = decoder, prefill_chunk, max_waiting
        self.target = target = decoder.target
        self.budget = decoder.plan_caches(rows, max_length, cache_tokens, cache_bytes)
        eos = read_eos(None, target.model)
        self.limits = Limits(self.budget.max_length, decoder.most_drafts, eos)
        self.ledger = TokenLedger(self.budget.tokens)
        rule = read_rule(rule, compact_q)
        capacity, max_eos = self.budget.capacity, max(MAX_EOS, len(eos))
        config = decoder.batch_config(self.budget.rows, capacity, rule, compact_q, eos, max_eos)
        with torch.inference_mode():
            self.batch = Batch(dataclasses.replace(config, steady=True, isolate=True, ahead=int(deferred)))
        self._numbers = 0
        self._waiting: deque[Task] = deque()
        self._in_rows: dict[int, Task] = {}
        self._filled: dict[int, int] = {}  # row -> tokens of its prompt that are stored, until it decodes
        self._outcomes: deque[Outcome] = deque()
        self._busy_rows = 0
        self._stepping = False
        self._to_cancel: list[int] = []  # by what a step called

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
        """Raises QueueFull where no request may come after those that wait and ``coming`` others."""
        if (waiting := len(self._waiting) + coming) >= self.max_waiting:
            raise QueueFull(f"{waiting} requests wait, allowed: {self.max_waiting}")

    def read(self, request: Request) -> Task:
        """The first part of ``submit``: checks a request and numbers it. Touches nothing that ``step`` does."""
        entry = read_request(request, self._numbers, self.target, self.limits)
        task = Task(self._numbers, request, entry)
        self._numbers += 1
        return task

    def take(self, task: Task) -> None:
        """The second part of ``submit``."""
        if task.request.max_new_tokens == 0:
            self._tell(task, End.LENGTH)
        else:
            self._waiting.append(task)

    def cancel(self, number: int) -> bool:
        """Ends a request wherever it is; its outcome, with what was emitted so far, comes with the next step. False: it
        has ended already, or never was. From inside of a step it takes effect when the step has ended, unless
        the request has, too."""
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
        """Nothing is to be done or told."""
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
        )

    @property
    def drafter_error(self) -> str | None:
        """Why nothing is drafted any more; None: it is, or never was."""
        return None if self.batch.session is None else self.batch.session.error

    # ---- the loop ------------------------------------------------------------------------------------------

    def step(self) -> list[Emission | Outcome]:
        """Reads up to ``prefill_chunk`` tokens of prompts, or a little more (less than twice as many), and decodes all
        rows once. An ``Emission``'s ``sequence`` is the request's number; an ``Outcome`` comes once for each request,
        after its last emission."""
        emissions = self._step()
        outcomes, self._outcomes = self._outcomes, deque()
        return [*emissions, *outcomes]

    def run(self, requests: Iterable[Request]) -> Iterator[Outcome]:
        """The outcomes of all ``requests``, in the order in which they end. They are drawn as rows become free. One
        that is refused has number -1.

        An error of ``requests`` itself goes through at once, and so may the caller leave at any outcome: what was drawn
        stays, and ``run(())`` brings the rest of the outcomes."""
        coming, more = iter(requests), True
        ahead = min(len(self.batch.rows), self.max_waiting)
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

    def _fill_rows(self) -> None:
        """In order: a request that needs more cache than is free holds up those after it, and so is never passed by
        for good."""
        free = deque(row for row in range(len(self.batch.rows)) if row not in self._in_rows)
        while free and self._waiting and self.ledger.reserve(self._waiting[0].number, self._waiting[0].need):
            task, row = self._waiting.popleft(), free.popleft()
            self._in_rows[row], self._filled[row] = task, 0

    def _prefill(self) -> None:
        """Reads prompts, those that came first, until they had ``prefill_chunk`` tokens together."""
        read = 0
        while self._filled and read < self.prefill_chunk:
            row = next(iter(self._filled))
            task = self._in_rows[row]
            try:
                read += max(self._read_chunk(row, task.entry), 1)
            except Exception as error:  # of its own forward: the others have no part in it
                task.entry.record.fail(error)
                self._leave(row)
        self.batch.stopwatch.lap("prefill")

    def _read_chunk(self, row: int, entry: Entry) -> int:
        """Where a chunk begins and ends depends on nothing but the prompt, so its keys do not, either."""
        cache, text, done = self.batch.generation.target_cache, entry.record.text, self._filled[row]
        end = min(done + self.prefill_chunk, len(text) - 1)
        if done == 0:
            cache.begin(row)
        if end > done:
            self.target.extend(cache, [text[:end]], [done], row)
        self._filled[row] = end
        if end == len(text) - 1:
            self.batch.admit({row: entry})
            del self._filled[row]
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
        """``end``: of one that never had a row."""
        if end is not None:
            task.entry.record.end = end
        self._outcomes.append(Outcome.of(task.number, task.request, task.entry.record))

    def close(self) -> None:
        """Cancels all requests; their outcomes come with the next step."""
        for task in [*self._waiting, *self._in_rows.values()]:
            self.cancel(task.number)

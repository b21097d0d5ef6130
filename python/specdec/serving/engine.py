"""The scheduler for asyncio: a separate thread decodes, and any number of tasks submit, stream and cancel."""

from __future__ import annotations

import asyncio
import threading
from collections import defaultdict, deque
from collections.abc import AsyncGenerator, Callable, Iterable
from concurrent.futures import Future
from contextlib import aclosing
from typing import NamedTuple

import torch

from ..checks import refuse
from ..loop.request import Request
from ..loop.sequence import Output, SequenceState
from ..result import error_text
from .scheduler import Scheduler, Usage


class EngineStopped(RuntimeError):
    """The engine was closed, or its thread died; the message says which."""


class _Stream(NamedTuple):
    sequence: SequenceState
    loop: asyncio.AbstractEventLoop
    outputs: asyncio.Queue[Output]  # those that the reader has not read yet; only its event loop uses it


class Engine:
    """Runs a ``Scheduler`` in a separate thread, which from then on is the only one that steps it. Tasks only read
    requests, by what a step does not change.

    All methods are for tasks of a running event loop; several loops may use one engine. No method waits for the
    device: a request is checked in the task that submits it, and the thread takes it between two steps. While there is
    nothing to do, the thread sleeps.

    A slow reader does not delay others: its outputs wait in memory, at most ``max_new_tokens`` tokens.
    They stay there until they are read, so every submitted request must be read with ``stream`` or ``result``, even if
    it is cancelled.

    If an error that does not belong to a request ends the thread itself, all open requests end with
    ``FinishReason.FAILED`` and this error, and no other request is taken.

    Args:
        scheduler: an idle scheduler; the caller must not use it any more.

    Raises:
        ValueError: names the argument.

    Example:
        >>> import asyncio
        >>> from specdec import Engine, Request, Scheduler, SpeculativeDecoder, load_embedded_pair
        >>> target, draft, tokenizer = load_embedded_pair()
        >>> async def main():
        ...     async with Engine(Scheduler(SpeculativeDecoder(target, draft), rows=2)) as engine:
        ...         number = await engine.submit(Request(tokenizer("import os").input_ids, max_new_tokens=8))
        ...         return [token async for output in engine.stream(number) for token in output.tokens]
        >>> len(asyncio.run(main()))
        8
    """

    def __init__(self, scheduler: Scheduler):
        if not scheduler.idle:
            refuse("scheduler", "one with requests", "an idle one")
        self._scheduler, self._usage = scheduler, scheduler.usage
        self._changed = threading.Condition()  # guards all attributes below
        self._submitted: deque[SequenceState] = deque()  # that the thread has not taken yet
        self._cancelled: deque[tuple[int, Future[bool]]] = deque()  # their numbers, and whether they were cancelled
        self._open: dict[int, _Stream] = {}  # requests that have not ended
        self._unread: dict[int, _Stream] = {}  # requests without a reader
        self._closing = False
        self._stopped: str | None = None  # why the engine takes no requests any more
        self._thread = computing_thread(self._work, "specdec-engine")
        self._thread.start()

    # ---- for tasks -----------------------------------------------------------------------------------------

    async def submit(self, request: Request) -> int:
        """Submits a request and returns its number.

        Raises:
            ValueError: names its field, what was given and what is allowed.
            QueueFull: as many requests wait already as the scheduler's ``max_waiting``.
            EngineStopped: the engine takes no requests any more.
        """
        loop = asyncio.get_running_loop()
        self._check_runs()  # before the lock, which in a forked process nobody may give back
        with self._changed:
            self._check_runs()
            self._scheduler.check_queue(len(self._submitted))
            sequence = self._scheduler.read(request)
            number = sequence.number
            self._open[number] = self._unread[number] = _Stream(sequence, loop, asyncio.Queue())
            self._submitted.append(sequence)
            self._changed.notify()
        return number

    def stream(self, number: int) -> AsyncGenerator[Output, None]:
        """Iterates over the request's outputs as they come, the last one with its finish reason. A request has one
        reader. If the reader stops before the last one, or is cancelled, the request is cancelled. Use
        ``contextlib.aclosing`` if this must happen at once.

        Raises:
            ValueError: this event loop submitted no such request, or it already has a reader.
        """
        return _one_by_one(self.arrivals(number))

    def arrivals(self, number: int) -> AsyncGenerator[list[Output], None]:
        """As ``stream``, but yields lists: all that has come since the reader last asked, so that one who is late need
        not catch up one by one."""
        with self._changed:
            stream = self._unread.get(number)
            if stream is None or stream.loop is not asyncio.get_running_loop():
                raise ValueError(f"number: got {number!r}, allowed: a request of this loop that nobody reads yet")
            del self._unread[number]
        return self._read(stream)

    async def result(self, number: int) -> SequenceState:
        """Reads the request's stream to its end, and returns the sequence. If the waiting task is cancelled, so is the
        request.

        Raises:
            ValueError: as ``stream``.
        """
        async with aclosing(self.stream(number)) as outputs:
            async for output in outputs:
                last = output
        return last.sequence

    async def cancel(self, number: int) -> bool:
        """Ends a request, at the latest after the current step; its reader gets the last output. Returns False if the
        request has already ended or does not exist."""
        with self._changed:
            answer = self._cancel(number)
        return await asyncio.wrap_future(answer)

    def _cancel(self, number: int) -> Future[bool]:
        """Has the thread cancel a request. The lock is held."""
        answer: Future[bool] = Future()
        if number in self._open:
            self._cancelled.append((number, answer))
            self._changed.notify()
        else:
            answer.set_result(False)
        return answer

    @property
    def usage(self) -> Usage:
        """The load of the scheduler before or after its last step. Requests that the thread has not taken yet count as
        waiting."""
        with self._changed:
            return self._usage._replace(waiting=self._scheduler.usage.waiting + len(self._submitted))

    @property
    def stopped(self) -> str | None:
        """Why the engine takes no requests any more; None while it does."""
        return self._stopped

    @property
    def drafter_error(self) -> str | None:
        """As ``Scheduler.drafter_error``."""
        return self._scheduler.drafter_error

    async def close(self) -> None:
        """Cancels all open requests, and returns when the thread has ended. May be called more than once."""
        with self._changed:
            self._closing = True
            self._stopped = self._stopped or "the engine was closed"
            self._changed.notify()
        await asyncio.to_thread(self._thread.join)

    async def __aenter__(self) -> Engine:
        return self

    async def __aexit__(self, *exception) -> None:
        await self.close()

    async def _read(self, stream: _Stream) -> AsyncGenerator[list[Output], None]:
        try:
            while True:
                outputs = [await stream.outputs.get()]
                while not stream.outputs.empty():
                    outputs.append(stream.outputs.get_nowait())
                if outputs[-1].finish_reason is not None:
                    break
                yield outputs
        except BaseException:  # the reader stops or is cancelled
            with self._changed:
                self._cancel(stream.sequence.number)
            raise
        yield outputs

    def _check_runs(self) -> None:
        if self._stopped is None and not self._thread.is_alive():
            self._stopped = "this process was forked from the engine's, where its thread stayed; make an engine here"
        if self._stopped is not None:
            raise EngineStopped(self._stopped)

    # ---- the thread ----------------------------------------------------------------------------------------

    def _work(self) -> None:
        try:
            while self._serve():
                self._deliver(self._scheduler.step())
        except BaseException as error:  # no request caused it; end all requests, so that no reader waits for ever
            self._die(error)

    def _serve(self) -> bool:
        """Waits for something to do, and takes submitted requests and cancellations. Returns False if the engine was
        closed and nothing is left to do."""
        scheduler = self._scheduler
        with self._changed:
            self._changed.wait_for(lambda: self._submitted or self._cancelled or self._closing or not scheduler.idle)
            while self._submitted:  # with the lock held, so that ``usage`` counts each request exactly once
                scheduler.take(self._submitted.popleft())
            cancelled, self._cancelled = self._cancelled, deque()
            if self._closing:
                scheduler.close()
            self._usage = scheduler.usage
        for number, answer in cancelled:
            _answer(answer, scheduler.cancel(number))
        return not (self._closing and scheduler.idle)

    def _deliver(self, outputs: Iterable[Output]) -> None:
        """Passes the outputs of a step to their event loops, with one call for each loop."""
        of_loops = defaultdict(list)
        with self._changed:
            self._usage = self._scheduler.usage
            for output in outputs:
                ended = output.finish_reason is not None
                stream = self._open.pop(output.number) if ended else self._open[output.number]
                of_loops[stream.loop].append((stream.outputs, output))
        for loop, items in of_loops.items():
            try:
                loop.call_soon_threadsafe(_put, items)
            except RuntimeError:  # the loop is closed, so its readers are gone
                self._forget(loop)

    def _forget(self, loop: asyncio.AbstractEventLoop) -> None:
        with self._changed:
            for number in [n for n, stream in self._open.items() if stream.loop is loop]:
                self._cancel(number)
            self._unread = {n: stream for n, stream in self._unread.items() if stream.loop is not loop}

    def _die(self, error: BaseException) -> None:
        outputs = []
        with self._changed:  # until the end, so that later calls find no open request
            self._stopped = f"the engine's thread died: {error_text(error)}"
            for sequence in [stream.sequence for stream in self._open.values()]:
                sequence.fail(EngineStopped(self._stopped))
                outputs.append(sequence.output())
            self._deliver(outputs)
            self._submitted.clear()
            while self._cancelled:
                _answer(self._cancelled.popleft()[1], False)


def computing_thread(run: Callable[[], None], name: str) -> threading.Thread:
    """Returns a daemon thread, not yet started, in which torch computes with as many threads as in the calling thread
    now. That number comes from ``torch.set_num_threads``, OMP_NUM_THREADS or the process's CPUs (taskset, numactl,
    cgroups).

    torch keeps this number for each thread. A new thread takes the number that any thread set last, but only at its
    first operation that reads it: a matrix product before that runs on all CPUs.
    """
    count = torch.get_num_threads()

    def body() -> None:
        torch.set_num_threads(count)
        run()

    return threading.Thread(target=body, name=name, daemon=True)


def _put(items: list[tuple[asyncio.Queue[Output], Output]]) -> None:
    for outputs, output in items:
        outputs.put_nowait(output)


def _answer(answer: Future[bool], cancelled: bool) -> None:
    """Answers a task that may not wait any more."""
    if answer.set_running_or_notify_cancel():
        answer.set_result(cancelled)


async def _one_by_one(arrivals: AsyncGenerator[list[Output], None]) -> AsyncGenerator[Output, None]:
    async with aclosing(arrivals):
        async for outputs in arrivals:
            for output in outputs:
                yield output

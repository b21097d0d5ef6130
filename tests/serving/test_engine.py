"""The engine: many tasks, one thread; whoever leaves costs nobody else anything, and nobody waits for ever."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from contextlib import aclosing

import pytest
import torch
from specdec import Engine, EngineStopped, FinishReason, Output, QueueFull, Request
from support.crowds import FAULTY, Stop, check_outcome, crowd, decoder, scheduler, texts

LONG = Request([5, 6, 7], 28)


def run(test, **settings) -> None:
    """``test(engine, scheduler)`` in a loop of its own; the thread must end, and nothing be left in the scheduler."""
    s = scheduler(**settings)

    async def main():
        async with Engine(s) as engine:
            await asyncio.wait_for(test(engine, s), 60)
        usage = engine.usage
        assert (usage.live, usage.prefilling, usage.waiting, usage.cache_tokens_used) == (0, 0, 0, 0)
        with pytest.raises(EngineStopped, match="the engine was closed"):
            await engine.submit(LONG)
        await engine.close()

    before = threading.active_count()
    asyncio.run(main())
    assert threading.active_count() == before and s.idle


async def read(engine: Engine, number: int, pause: float = 0.0) -> list[int]:
    """What its stream says; checks that it is what the outcome says."""
    told = []
    async for update in engine.stream(number):
        assert isinstance(update, Output) and update.number == number
        told += update.tokens
        await asyncio.sleep(pause)
    check_outcome(update.sequence)
    assert update.finish_reason is not None and update.sequence.tokens == told
    return told


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_streams_and_results(async_scheduling):
    async def test(engine, s):
        numbers = [await engine.submit(request) for request in crowd()]
        readers = [read(engine, n, pause=0.02 * (n == 2)) for n in numbers[:3]]
        results = [engine.result(n) for n in numbers[3:]]
        told = await asyncio.gather(*readers, *results)
        assert numbers == list(range(5))
        assert [*told[:3], *(outcome.tokens for outcome in told[3:])] == texts()
        for number in (0, 4, 5, -1, None):  # read already, or never there
            with pytest.raises(ValueError, match="number: got .*, allowed: a request of this loop that nobody reads"):
                engine.stream(number)
        for number in (0, 5, None):
            assert await engine.cancel(number) is False
        assert (await engine.result(await engine.submit(Request([1], 0)))).finish_reason == FinishReason.LENGTH

    run(test, async_scheduling=async_scheduling)


LEAVING = ["break", "error", "task_cancelled", "timeout", "result_cancelled", "never_read"]


@pytest.mark.parametrize("way", LEAVING)
def test_a_reader_that_leaves_cancels_its_request(way):
    cancelled: list[tuple[int, bool]] = []

    async def leave(engine, number):
        if way == "result_cancelled":
            await engine.result(number)
        async with aclosing(engine.stream(number)) as updates:
            async for _ in updates:
                if way == "break":
                    break
                if way == "error":
                    raise ConnectionError("gone")

    async def test(engine, s):
        numbers, cancel = [], s.cancel
        s.cancel = lambda number: cancelled.append((number, cancel(number))) or cancelled[-1][1]
        for number, request in enumerate(crowd()):
            numbers.append(await engine.submit(LONG if number == FAULTY else request))
        others = [asyncio.create_task(read(engine, n)) for n in numbers if n != FAULTY]
        if way == "never_read":
            assert await engine.cancel(FAULTY)
        elif way == "timeout":
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(engine.result(FAULTY), 0.02)
        else:
            leaver = asyncio.create_task(leave(engine, FAULTY))
            if way.endswith("cancelled"):
                while engine.usage.live == 0:
                    await asyncio.sleep(0.005)
                leaver.cancel()
            (ended,) = await asyncio.gather(leaver, return_exceptions=True)
            kind = {"break": type(None), "error": ConnectionError}.get(way, asyncio.CancelledError)
            assert isinstance(ended, kind)
        assert await asyncio.gather(*others) == [t for n, t in enumerate(texts()) if n != FAULTY]
        while engine._open:
            await asyncio.sleep(0.005)
        assert engine.usage.cache_tokens_used == 0 and (FAULTY, True) in cancelled

    run(test)


def test_a_queue_is_bounded_whatever_the_thread_has_taken():
    async def test(engine, s):
        numbers, refused = [], 0
        for _ in range(12):
            try:
                numbers.append(await engine.submit(Request([5, 6], 3)))
            except QueueFull as error:
                refused += 1
                assert "allowed: 2" in str(error)
            assert engine.usage.waiting <= 2
        assert 2 <= len(numbers) <= 12 - refused and refused >= 4
        outcomes = await asyncio.gather(*(engine.result(n) for n in numbers))
        assert {o.finish_reason for o in outcomes} == {FinishReason.LENGTH}
        assert (await engine.result(await engine.submit(Request([5, 6], 3)))).tokens == outcomes[0].tokens

    run(test, max_waiting=2)


def test_bad_requests_are_refused_at_once():
    async def test(engine, s):
        for request in (Request([]), Request([1], 40), Request([1], -1), None):
            with pytest.raises(ValueError, match="allowed: "):
                await engine.submit(request)
        assert await engine.submit(Request([1], 1)) == 0
        await engine.result(0)

    run(test)


def test_cancelled_by_another_task():
    async def test(engine, s):
        number = await engine.submit(LONG)
        reader = asyncio.create_task(engine.result(number))
        answers = await asyncio.gather(*(engine.cancel(number) for _ in range(3)))
        outcome = await reader
        assert outcome.finish_reason == FinishReason.CANCELLED and sorted(answers) == [False, False, True]

    run(test)


def test_closed_in_the_middle_of_a_step():
    """From inside of a step, so certainly: the step ends, all that is left is cancelled, and every reader learns it."""
    s, inside, go_on = scheduler(), threading.Event(), threading.Event()

    def blocks(new):
        inside.set()
        assert go_on.wait(30)

    async def main():
        engine = Engine(s)
        numbers = [await engine.submit(Request([5, 6], 20, stop=Stop(blocks))) for _ in range(4)]
        results = [asyncio.create_task(engine.result(n)) for n in numbers]
        await asyncio.to_thread(inside.wait, 30)
        closing = [asyncio.create_task(engine.close()) for _ in range(2)]
        await asyncio.sleep(0)
        go_on.set()
        await asyncio.gather(*closing)
        outcomes = await asyncio.gather(*results)
        assert {o.finish_reason for o in outcomes} == {FinishReason.CANCELLED} and any(o.tokens for o in outcomes)
        assert engine.stopped == "the engine was closed"

    asyncio.run(main())
    assert s.idle and s.usage.cache_tokens_used == 0


def test_a_thread_that_dies_leaves_nobody_waiting(monkeypatch):
    s, steps = scheduler(max_waiting=3), []
    step = s.step

    def dies():
        steps.append(1)
        if len(steps) == 3:
            raise SystemError("no way on")
        return step()

    monkeypatch.setattr(s, "step", dies)

    async def main():
        engine = Engine(s)
        numbers = [await engine.submit(LONG) for _ in range(3)]
        died = "the engine's thread died: SystemError: no way on"
        outcomes = await asyncio.wait_for(asyncio.gather(*map(engine.result, numbers)), 30)
        for outcome in outcomes:
            assert outcome.finish_reason == FinishReason.FAILED and outcome.error == f"EngineStopped: {died}"
        with pytest.raises(EngineStopped, match=died):
            await engine.submit(LONG)
        assert await engine.cancel(numbers[0]) is False and engine.stopped == died
        await engine.close()

    asyncio.run(main())


def test_a_thread_that_dies_answers_who_cancelled(monkeypatch):
    """A cancellation that came during the last step, which nobody will take any more."""
    s, stepping, cancelled = scheduler(), threading.Event(), threading.Event()

    def dies():
        stepping.set()
        cancelled.wait(30)
        raise SystemError("no way on")

    monkeypatch.setattr(s, "step", dies)

    async def main():
        engine = Engine(s)
        number = await engine.submit(LONG)
        await asyncio.to_thread(stepping.wait, 30)
        answer = asyncio.create_task(engine.cancel(number))
        await asyncio.sleep(0)
        cancelled.set()
        assert await asyncio.wait_for(answer, 30) is False
        assert (await engine.result(number)).finish_reason == FinishReason.FAILED
        await engine.close()

    asyncio.run(main())


def test_the_thread_sleeps_and_keeps_the_number_of_threads(monkeypatch):
    """No processor time while there is nothing to do: counted in wake-ups."""
    s, counts, waits = scheduler(), [], []
    step = s.step
    monkeypatch.setattr(s, "step", lambda: counts.append(torch.get_num_threads()) or step())
    idle = type(s).idle.fget
    monkeypatch.setattr(type(s), "idle", property(lambda self: waits.append(1) or idle(self)))
    before = torch.get_num_threads()

    async def main():
        async with Engine(s) as engine:
            await engine.result(await engine.submit(Request([1, 2], 2)))
            async with asyncio.timeout(10):
                asked = -1
                while len(waits) != asked:
                    asked = len(waits)
                    await asyncio.sleep(0.1)

    asyncio.run(main())
    assert set(counts) == {before} and len(counts) < 10


def test_a_loop_that_ends_takes_its_requests_along():
    """Another loop's go on."""
    s = scheduler()

    async def abandon(engine):
        return await engine.submit(LONG)

    async def main():
        async with Engine(s) as engine:
            number = await engine.submit(crowd()[0])
            gone = await asyncio.to_thread(asyncio.run, abandon(engine))
            with pytest.raises(ValueError, match="number"):
                engine.stream(gone)
            assert await read(engine, number) == texts()[0]
            deadline = time.monotonic() + 30
            while engine._open and time.monotonic() < deadline:
                await asyncio.sleep(0.005)
            assert engine.usage.cache_tokens_used == 0 and not engine._unread

    asyncio.run(main())


def test_a_scheduler_with_requests_is_not_taken():
    s = scheduler(decoder())
    s.submit(LONG)
    with pytest.raises(ValueError, match="scheduler: got one with requests, allowed: an idle one"):
        Engine(s)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
def test_a_process_that_is_forked_is_told_to_make_its_own():
    """The engine's thread stays in the process that made it, where it goes on. An engine of its own decodes."""

    def in_child(engine) -> bool:
        try:
            asyncio.run(engine.submit(LONG))
        except EngineStopped as error:
            told = str(error)

        async def own():
            async with Engine(scheduler()) as mine:
                return [(await mine.result(await mine.submit(request))).tokens for request in crowd()]

        return "make an engine here" in told and asyncio.run(own()) == texts()

    async def test(engine, s):
        number = await engine.submit(crowd()[0])
        if (child := os.fork()) == 0:
            signal.alarm(60)
            try:
                os._exit(0 if in_child(engine) else 1)
            finally:
                os._exit(2)
        assert (await engine.result(number)).tokens == texts()[0]
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0

    texts()
    run(test)

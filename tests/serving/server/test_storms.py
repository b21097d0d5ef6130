"""Clients that leave at random moments, texts that fail, and signals under load: nothing is lost, and a request beside
them is answered as ever.

A part of the first two every day, 2 s together; all of it nightly."""

from __future__ import annotations

import asyncio
import json
import os
import random
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from specdec.serving.server import plan
from specdec.serving.server.life_cycle import Server
from specdec.serving.server.server_settings import bind
from specdec.serving.server.service import Service
from support.tiny_service import FAULT, NAME, FaultyRequest, is_idle, tiny_service
from support.wire import Client, post, texts_of

LONG = {"model": NAME, "prompt": "x = ", "max_tokens": 40, "logit_bias": {"0": -100}}
CANARY = {"model": NAME, "prompt": "def f(x):\n", "max_tokens": 6, "seed": 3}
SECONDS = 30.0  # that anything may take
AT_ONE_TIME, SIGNALS = 16, 50


class Stormed:
    """A server in a thread of its own, on a port of this machine, and what it held when it was new."""

    def __init__(self, service: Service):
        self.service, self.bound = service, bind(service.settings)
        self.port, started = self.bound.getsockname()[1], threading.Event()
        self.server = Server(service, self.bound, started.set)
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()))
        self._thread.start()
        assert started.wait(SECONDS)
        asyncio.run(self._warm_up())
        self._wait_until_idle()
        self._before = self._held()

    def check_nothing_is_lost(self) -> None:
        self._wait_until_idle()
        assert self._held() == self._before
        for lane in self.service.lanes.running:
            assert not lane.engine._open and not lane.engine._unread

    async def canary(self) -> None:
        """Fails if a request is not answered, or with another text than the first one."""
        async with asyncio.timeout(SECONDS):
            for body in (CANARY, {**CANARY, "stream": True}):
                (text,) = texts_of(await post(self.port, body)).values()
                assert text == self.expected

    def close(self) -> None:
        self.server.stop()
        self._thread.join()
        self.bound.close()

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        await self.server.run_until_signal()

    async def _warm_up(self) -> None:
        self.expected = texts_of(await post(self.port, CANARY))[0]
        assert self.expected
        lanes = [{}, {"rule": "token"}, {"drafter": "none"}]  # those that FORMS ask for
        await asyncio.gather(*(post(self.port, {**CANARY, **lane}) for lane in lanes for _ in range(AT_ONE_TIME)))

    def _held(self) -> dict[str, Any]:
        names = [thread.name for thread in threading.enumerate()]
        return {
            "files": len(os.listdir("/proc/self/fd")),
            "threads": sorted(name for name in names if not name.startswith("asyncio_")),  # not those of to_thread
            "tasks": len(asyncio.all_tasks(self._loop)),
            "connections": len(self.server.server_state.connections),
            "requests": len(self.server.server_state.tasks),
        }

    def _wait_until_idle(self) -> None:
        state, deadline = self.server.server_state, time.monotonic() + SECONDS
        while not is_idle(self.service) or state.connections or state.tasks:
            assert time.monotonic() < deadline, (self.service.lanes.running[0].engine.usage, state.tasks)
            time.sleep(0.01)
        time.sleep(0.05)  # the last connections are closed


@pytest.fixture
def stormed(pair) -> Iterator[Stormed]:
    made = Stormed(tiny_service(pair[2]))
    yield made
    made.close()


def storm(stormed: Stormed, count: int, one: Callable[[random.Random], Awaitable[str]]) -> Counter[str]:
    """Calls ``one`` so many times, some at one time, with canaries among them. Returns how often each result came."""
    seen: Counter[str] = Counter()

    async def some(first: int) -> None:
        for number in range(first, count, AT_ONE_TIME):
            async with asyncio.timeout(SECONDS):
                seen[await one(random.Random(number))] += 1
            if number % 25 == 0:
                await stormed.canary()

    async def all_of_them() -> None:
        await asyncio.gather(*(some(first) for first in range(AT_ONE_TIME)))
        await stormed.canary()

    asyncio.run(all_of_them())
    stormed.check_nothing_is_lost()
    return seen


def counts(daily: int, nightly: int) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("count", [daily, pytest.param(nightly, marks=pytest.mark.nightly)])


FORMS: list[dict] = [
    {},
    {"stream": True},
    {"n": 3},
    {"n": 3, "stream": True},
    {"prompt": "x = 1\n" * 5, "stream": True, "logprobs": 2},
    {"prompt": ["x", "y = "], "stop": ["zz", "q"]},
    {"rule": "token", "stream": True},
    {"drafter": "none"},
    {"seed": FAULT, "stream": True},
    {"seed": FAULT, "n": 2},
]


@counts(40, 1000)
@pytest.mark.filterwarnings("ignore:a sequence drafts no more")
def test_clients_that_leave_at_random_moments(stormed, count, monkeypatch):
    """Before the body ends, while they wait, in the middle of an answer, after its last byte; politely or not."""
    monkeypatch.setattr(plan, "Request", FaultyRequest)

    async def leave(chance: random.Random) -> str:
        body = {**LONG, "seed": chance.randrange(1000), **chance.choice(FORMS)}
        client = await Client.connect(stormed.port)
        sent = client.request(body)
        moment = chance.choice(("body", "wait", "wait", "middle", "middle", "end"))
        await client.send(sent[: chance.randrange(len(sent))] if moment == "body" else sent)
        if moment in ("body", "wait"):
            await asyncio.sleep(chance.choice((0.0, 0.001, 0.01, 0.05)) * chance.random())
        elif moment == "middle":
            await client.read(chance.randrange(1, 2000))
        else:
            await client.answer()
        client.leave(chance.choice((True, False)))
        return moment

    seen = storm(stormed, count, leave)
    assert min(seen[moment] for moment in ("body", "wait", "middle", "end")) > count / 20


@counts(10, 200)
@pytest.mark.filterwarnings("ignore:a sequence drafts no more")
def test_cancelled_requests_among_others_that_end(stormed, count, monkeypatch):
    """The texts of those that stay are the same as before, also beside texts that fail."""
    monkeypatch.setattr(plan, "Request", FaultyRequest)
    bodies = [{**LONG, "seed": seed, "max_tokens": 20, "n": 1 + seed % 3, "stream": seed % 2 > 0} for seed in range(6)]
    alone = [texts_of(asyncio.run(post(stormed.port, body))) for body in bodies]

    async def cancel(chance: random.Random) -> str:
        client = await Client.connect(stormed.port)
        await client.send(client.request({**LONG, "stream": True, "n": 4, "seed": chance.randrange(1000)}))
        await client.read(chance.randrange(1, 4000))
        client.leave(True)
        which = chance.randrange(len(bodies))
        failing = post(stormed.port, {**LONG, "seed": FAULT})
        answer, failed = await asyncio.gather(post(stormed.port, bodies[which]), failing)
        assert texts_of(answer) == alone[which]
        assert failed.status == 500 and json.loads(failed.body)["error"]["code"] == "decoding_failed"
        return "cancelled"

    storm(stormed, count, cancel)


@pytest.mark.nightly
def test_signals_under_load():
    """Each in a process of its own, which says what it still held in the end."""
    arguments = [sys.executable, "-m", "support.signals", str(SIGNALS)]
    folders = [str(Path(__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(folders), "TOKENIZERS_PARALLELISM": "false"}
    run = subprocess.run(arguments, env=environment, capture_output=True, text=True, timeout=600)
    assert run.returncode == 0, run.stdout + run.stderr
    assert json.loads(run.stdout.splitlines()[-1])["signals"] == SIGNALS

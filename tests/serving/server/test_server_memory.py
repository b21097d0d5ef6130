"""A server that has been asked for long holds no more than before."""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import random
import threading
from pathlib import Path

import pytest
from specdec.serving.server import plan
from specdec.serving.server.life_cycle import Server
from specdec.serving.server.server_settings import bind
from support.tiny_service import FAULT, NAME, FaultyRequest, is_idle, tiny_service
from support.wire import Client, post

FORMS: list[dict] = [
    {},
    {"stream": True, "logprobs": 3, "specdec": {"steps": True}},
    {"n": 2, "stop": "q"},
    {"echo": True, "logprobs": 1},
    {"prediction": {"type": "content", "content": "def f(x):"}, "stream": True},
    {"rule": "token"},
    {"seed": FAULT},
    {"max_tokens": 100},  # refused
    {"unknown": 1},
]
AT_ONE_TIME = 8
MORE_BYTES, MORE_OBJECTS = 4_000_000, 500  # that may be held after all requests than after the first tenth


@pytest.mark.parametrize("count", [pytest.param(20_000, marks=pytest.mark.nightly)])
@pytest.mark.filterwarnings("ignore:a sequence drafts no more")
def test_memory_is_flat(pair, count, monkeypatch):
    """Whole and streamed texts, refused and failing ones, and clients that leave: the first tenth may add to what the
    process holds, as it fills caches; the others add nothing that counts in 18,000 requests."""
    monkeypatch.setattr(plan, "Request", FaultyRequest)
    monkeypatch.setattr(logging.root.manager, "disable", logging.CRITICAL)  # pytest keeps every line
    service = tiny_service(pair[2])
    held = []

    async def ask(port: int, number: int) -> None:
        chance = random.Random(number)
        body = {"model": NAME, "prompt": f"x{number} = ", "max_tokens": 6, **chance.choice(FORMS)}
        if chance.random() < 0.1:
            client = await Client.connect(port)
            await client.send(client.request({**body, "max_tokens": 40}))
            await client.read(chance.randrange(200))
            client.leave(chance.choice((True, False)))
        else:
            assert (await post(port, body)).status in (200, 400, 500)

    async def ask_all(port: int, numbers: range) -> None:
        for first in numbers[::AT_ONE_TIME]:
            await asyncio.gather(*(ask(port, number) for number in numbers[first - numbers.start :][:AT_ONE_TIME]))

    bound, started = bind(service.settings), threading.Event()
    server = Server(service, bound, started.set)
    thread = threading.Thread(target=lambda: asyncio.run(server.run_until_signal()))
    thread.start()
    try:
        assert started.wait(30)
        for numbers in (range(count // 10), range(count // 10, count)):
            asyncio.run(ask_all(bound.getsockname()[1], numbers))
            gc.collect()
            held.append((_resident_bytes(), len(gc.get_objects())))
        assert is_idle(service)
    finally:
        server.stop()
        thread.join()
        bound.close()
    print(json.dumps(held))
    (before, objects), (after, more) = held
    assert after - before < MORE_BYTES and more - objects < MORE_OBJECTS, held


def _resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096

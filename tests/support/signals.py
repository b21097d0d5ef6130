"""``python -m support.signals COUNT``: as many servers, one after the other, each ended by SIGTERM under load.

A server is a fork of this process, so that nothing is imported or loaded twice. Whoever was being served has a whole
answer, or is told that the server ends; the process then holds nothing, and has the exit code 0."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import socket
import sys
import threading
import time
from collections import Counter
from contextlib import suppress
from typing import Any, NamedTuple, TextIO

import torch
from specdec import load_embedded_pair
from specdec.serving.server.life_cycle import Server
from specdec.serving.server.server_settings import bind
from specdec.serving.server.service import Service

from support.tiny_service import NAME, is_idle, tiny_service
from support.wire import Answer, post, texts_of

CLIENTS = 8
SECONDS = 30.0
LONG = {"model": NAME, "prompt": "x = ", "max_tokens": 40, "logit_bias": {"0": -100}}
BODIES = [{**LONG, "seed": seed, "n": 1 + seed % 2, "stream": seed % 3 > 0} for seed in range(CLIENTS)]


def main(count: int) -> None:
    torch.set_num_threads(1)
    tokenizer = load_embedded_pair()[2]
    seen: Counter[str] = Counter()
    expected: list[dict[int, str]] = []
    for number in range(count):
        drain = (SECONDS, 0)[number % 2]
        service = tiny_service(tokenizer, rows=4, drain_seconds=drain)
        server = fork(service)
        try:
            seen += asyncio.run(one(server, drain, random.Random(number), expected))
        finally:
            server.end()
    assert seen["whole"] > 0 and (count < 10 or seen["told"] > 0), seen
    print(json.dumps({"signals": count, **seen}))


class Forked(NamedTuple):
    """A server in a process of its own."""

    process: int
    port: int
    said: TextIO  # what it held in the end

    def exit_code(self) -> int:
        return os.waitstatus_to_exitcode(os.waitpid(self.process, 0)[1])

    def end(self) -> None:
        self.said.close()
        with suppress(ProcessLookupError, ChildProcessError):  # it has ended
            os.kill(self.process, signal.SIGKILL)
            os.waitpid(self.process, 0)


async def one(
    server: Forked, drain_seconds: float, chance: random.Random, expected: list[dict[int, str]]
) -> Counter[str]:
    """Loads a server, and ends it. Returns how many clients had a whole answer, were told, or came too late.

    Args:
        expected: the texts of BODIES. They are asked for, if there are none.
    """
    if not expected:
        expected += [texts_of(await post(server.port, body)) for body in BODIES]
    asking = [asyncio.ensure_future(post(server.port, body)) for body in BODIES]
    await asyncio.sleep(0.1 * chance.random())
    began = time.monotonic()
    os.kill(server.process, signal.SIGTERM)
    answers = await asyncio.wait_for(asyncio.gather(*asking, return_exceptions=True), SECONDS)
    code, seconds = server.exit_code(), time.monotonic() - began
    assert code == 0 and seconds < SECONDS / 2, (code, seconds)
    held = json.loads(server.said.read())
    assert held == {"idle": True, "tasks": 0, "threads": ["MainThread"], "sockets": 0}, held
    judged = (judge(answer, texts, drain_seconds) for answer, texts in zip(answers, expected, strict=True))
    return Counter(judged)


def judge(answer: Answer | BaseException, texts: dict[int, str], drain_seconds: float) -> str:
    if isinstance(answer, ConnectionError) or isinstance(answer, Answer) and answer.status == 0:
        return "late"  # it came when the server no longer listened
    if isinstance(answer, BaseException):
        raise answer
    if answer.status == 503:
        return "told"
    events = answer.body.decode().split("\n\n")
    if drain_seconds == 0 and len(events) > 2 and '"error"' in events[-3] and events[-2] == "data: [DONE]":
        return "told"
    assert texts_of(answer) == texts
    return "whole"


def fork(service: Service) -> Forked:
    """Returns a server that accepts connections."""
    bound = bind(service.settings)
    port, (ready, started), (said, saying) = bound.getsockname()[1], os.pipe(), os.pipe()
    if (child := os.fork()) == 0:
        code = 1
        try:
            serve(service, bound, started, saying)
            code = 0
        finally:
            os._exit(code)  # nothing that the parent would do in its end
    bound.close()
    os.close(saying)
    os.close(started)
    assert os.read(ready, 1) == b"1", "the server did not start"
    os.close(ready)
    return Forked(child, port, os.fdopen(said))


def serve(service: Service, bound: socket.socket, started: int, saying: int) -> None:
    held: dict[str, Any] = {}

    async def run() -> None:
        await service.lanes.get()
        await Server(service, bound, lambda: os.write(started, b"1") and None).run_until_signal()
        held["tasks"] = len(asyncio.all_tasks()) - 1  # this one

    asyncio.run(run())
    bound.close()
    files = [file.path for file in os.scandir("/proc/self/fd") if file.is_symlink()]
    held["sockets"] = sum(os.path.lexists(path) and os.readlink(path).startswith("socket:") for path in files)
    held["threads"] = [thread.name for thread in threading.enumerate()]
    held["idle"] = is_idle(service)
    os.write(saying, json.dumps(held).encode())


if __name__ == "__main__":
    main(int(sys.argv[1]))

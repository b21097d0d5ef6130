"""Senders of grammars that would end the process, or fill it, beside honest clients: these have the same texts, in at
most twice the time, and the process is as large as before.

A part of it every day; all of it nightly."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import jsonschema
import pytest
from support.grammars import SCHEMAS
from support.hostile_grammars import HOSTILE

CLIENTS, HOSTILE_CLIENTS = 16, 8
PROMPTS = [f"def function_{i}(x):\n" for i in range(CLIENTS)]
SECONDS = 300.0


class Load(NamedTuple):
    texts: dict[int, str]
    slowest: float


@pytest.fixture
def server(tmp_path) -> Iterator[tuple[str, int]]:
    """``specdec serve`` in a process of its own; its address and number."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with socket.create_server(("127.0.0.1", 0)) as bound:
        port = bound.getsockname()[1]
    options = ["--port", str(port), "--rows", "16", "--device", "cpu"]
    with (tmp_path / "log").open("w+") as log:
        command = [sys.executable, "-m", "specdec", "serve", *options]
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment)
        url = f"http://127.0.0.1:{port}"
        _wait_until_ready(url, process)
        yield url, process.pid
        assert process.poll() is None, "the server has ended"
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) in (0, -signal.SIGTERM)


@pytest.mark.nightly
@pytest.mark.parametrize("rounds", [1, 6])
def test_honest_clients_do_not_notice(server, rounds):
    url, pid = server
    asyncio.run(_honest(url, 1))  # caches are filled
    alone = asyncio.run(_honest(url, rounds))
    before = _resident_bytes(pid)
    seen: Counter[int] = Counter()

    async def together() -> Load:
        attacks = [asyncio.create_task(_hostile(url, i, seen)) for i in range(HOSTILE_CLIENTS)]
        try:
            return await _honest(url, rounds)
        finally:
            for attack in attacks:
                attack.cancel()
            await asyncio.gather(*attacks, return_exceptions=True)

    beside = asyncio.run(together())
    after = _resident_bytes(pid)
    print(
        json.dumps({"alone": alone.slowest, "beside": beside.slowest, "bytes": [before, after], "answers": dict(seen)})
    )
    assert beside.texts == alone.texts and {*seen} <= {400, 429} and seen[400]
    assert after < 1.1 * before
    assert beside.slowest < 3 * alone.slowest + 1.0  # tests beside it take the cores, too


async def _honest(url: str, rounds: int) -> Load:
    """What each client gets who asks for one form after another, and the slowest answer."""
    texts, slowest = {}, 0.0

    async def one(client: httpx.AsyncClient, number: int) -> None:
        nonlocal slowest
        names = sorted(SCHEMAS)
        for turn in range(rounds * 2):
            schema = SCHEMAS[names[(number + turn) % len(names)]]
            form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}} if number % 4 else None
            began = time.monotonic()
            answer = await client.post("/v1/completions", json=_body(PROMPTS[number], 60, form))
            slowest = max(slowest, time.monotonic() - began)
            assert answer.status_code == 200, answer.text
            (choice,) = answer.json()["choices"]
            if form is not None and choice["finish_reason"] == "stop":
                jsonschema.validate(json.loads(choice["text"]), schema)
            texts[number * 1000 + turn] = choice["text"]

    async with httpx.AsyncClient(base_url=url, timeout=SECONDS) as client:
        await asyncio.gather(*(one(client, number) for number in range(CLIENTS)))
    return Load(texts, slowest)


async def _hostile(url: str, number: int, seen: Counter[int]) -> None:
    """One after the other, each made different, so that none is remembered; every third sender leaves."""
    names = sorted(HOSTILE)
    async with httpx.AsyncClient(base_url=url, timeout=SECONDS) as client:
        for turn in range(10**6):
            source = HOSTILE[names[(number + turn) % len(names)]][0]()
            kind = {"json_schema": "json", "regex": "regex", "lark": "grammar"}[source.kind]
            salt = f"{number}-{turn}"
            value: Any = source.text
            if kind == "json":
                value = {**json.loads(value), "description": salt}
            else:
                value = value + (f"z{number}{turn}" if kind == "regex" else f"\n// {salt}")
            body = {**_body("x", 5, None), "structured_outputs": {kind: value}}
            try:
                answer = await client.post("/v1/completions", json=body, timeout=0.3 if turn % 3 == 2 else SECONDS)
                seen[answer.status_code] += 1
            except httpx.TimeoutException:
                pass  # this one has left


def _body(prompt: str, tokens: int, form: dict | None) -> dict:
    return {"model": "specdec-embedded", "prompt": prompt, "max_tokens": tokens, "seed": 7, "response_format": form}


def _wait_until_ready(url: str, process: subprocess.Popen) -> None:
    deadline = time.monotonic() + SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        try:
            urllib.request.urlopen(f"{url}/ready", timeout=5)
            return
        except (urllib.error.URLError, ConnectionError):
            time.sleep(0.1)
    pytest.fail("the server is not ready")


def _resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

"""How a server begins and ends, and what becomes of the requests that are open then."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import signal
import socket
import threading

import httpx
import pytest
from specdec.serving.server.app import create_app
from specdec.serving.server.server_settings import ServerSettings, bind, is_loopback
from support.servers import serving

LONG = {"model": "embedded", "prompt": "def f", "max_tokens": 200, "ignore_eos": True}
KEY = "a-key-for-the-test"


class Paced:
    """Lets the engine of a lane take steps only as the test allows."""

    def __init__(self, lane, monkeypatch):
        self.allowed = threading.Semaphore(0)
        self._scheduler = lane.engine._scheduler
        step = self._scheduler.step

        def paced():
            assert self.allowed.acquire(timeout=30)
            return step()

        monkeypatch.setattr(self._scheduler, "step", paced)

    def release(self, steps: int = 10_000) -> None:
        self.allowed.release(steps)


def nothing_left(lane) -> bool:
    usage = lane.engine.usage
    return (usage.live, usage.prefilling, usage.waiting, usage.cache_tokens_used) == (0, 0, 0, 0)


async def until(holds) -> None:
    async with asyncio.timeout(10):
        while not holds():
            await asyncio.sleep(0.01)


def at_port(service, **settings):
    return dataclasses.replace(service, settings=ServerSettings(port=0, **settings))


async def first_chunk(lines) -> None:
    async for line in lines:
        if line.startswith("data: ") and json.loads(line[6:])["choices"][0]["text"]:
            return


def test_the_first_signal_lets_open_requests_end_and_takes_no_others(service, monkeypatch):
    taken = (signal.SIGTERM, signal.SIGINT)
    before = {signal.getsignal(each) for each in taken}

    async def main():
        served = at_port(service)
        lane = await served.lanes.get()
        pace = Paced(lane, monkeypatch)
        async with serving(served) as (server, port), httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client:
            pace.release(3)
            async with client.stream("POST", "/v1/completions", json=LONG | {"stream": True}) as stream:
                lines = stream.aiter_lines()
                await first_chunk(lines)
                signal.raise_signal(signal.SIGTERM)
                # A second one would end this process at once.
                await until(lambda: {signal.getsignal(each) for each in taken} == {signal.SIG_DFL})
                statuses = [(await client.get(path)).status_code for path in ("/health", "/ready")]
                refused = await client.post("/v1/completions", json=LONG)
                assert [*statuses, refused.status_code] == [200, 503, 503]
                assert refused.json()["error"]["code"] == "shutting_down" and refused.headers["Retry-After"]
                pace.release()
                rest = [line async for line in lines if line]
            assert rest[-1] == "data: [DONE]"
            assert json.loads(rest[-2][6:])["choices"][0]["finish_reason"] == "length"
        assert nothing_left(lane) and lane.engine.stopped == "the engine was closed"

    asyncio.run(main())
    assert {signal.getsignal(each) for each in taken} == before


def test_what_is_open_after_the_drain_is_cancelled_and_told(service, monkeypatch):
    threads = threading.active_count()

    async def main():
        served = at_port(service, drain_seconds=0.2)
        lane = await served.lanes.get()
        pace = Paced(lane, monkeypatch)
        async with serving(served) as (server, port), httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client:
            whole = asyncio.create_task(client.post("/v1/completions", json=LONG))
            pace.release(3)
            async with client.stream("POST", "/v1/completions", json=LONG | {"stream": True}) as stream:
                lines = stream.aiter_lines()
                await first_chunk(lines)
                server.stop()
                await until(lambda: lane.engine.stopped)
                pace.release(2)  # the engine ends after the step in which it is
                rest = [line async for line in lines if line]
            answer = await whole
        assert answer.status_code == 503 and answer.json()["error"]["code"] == "cancelled"
        assert any('"error"' in line for line in rest)
        assert nothing_left(lane) and not server.server_state.tasks and not server.server_state.connections

    asyncio.run(main())
    assert threading.active_count() <= threads


@pytest.mark.parametrize(
    ("path", "stream"),
    [(f"/v1/{route}completions", stream) for route in ("", "chat/") for stream in (False, True)]
    + [("/predict", False)],
)
def test_a_client_that_leaves_costs_no_more_than_one_step(service, monkeypatch, path, stream):
    prompt = {"messages": [{"role": "user", "content": "x"}]} if "chat" in path else {"prompt": "def f"}
    body = prompt if path == "/predict" else LONG | prompt | {"stream": stream}
    if "chat" in path:
        body = {name: value for name, value in body.items() if name != "prompt"}
        monkeypatch.setattr(service.tokenizer, "chat_template", "{{ messages[0].content }}")
    scope = {
        **{"type": "http", "method": "POST", "path": path, "raw_path": path.encode(), "query_string": b""},
        **{"headers": [(b"content-type", b"application/json"), (b"transfer-encoding", b"chunked")], "state": {}},
        **{"http_version": "1.1", "scheme": "http", "server": ("localhost", 80), "client": None, "root_path": ""},
    }
    sent = []

    async def main():
        lane = await service.lanes.get()
        pace, client, left = Paced(lane, monkeypatch), asyncio.Queue(), asyncio.Event()
        cancel = lane.engine._cancel

        async def send(message):
            sent.append(message)

        def cancelled(number):
            left.set()
            return cancel(number)

        monkeypatch.setattr(lane.engine, "_cancel", cancelled)

        client.put_nowait({"type": "http.request", "body": json.dumps(body).encode(), "more_body": False})
        serving = asyncio.create_task(create_app(service)(scope, client.get, send))
        pace.release(4)
        await until(lambda: lane.engine.usage.steps >= 3)
        assert not serving.done(), sent
        client.put_nowait({"type": "http.disconnect"})
        await asyncio.wait_for(left.wait(), 10)
        pace.release(2)  # the step in which it is, and the one that returns its last output
        await asyncio.wait_for(serving, 10)
        await until(lambda: nothing_left(lane))
        assert lane.engine.usage.steps <= 5

    asyncio.run(main())
    assert not any(message["type"] == "http.response.body" and not message.get("more_body") for message in sent)


def test_addresses():
    with bind(ServerSettings(port=0)) as bound:
        port = bound.getsockname()[1]
        bound.listen()
        with pytest.raises(OSError, match=f"^port: got {port} on 127.0.0.1, allowed: a free port"):
            bind(ServerSettings(port=port))
    for host in ("0.0.0.0", "::", ""):
        with pytest.raises(ValueError, match="^host: got .* without an API key, allowed: "):
            bind(ServerSettings(host=host, port=0))
    with bind(ServerSettings(host="0.0.0.0", port=0, api_keys=(KEY,))) as bound:
        assert bound.family == socket.AF_INET
    with pytest.raises(OSError, match="^host: got 'not an address', allowed: "):
        bind(ServerSettings(host="not an address", port=0))
    with pytest.raises(OSError, match="^port: got .* on 192.0.2.1, allowed: "):
        bind(ServerSettings(host="192.0.2.1", port=0, api_keys=(KEY,)))
    assert is_loopback("127.8.0.1") and is_loopback("::1") and not is_loopback("10.0.0.1")

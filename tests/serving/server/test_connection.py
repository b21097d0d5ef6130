"""Clients that are slow, rude or old, each on a socket of its own, and what they are answered."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import ssl
import subprocess

import httpx
import pytest
from fastapi import FastAPI, Request
from starlette.responses import Response
from support.servers import JSON, Client, ask, request, service, serving, status_of

CLOSE = b"Connection: close\r\n"
SHORT = {"header_seconds": 0.3, "body_seconds": 0.3, "write_seconds": 0.3, "idle_seconds": 0.3}


class Routes:
    """Some that wait, and what became of them."""

    def __init__(self) -> None:
        self.begun, self.cancelled = asyncio.Event(), asyncio.Event()

    def __call__(self, app: FastAPI) -> None:
        @app.post("/echo")
        async def echo(request: Request) -> dict:
            return {"size": len(await request.body())}

        @app.get("/wait")
        async def wait() -> None:
            await self._until_cancelled()

        @app.get("/flood")
        async def flood() -> Response:
            return Flood(self)

    async def _until_cancelled(self) -> None:
        self.begun.set()
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            self.cancelled.set()
            raise


class Flood(Response):
    """Never ends by itself."""

    def __init__(self, routes: Routes):
        super().__init__()
        del self.headers["content-length"]
        self._routes = routes

    async def __call__(self, scope, receive, send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        self._routes.begun.set()
        try:
            while True:
                await send({"type": "http.response.body", "body": b"x" * 65536, "more_body": True})
        finally:
            self._routes.cancelled.set()


def run(test, **settings) -> None:
    """``test(port, routes)`` against a server that is unharmed afterwards: it answers, and nothing is left of it."""

    async def main():
        routes = Routes()
        async with serving(service(**settings), routes) as (server, port):
            await asyncio.wait_for(test(port, routes), 20)
            assert status_of(await ask(port, request("/health", CLOSE))) == 200
        assert not server.server_state.connections and not server.server_state.tasks

    asyncio.run(main())


def error_of(answer: bytes) -> dict:
    head, _, body = answer.partition(b"\r\n\r\n")
    assert b"application/json" in head
    error = json.loads(body)["error"]
    assert {"message", "type", "param", "code"} == error.keys() and error["message"]
    return error


def slowly(data: bytes) -> list[bytes]:
    return [data[i : i + 1] for i in range(len(data))]


def test_a_slow_head_is_given_up():
    async def test(port, routes):
        answers = await asyncio.gather(
            ask(port, *slowly(request("/health", b"X: " + b"x" * 200)), pause=0.02),
            ask(port, request("/health"), b"GET ", pause=0.1),  # the second request of a connection
            ask(port),  # nothing at all
        )
        assert [status_of(answers[0]), answers[1].count(b"HTTP/1.1"), answers[2]] == [408, 2, b""]
        assert error_of(answers[0])["code"] == "timeout"
        assert status_of(answers[1]) == 200 and b"HTTP/1.1 408" in answers[1]

    run(test, **SHORT)


def test_a_slow_body_is_given_up():
    async def test(port, routes):
        head = request("/echo", JSON + b"Content-Length: 200\r\n", method="POST")
        chunked = request("/echo", JSON + b"Transfer-Encoding: chunked\r\n", method="POST")
        answers = await asyncio.gather(
            ask(port, head, *slowly(b" " * 200), pause=0.02), ask(port, chunked, *[b"1\r\n \r\n"] * 200, pause=0.02)
        )
        assert [status_of(answer) for answer in answers] == [408, 408]

    run(test, **SHORT)


def test_an_idle_connection_is_closed():
    async def test(port, routes):
        answer = await ask(port, request("/health"))
        assert status_of(answer) == 200 and answer.count(b"HTTP/1.1") == 1

    run(test, **SHORT)


def test_a_reader_that_does_not_read_is_dropped_and_its_request_cancelled():
    async def test(port, routes):
        client = await Client.connect(port, receive_buffer=4096)
        await client.send(request("/flood"))
        await asyncio.wait_for(routes.cancelled.wait(), 10)
        await client.rest()  # what the system had taken; then it ends
        client.leave()

    run(test, **SHORT)


def test_a_slow_reader_is_served_while_it_takes_each_part_in_time():
    async def test(port, routes):
        client = await Client.connect(port, receive_buffer=65536)
        await client.send(request("/flood"))
        for _ in range(12):  # over four times as long as each part may take
            await asyncio.sleep(0.1)
            async with asyncio.timeout(5):
                await client.reader.readexactly(300_000)
        assert not routes.cancelled.is_set()
        client.leave()
        await asyncio.wait_for(routes.cancelled.wait(), 5)

    run(test, **SHORT)


@pytest.mark.parametrize("way", ["waits", "streams", "pipelined"])
def test_a_client_that_leaves_cancels_its_request(way):
    async def test(port, routes):
        client = await Client.connect(port)
        await client.send(request("/flood" if way == "streams" else "/wait"))
        await asyncio.wait_for(routes.begun.wait(), 5)
        await client.send(request("/health") if way == "pipelined" else b"")
        assert not routes.cancelled.is_set()
        await asyncio.sleep(0.05)
        client.leave()
        await asyncio.wait_for(routes.cancelled.wait(), 10)

    run(test)


def test_heads_that_are_too_large():
    async def test(port, routes):
        flood = [b"X-%d: " % i + b"x" * 500 + b"\r\n" for i in range(100)]
        answers = await asyncio.gather(
            ask(port, b"GET /health HTTP/1.1\r\n", *flood, pause=0.001),  # never complete
            ask(port, request("/health", b"".join(flood) + CLOSE)),  # complete, at once
            ask(port, request("/" + "x" * 17000, CLOSE)),
            ask(port, b"x" * 40000),
        )
        assert [status_of(answer) for answer in answers] == [431] * 4
        for answer in answers:
            assert "16384 bytes" in error_of(answer)["message"]
        assert status_of(await ask(port, request("/health", b"X: " + b"x" * 15000 + b"\r\n" + CLOSE))) == 200

    run(test)


def test_bodies_that_are_too_large():
    async def test(port, routes):
        length = JSON + CLOSE + b"Content-Length: %d\r\n"
        chunks = [b"3e8\r\n" + b" " * 1000 + b"\r\n"] * 30
        chunked = request("/echo", JSON + CLOSE + b"Transfer-Encoding: chunked\r\n", method="POST")
        for parts in (
            [request("/echo", length % 20001, method="POST")],  # answered before the body is sent
            [request("/echo", b"Expect: 100-continue\r\n" + length % 10**15, method="POST")],
            [request("/echo", length % 200000, method="POST"), *[b" " * 1000] * 200],  # and while it is
            [chunked, *chunks, b"0\r\n\r\n"],
            [request("/echo", length % 200000), *[b" " * 1000] * 200],  # that of a GET is as large
        ):
            answer = await ask(port, *parts)
            assert status_of(answer) == 413 and "20000" in error_of(answer)["message"]
        body = b'"' + b"x" * 19998 + b'"'
        answers = [
            await ask(port, request("/echo", length % 20000, body, method="POST")),
            await ask(port, chunked, *chunks[:19], b"3e8\r\n" + b'"' + b"x" * 998 + b'"\r\n0\r\n\r\n'),
        ]
        assert [status_of(answer) for answer in answers] == [200, 200]

    run(test, max_body_bytes=20000)


def test_an_answer_is_not_kept_from_a_client_that_is_still_sending():
    """The rest of a refused body is read, but not without end."""

    async def test(port, routes):
        client = await Client.connect(port)
        await client.send(request("/echo", JSON + b"Content-Length: 30000\r\n", method="POST"))
        assert b" 413 " in await client.reader.readline()
        await client.send(b" " * 30000 + request("/health", CLOSE))
        assert b"HTTP/1.1 200" in await client.rest()
        endless = [b" " * 65536] * 100
        answer = await ask(port, request("/echo", JSON + b"Content-Length: 9000000\r\n", method="POST"), *endless)
        assert status_of(answer) == 413

    run(test, max_body_bytes=20000)


def test_old_http_and_several_requests_at_once():
    async def test(port, routes):
        old = await ask(port, request("/health", version="1.0"))
        assert status_of(old) == 200 and b"chunked" not in old.lower()
        body = request("/echo", JSON + b"Content-Length: 2\r\n", b"{}", method="POST")
        answer = await ask(port, body + request("/nothing") + request("/health", CLOSE) + request("/health"))
        assert re.findall(rb"HTTP/1.1 (...)", answer) == [b"200", b"404", b"200"]

    run(test)


@pytest.mark.parametrize(
    "sent",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" * 9,  # TLS
        b"GET /health HTTP/1.1\r\n\r\n",  # no host
        b"GET /health HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n",
        b"POST /echo HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n",
        b"POST /echo HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: gzip, chunked\r\n\r\n",
        b"POST /echo HTTP/1.1\r\nHost: localhost\r\nContent-Length: -1\r\n\r\n",
        request("/echo", JSON + b"Transfer-Encoding: chunked\r\n", b"zz\r\n", method="POST"),
    ],
)
def test_what_is_not_http_is_answered_and_closed(sent):
    async def test(port, routes):
        answer = await ask(port, sent)
        assert 400 <= status_of(answer) < 600 and error_of(answer)["type"]

    run(test)


def test_connections_beyond_the_limit_are_told(caplog):
    caplog.set_level("INFO", "specdec")

    async def test(port, routes):
        clients = [await Client.connect(port) for _ in range(3)]
        for client in clients:
            await client.send(request("/health"))
            assert b" 200 " in await client.reader.readline()
        answer = await ask(port)
        assert status_of(answer) == 503 and error_of(answer)["code"] == "too_many_connections"
        clients.pop().leave()
        refused = 1  # and each time that we come before the server has seen that one left
        async with asyncio.timeout(10):
            while status_of(metrics := await ask(port, request("/metrics", CLOSE))) == 503:
                refused += 1
        told = f'specdec:answers_total{{model_name="tiny",route="none",status="503"}} {refused}.0'
        assert told.encode() in metrics
        for client in clients:
            client.leave()
        await asyncio.sleep(0.05)

    run(test, max_connections=3)
    closed = [record.facts for record in caplog.records if record.message == "connection closed"]
    assert {facts["code"] for facts in closed} == {"too_many_connections"}
    assert all(facts["peer"].startswith("127.0.0.1:") for facts in closed)


@pytest.mark.skipif(shutil.which("openssl") is None, reason="makes a certificate with openssl")
def test_tls(tmp_path):
    """Requests are answered over TLS, in parts too; who speaks HTTP, or nothing, is dropped."""
    certificate, key = str(tmp_path / "certificate"), str(tmp_path / "key")
    made = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2 -subj /CN=localhost"
    more = ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", key, "-out", certificate]
    subprocess.run([*made.split(), *more], check=True, capture_output=True)
    with pytest.raises(ValueError, match="ssl_certfile: got"):
        service(ssl_certfile=certificate)
    routes = Routes()

    async def main() -> None:
        trusted = ssl.create_default_context(cafile=certificate)
        async with serving(service(ssl_certfile=certificate, ssl_keyfile=key), routes) as (_, port):
            async with httpx.AsyncClient(verify=trusted, base_url=f"https://127.0.0.1:{port}") as client:
                answer = await client.post("/echo", json=["x" * 300_000])
                assert answer.json() == {"size": 300_004}
                async with client.stream("GET", "/flood") as flood:
                    parts = flood.aiter_raw()
                    assert len(await anext(parts)) > 0
            await asyncio.wait_for(routes.cancelled.wait(), 10)
            plain = await Client.connect(port)
            plain.writer.write(request("/health"))
            assert await asyncio.wait_for(plain.reader.read(), 10) == b""
            plain.writer.close()

    asyncio.run(main())

"""Clients of an OpenAI server, in a process of their own: each streams one text after the other over one connection.

    python bench/streaming_clients.py < plan.json    # one answer a line

A line of the input is {"port", "clients", "bodies"}: bodies of ``POST /v1/completions``, which the clients take from
one queue. Its line of the output is {"seconds", "cpu_seconds", "texts": [[seconds at which it was asked for,
tokens, [seconds at which each of its pieces came]], ...]}, in the order of the bodies.

While texts come, clients do nothing but look at the clock: what they do, the server could not.
"""

from __future__ import annotations

import asyncio
import json
import re
import sys
import time
from collections.abc import Iterator

EVENT = re.compile(rb"\ndata: ")  # in JSON, line feeds are escaped
SOME_TEXT = re.compile(rb'"text": "(?!")')
END = b"data: [DONE]\n\n\r\n0\r\n\r\n"  # the last event, and the end of the response


class Connection(asyncio.Protocol):
    """Asks for the next text when one has ended, until there are no more."""

    def __init__(self, requests: Iterator[tuple[int, bytes]], texts: list):
        self.ended = asyncio.get_running_loop().create_future()
        self._requests, self._texts = requests, texts

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._ask()

    def data_received(self, data: bytes) -> None:
        self._came.append((time.perf_counter(), data))
        if data.endswith(b"0\r\n\r\n") and b"".join(data for _, data in self._came[-3:]).endswith(END):
            self._texts[self._number] = (self._begun, self._came)
            self._ask()
        elif len(self._came) == 1 and not data.startswith(b"HTTP/1.1 200"):
            self.ended.set_exception(RuntimeError(data.decode()))

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.ended.done():
            self.ended.set_exception(exc or EOFError("the server closed the connection"))

    def _ask(self) -> None:
        number, request = next(self._requests, (None, b""))
        if number is None:
            self.ended.set_result(None)
            self._transport.close()
            return
        self._number, self._came, self._begun = number, list[tuple[float, bytes]](), time.perf_counter()
        self._transport.write(request)


def request(port: int, body: dict) -> bytes:
    data = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data


def read(came: list[tuple[float, bytes]]) -> tuple[int, list[float]]:
    """How many tokens a response has, and when pieces of its text came."""
    tokens, times = 0, []
    for event in EVENT.split(b"".join(data for _, data in came))[1:-1]:
        usage = json.loads(event.partition(b"\n\n")[0]).get("usage")
        tokens = usage["completion_tokens"] if usage else tokens
    for when, data in came:
        if SOME_TEXT.search(data):
            times.append(when)
    return tokens, times


async def run(port: int, clients: int, bodies: list[dict]) -> dict:
    requests = enumerate([request(port, body) for body in bodies])
    texts: list = [None] * len(bodies)
    loop = asyncio.get_running_loop()
    begun, cpu = time.perf_counter(), time.process_time()
    made = [
        await loop.create_connection(lambda: Connection(requests, texts), "127.0.0.1", port) for _ in range(clients)
    ]
    await asyncio.gather(*(connection.ended for _, connection in made))
    ended, cpu = time.perf_counter(), time.process_time() - cpu
    answered = []
    for asked, came in texts:
        tokens, times = read(came)
        answered.append([asked - begun, tokens, [when - begun for when in times]])
    return {"seconds": ended - begun, "cpu_seconds": cpu, "texts": answered}


if __name__ == "__main__":
    for line in sys.stdin:
        print(json.dumps(asyncio.run(run(**json.loads(line)))), flush=True)

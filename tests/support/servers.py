"""Servers in the test's own event loop, and clients that say exactly what a test wants said."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI
from specdec import Scheduler
from specdec.serving.server.lanes import Lanes
from specdec.serving.server.life_cycle import Server
from specdec.serving.server.server_settings import ServerSettings, bind
from specdec.serving.server.service import Service

JSON = b"Content-Type: application/json\r\n"


def no_scheduler(drafter: str, rule: str) -> Scheduler:
    raise AssertionError("this test decodes nothing")


def service(make: Callable[[str, str], Scheduler] = no_scheduler, tokenizer: Any = None, **settings: Any) -> Service:
    return Service("tiny", tokenizer, Lanes(make, ["model"], ["coupled"]), ServerSettings(port=0, **settings))


@asynccontextmanager
async def serving(
    served: Service, routes: Callable[[FastAPI], None] = lambda app: None
) -> AsyncIterator[tuple[Server, int]]:
    """Yields a server and its port. ``routes`` may add some that behave in ways a test needs."""
    bound, started = bind(served.settings), asyncio.Event()
    server = Server(served, bound, started.set)
    routes(server.config.app)
    running = asyncio.create_task(server.run_until_signal())
    await started.wait()
    try:
        yield server, bound.getsockname()[1]
    finally:
        server.stop()
        await asyncio.wait_for(running, 10)
        bound.close()


class Client:
    """A connection on which bytes are sent as they are."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter):
        self.reader, self.writer = reader, writer

    @classmethod
    async def connect(cls, port: int, receive_buffer: int | None = None) -> Client:
        sock = socket.socket()
        if receive_buffer is not None:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        sock.setblocking(False)
        await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", port))
        return cls(*await asyncio.open_connection(sock=sock, limit=1024))

    async def send(self, *parts: bytes, pause: float = 0.0) -> None:
        """Ends early, without an error, if the server closes the connection."""
        for part in parts:
            try:
                self.writer.write(part)
                await self.writer.drain()
            except ConnectionError:
                return
            await asyncio.sleep(pause)

    async def rest(self, seconds: float = 5.0) -> bytes:
        """All that comes until the server closes the connection."""
        found = bytearray()
        try:
            async with asyncio.timeout(seconds):
                while data := await self.reader.read(65536):
                    found += data
        except ConnectionResetError:
            pass
        return bytes(found)

    def leave(self) -> None:
        self.writer.transport.abort()


def request(path: str, more: bytes = b"", body: bytes = b"", method: str = "GET", version: str = "1.1") -> bytes:
    host = b"Host: localhost\r\n" if version == "1.1" else b""
    return f"{method} {path} HTTP/{version}\r\n".encode() + host + more + b"\r\n" + body


async def ask(port: int, *parts: bytes, pause: float = 0.0) -> bytes:
    """Sends the parts on a connection of their own, and returns all that comes until the server closes it."""
    client = await Client.connect(port)
    sending = asyncio.create_task(client.send(*parts, pause=pause))
    answer = await client.rest()
    await sending
    client.leave()
    return answer


def status_of(answer: bytes) -> int:
    return int(answer.split(b" ", 2)[1]) if answer else 0

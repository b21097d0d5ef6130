"""A client that sends what it is told to, and may leave at any byte."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
from typing import Any, NamedTuple


class Answer(NamedTuple):
    status: int
    body: bytes


class Client:
    """A connection for one request to /v1/completions."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter):
        self._reader, self._writer = reader, writer

    @classmethod
    async def connect(cls, port: int) -> Client:
        return cls(*await asyncio.open_connection("127.0.0.1", port))

    @staticmethod
    def request(body: dict[str, Any]) -> bytes:
        content = json.dumps(body).encode()
        head = f"Host: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(content)}\r\n"
        return f"POST /v1/completions HTTP/1.1\r\n{head}Connection: close\r\n\r\n".encode() + content

    async def send(self, data: bytes) -> None:
        self._writer.write(data)
        await self._writer.drain()

    async def read(self, count: int) -> bytes:
        """Reads so many bytes, or all."""
        try:
            return await self._reader.readexactly(count)
        except asyncio.IncompleteReadError as error:
            return error.partial

    async def answer(self) -> Answer:
        """Reads to the end. The server closes the connection after one answer."""
        head, _, body = (await self._reader.read()).partition(b"\r\n\r\n")
        if b"transfer-encoding: chunked" in head.lower():
            body = _joined(body)
        return Answer(int(head.split()[1]) if head else 0, body)

    def leave(self, at_once: bool = False) -> None:
        """Closes the connection.

        Args:
            at_once: with a reset, as when a process dies.
        """
        if at_once:
            linger = struct.pack("ii", 1, 0)
            self._writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            self._writer.transport.abort()
        else:
            self._writer.close()


async def post(port: int, body: dict[str, Any]) -> Answer:
    client = await Client.connect(port)
    try:
        await client.send(client.request(body))
        return await client.answer()
    finally:
        client.leave()


def texts_of(answer: Answer) -> dict[int, str]:
    """The text of each choice, streamed or not. Fails if it is not a whole answer."""
    assert answer.status == 200, answer
    if not answer.body.startswith(b"data: "):
        return {choice["index"]: choice["text"] for choice in json.loads(answer.body)["choices"]}
    *events, done, rest = answer.body.decode().split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    texts: dict[int, str] = {}
    for event in events:
        for choice in json.loads(event.removeprefix("data: "))["choices"]:
            texts[choice["index"]] = texts.get(choice["index"], "") + choice["text"]
    return texts


def _joined(chunks: bytes) -> bytes:
    body = b""
    while chunks:
        size, _, rest = chunks.partition(b"\r\n")
        length = int(size, 16)
        body, chunks = body + rest[:length], rest[length + 2 :] if length else b""
    return body

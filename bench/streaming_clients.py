"""Clients of an OpenAI server, in a process of their own: each streams one text after the other over one connection.

    python bench/streaming_clients.py < plan.json    # one answer a line

A line of the input is {"port", "clients", "bodies"}: bodies of ``POST /v1/completions``, which the clients take from
one queue. Its line of the output is {"seconds", "cpu_seconds", "texts": [[seconds at which it was asked for,
tokens, [seconds at which each of its pieces came]], ...]}, in the order of the bodies.

While texts come, clients do nothing but look at the clock: what they do, the server could not.
"""

from __future__ import annotations

import json
import re
import select
import socket
import sys
import time
from collections.abc import Iterator

EVENT = re.compile(rb"\ndata: ")  # in JSON, line feeds are escaped
SOME_TEXT = re.compile(rb'"text": "(?!")')
SECONDS = 60.0  # without a byte, after which something is wrong
END = b"data: [DONE]\n\n\r\n0\r\n\r\n"  # the last event, and the end of the response


class Connection:
    """Asks for the next text when one has ended, until there are no more."""

    def __init__(self, port: int, requests: Iterator[tuple[int, bytes]], texts: list):
        self.socket = socket.create_connection(("127.0.0.1", port))
        self._requests, self._texts = requests, texts

    def ask(self) -> bool:
        """Returns False if there is nothing left to ask for."""
        number, request = next(self._requests, (None, b""))
        if number is None:
            return False
        self._number, self._came, self._end, self._begun = number, list[tuple[float, bytes]](), b"", time.perf_counter()
        self.socket.sendall(request)
        return True

    def receive(self) -> bool:
        """Takes what has come. Returns whether the connection is needed any more."""
        data = self.socket.recv(65536)
        self._came.append((time.perf_counter(), data))
        if not data or len(self._came) == 1 and not data.startswith(b"HTTP/1.1 200"):
            raise RuntimeError(f"the server closed the connection, or said: {data.decode()}")
        self._end = (self._end + data)[-len(END) :]  # its parts may come in any lengths
        if self._end != END:
            return True
        self._texts[self._number] = (self._begun, self._came)
        return self.ask()


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


def run(port: int, clients: int, bodies: list[dict]) -> dict:
    requests = enumerate([request(port, body) for body in bodies])
    texts: list = [None] * len(bodies)
    made = [Connection(port, requests, texts) for _ in range(clients)]
    begun, cpu = time.perf_counter(), time.process_time()
    with select.epoll() as poll:
        asking = {connection.socket.fileno(): connection for connection in made if connection.ask()}
        for number in asking:
            poll.register(number, select.EPOLLIN)
        while asking:
            if not (ready := poll.poll(SECONDS)):
                raise TimeoutError(f"nothing came for {SECONDS:g} s, of {len(asking)} texts")
            for number, _ in ready:
                if not asking[number].receive():
                    poll.unregister(number)
                    del asking[number]
    ended, cpu = time.perf_counter(), time.process_time() - cpu
    for connection in made:
        connection.socket.close()
    answered = []
    for asked, came in texts:
        tokens, times = read(came)
        answered.append([asked - begun, tokens, [when - begun for when in times]])
    return {"seconds": ended - begun, "cpu_seconds": cpu, "texts": answered}


if __name__ == "__main__":
    for line in sys.stdin:
        print(json.dumps(run(**json.loads(line))), flush=True)

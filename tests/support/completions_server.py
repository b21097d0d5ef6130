"""Small servers of OpenAI's ``/v1/completions`` and chats, on threads of the test's process."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from specdec import SpeculativeDecoder

from specdec_kernels import SamplingParams

AT_ONCE = 64  # seeds that are decoded together
Answers = Callable[[dict[str, Any]], tuple[int, Any]]  # a request's body -> status, and what is answered


def events(*told: Any) -> list[bytes]:
    """A stream of JSON, as an answer: its events, each in a write of its own."""
    return [f"data: {json.dumps(each)}\n\n".encode() for each in told] + [b"data: [DONE]\n\n"]


@contextmanager
def completions_server(answers: Answers, metrics: Callable[[], str] | None = None) -> Iterator[str]:
    """Yields its address. An answer that is bytes is sent as it is, and the connection is cut; a list is a stream of
    such. ``metrics`` stand at /metrics."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path == "/metrics":
                self._stream(404 if metrics is None else 200, [b"" if metrics is None else metrics().encode()])
            else:
                self._send(200, {"data": [{"id": "toy"}]})

        def do_POST(self) -> None:
            status, told = answers(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            (self._stream if isinstance(told, list) else self._send)(status, told)

        def _stream(self, status: int, parts: list[bytes]) -> None:
            self.send_response(status)
            self.end_headers()
            for part in parts:
                self.wfile.write(part)

        def _send(self, status: int, told: Any) -> None:
            data = told if isinstance(told, bytes) else json.dumps(told).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data) + isinstance(told, bytes)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *said: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads, server.request_queue_size = True, 64
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class DecoderAnswers:
    """Answers with the texts of a decoder, as vLLM tells them: with the ids of their tokens.

    Args:
        decoder: whose rule is ``token``.
        tokenizer: for texts; only ids are read.
    """

    def __init__(self, decoder: SpeculativeDecoder, tokenizer: Any):
        self.decoder, self.tokenizer = decoder, tokenizer
        self.bodies: list[dict[str, Any]] = []
        self._lock, self._decoded = threading.Lock(), dict[tuple, list[list[int]]]()

    def __call__(self, body: dict[str, Any]) -> tuple[int, Any]:
        with self._lock:
            self.bodies.append(body)
            tokens = self._tokens(body)
        reason = "length" if len(tokens) == body["max_tokens"] else "stop"
        choice = {"text": self.tokenizer.decode(tokens), "finish_reason": reason}
        if body.get("return_token_ids"):
            choice["token_ids"] = tokens
        usage = {"prompt_tokens": len(body["prompt"]), "completion_tokens": len(tokens)}
        return 200, {"choices": [choice], "usage": usage}

    def _tokens(self, body: dict[str, Any]) -> list[int]:
        block, place = divmod(body["seed"], AT_ONCE)
        key = (*body["prompt"], body["temperature"], body["max_tokens"], block)
        if key not in self._decoded:
            ends = [] if body.get("ignore_eos") else None
            self._decoded[key] = self.decoder.generate(
                [body["prompt"]] * AT_ONCE, None, body["max_tokens"], SamplingParams(body["temperature"]),
                range(block * AT_ONCE, (block + 1) * AT_ONCE), ends, rule="token",
            ).tokens  # fmt: skip
        return self._decoded[key][place]

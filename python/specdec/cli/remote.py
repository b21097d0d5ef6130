"""A client of servers with OpenAI's interface, over the standard library: models, and answers as they are streamed."""

from __future__ import annotations

import http.client
import json
import socket
from collections.abc import Generator, Iterator
from contextlib import closing, contextmanager
from typing import Any
from urllib.parse import urlsplit

CONNECT_SECONDS = 10.0
LONGEST = 2**24  # bytes of an event, or of the list of models


class RemoteError(ValueError):
    """The server did not do what was asked; the message says why, and what may help."""


class Remote:
    """A server. Every request has a connection of its own, which is closed when the answer is no longer read: the
    server then stops decoding it.

    Args:
        url: up to and with /v1, http or https.
        api_key: sent as ``Authorization: Bearer``; None: not sent.

    Raises:
        RemoteError: the URL is not of that form.
    """

    def __init__(self, url: str, api_key: str | None = None):
        parts = urlsplit(url.rstrip("/"))
        try:
            fine = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        except ValueError:  # the port is no number
            fine = False
        if not fine or parts.query or parts.fragment or parts.username:
            raise RemoteError(f"got {url!r}, allowed: a URL such as http://127.0.0.1:8000/v1")
        self.url, self._parts = parts.geturl(), parts
        self._headers = {"Content-Type": "application/json", "Accept": "text/event-stream, application/json"}
        if api_key is not None:
            if not api_key.isascii() or not api_key.isprintable() or not api_key:
                raise RemoteError("got an API key with other characters, allowed: visible ASCII characters")
            self._headers["Authorization"] = f"Bearer {api_key}"

    def models(self) -> list[dict[str, Any]]:
        """The models that it serves, at least one. Raises RemoteError."""
        with self._asked("GET", "/models") as answer:
            models = self._json(self._read(answer), answer).get("data")
        if not isinstance(models, list) or not models or not all(isinstance(m, dict) and "id" in m for m in models):
            raise RemoteError(f"{self.url}/models lists no models, so this is no server with OpenAI's interface")
        return models

    def specdec(self) -> dict[str, Any] | None:
        """What a server of specdec lets requests choose; None: it is another one."""
        try:
            with self._asked("GET", "/specdec") as answer:
                return self._json(self._read(answer), answer)
        except RemoteError:
            return None

    def stream(self, path: str, body: dict[str, Any]) -> Generator[dict[str, Any], None, None]:
        """Iterates over the chunks of an answer as they come. Raises RemoteError."""
        with self._asked("POST", path, {**body, "stream": True}) as answer:
            kind = answer.getheader("Content-Type", "")
            if not kind.startswith("text/event-stream"):
                raise RemoteError(f"{self.url}{path} answered with {kind or 'no content type'}, not with a stream")
            while (line := self._read(answer, line=True)).strip() != b"data: [DONE]":
                if not line:
                    raise RemoteError("the connection ended before the answer did")
                if line.startswith(b"data:"):
                    chunk = self._json(line[len(b"data:") :], answer)
                    if chunk.get("error"):
                        raise RemoteError(_message(chunk, "the server failed"))
                    yield chunk

    @contextmanager
    def _asked(self, method: str, path: str, body: dict[str, Any] | None = None) -> Iterator[http.client.HTTPResponse]:
        """The answer to a request, on a connection that is closed after the block."""
        parts = self._parts
        kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        with closing(kind(parts.hostname or "", parts.port, timeout=CONNECT_SECONDS)) as connection:
            try:
                connection.connect()
            except ConnectionRefusedError as error:
                told = f"nothing listens at {self.url}; a server is started with: specdec serve"
                raise RemoteError(told) from error
            except socket.gaierror as error:
                raise RemoteError(f"there is no host {parts.hostname!r}") from error
            except OSError as error:  # TLS's among them
                raise RemoteError(f"no connection to {self.url}: {error}") from error
            if body is not None:
                connection.sock.settimeout(None)  # an answer may wait for other requests; Ctrl-C ends it
            try:
                sent = None if body is None else json.dumps(body).encode()
                connection.request(method, parts.path + path, sent, self._headers)
                answer = connection.getresponse()
            except (OSError, http.client.HTTPException) as error:
                told = f"{self.url} does not answer as an HTTP server: {error or type(error).__name__}"
                raise RemoteError(told) from error
            if answer.status != 200:
                raise self._refused(answer, path)
            yield answer

    def _refused(self, answer: http.client.HTTPResponse, path: str) -> RemoteError:
        try:
            told = _message(self._json(self._read(answer), answer), answer.reason)
        except RemoteError:  # a proxy's page, perhaps
            told = answer.reason
        help = {
            401: "; give its API key with --api-key or SPECDEC_API_KEY",
            404: "; the URL of OpenAI's interface mostly ends with /v1",
            429: f"; try again in {answer.getheader('Retry-After', 'a few')} seconds",
        }
        return RemoteError(f"{self.url}{path} answered {answer.status}: {told}{help.get(answer.status, '')}")

    def _read(self, answer: http.client.HTTPResponse, line: bool = False) -> bytes:
        try:
            return answer.readline(LONGEST) if line else answer.read(LONGEST)
        except (OSError, http.client.HTTPException) as error:
            raise RemoteError("the connection ended before the answer did") from error

    def _json(self, data: bytes, answer: http.client.HTTPResponse) -> dict[str, Any]:
        try:
            told = json.loads(data)
        except ValueError:
            told = None
        if not isinstance(told, dict):
            kind = answer.getheader("Content-Type", "no content type")
            raise RemoteError(f"{self.url} answered {kind} that is no JSON object: no server with OpenAI's interface")
        return told


def _message(told: dict[str, Any], otherwise: str) -> str:
    """Of OpenAI's error object."""
    error = told.get("error")
    message = error.get("message") if isinstance(error, dict) else error
    return message if isinstance(message, str) else otherwise

"""Somebody's server with OpenAI's interface, asked by HTTP: JSON, streams of it, and what stands beside ``/v1``."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPException, HTTPResponse
from typing import Any
from urllib.parse import urlsplit

from ..checks import one_line, refuse


class ServerError(ValueError):
    """A request was not answered. ``status`` is None where there was no answer at all."""

    def __init__(self, url: str, what: str, status: int | None = None):
        super().__init__(f"url: {url}: {what}")
        self.status = status


class ServerConnection:
    """
    Args:
        url: of the server, with or without ``/v1``.
        key: for the header Authorization; None: none is sent.
        model: its name; None: the first one that ``/v1/models`` lists.
        timeout: seconds that one answer, or the next part of a stream, may take.

    Attributes:
        url: with ``/v1``.

    Raises:
        ValueError: names ``url``: it is no http address.
        ServerError: nothing answers there, or no model is listed.
    """

    def __init__(self, url: str, key: str | None = None, model: str | None = None, timeout: float = 300.0):
        if urlsplit(url).scheme not in ("http", "https") or not urlsplit(url).netloc:
            refuse("url", repr(url), "the address of a server, such as http://127.0.0.1:8000")
        self.url = url.rstrip("/").removesuffix("/v1") + "/v1"
        self._key, self._timeout = key, timeout
        self.model = model or self._first_model()

    def ask(self, path: str, body: dict[str, Any] | None = None) -> Any:
        """The JSON of an answer; with a body the request is a POST. Raises ServerError."""
        with self._opened(self.url, path, body) as answer:
            return json.loads(answer.read())

    def stream(self, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """The server-sent events of an answer, each a JSON object, as they come. Raises ServerError, also for an event
        that is an error, and for a stream that ends without ``[DONE]``."""
        with self._opened(self.url, path, body) as answer:
            for line in answer:
                name, _, data = line.decode().strip().partition(":")
                if name != "data":
                    continue
                if data.strip() == "[DONE]":
                    return
                event = json.loads(data)
                if not isinstance(event, dict) or "error" in event:
                    raise ServerError(self.url, f"answers {path} with {one_line(event, 200)}")
                yield event
        raise ServerError(self.url, f"ends the stream of {path} without [DONE]")

    def text(self, path: str) -> str:
        """What stands at a path beside ``/v1``. Raises ServerError."""
        with self._opened(self.url.removesuffix("/v1"), path) as answer:
            return answer.read().decode()

    def _first_model(self) -> str:
        try:
            return str(self.ask("/models")["data"][0]["id"])
        except (IndexError, KeyError, TypeError):
            raise ServerError(self.url, "lists no model; name one (--model)") from None

    @contextmanager
    def _opened(self, base: str, path: str, body: dict[str, Any] | None = None) -> Iterator[HTTPResponse]:
        """Errors of the block, which reads the answer, are the server's as well."""
        headers = {"Content-Type": "application/json"}
        if self._key is not None:
            headers["Authorization"] = f"Bearer {self._key}"
        data = None if body is None else json.dumps(body).encode()
        try:
            with urllib.request.urlopen(urllib.request.Request(base + path, data, headers), timeout=self._timeout) as r:
                yield r
        except urllib.error.HTTPError as error:
            said = one_line(error.read().decode(errors="replace"), 200)
            raise ServerError(self.url, f"answers {error.code} to {path}: {said}", error.code) from None
        except ServerError:
            raise
        except TimeoutError:
            raise ServerError(self.url, f"has not answered {path} for {self._timeout:g} s") from None
        except (OSError, HTTPException, ValueError) as error:  # refused, reset, cut off, or no JSON
            raise ServerError(self.url, f"{type(error).__name__}: {one_line(error)}") from None

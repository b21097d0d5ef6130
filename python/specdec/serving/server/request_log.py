"""Every request has an id, a line in the log and a place in the metrics, and an error in a route is told without its
details."""

from __future__ import annotations

import logging
import re
import time
import uuid
from collections.abc import Callable, Sequence
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.routing import Match, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .errors import ApiError
from .logs import trace
from .metrics import NO_ROUTE

log = logging.getLogger(__name__)
_SANE = re.compile(r"[A-Za-z0-9._-]{1,128}")
_PROBES = ("/health", "/ready", "/metrics")
_HEADERS = {"X-Content-Type-Options": "nosniff", "X-Frame-Options": "DENY", "Referrer-Policy": "no-referrer"}
# Of what is no page: nothing of it is ever run or shown in a frame. The page's route has a policy of its own.
_POLICY = "default-src 'none'; frame-ancestors 'none'"


class RequestLog:
    """Gives each request an id, that of its ``X-Request-Id`` or a new one, and logs and counts how it was answered.
    Where an error answered it, the line has the error's code and the peer's address, which may be a proxy's.

    ``request.state.request_id`` is the id. What a route puts into ``request.state.log``, a dictionary, is logged with
    it; texts and prompts do not belong there.

    Args:
        routes: of the application.
        answered: is told the route and the status of each answer.
        shared: whether pages of other sites may read answers.
    """

    def __init__(
        self, app: ASGIApp, routes: Sequence[Route], answered: Callable[[str, int], None], shared: bool = False
    ):
        self.app, self._routes, self._answered = app, routes, answered
        self._headers = _HEADERS if shared else _HEADERS | {"Cross-Origin-Resource-Policy": "same-origin"}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        given, began = Headers(scope=scope).get("x-request-id", ""), time.perf_counter()
        request_id = given if _SANE.fullmatch(given) else f"req-{uuid.uuid4().hex}"
        more: dict[str, Any] = {}
        scope.setdefault("state", {}).update(request_id=request_id, log=more)
        status, complete = None, False

        async def answer(message: Message) -> None:
            nonlocal status, complete
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = MutableHeaders(scope=message)
                headers["X-Request-Id"] = request_id
                for name, value in self._headers.items():
                    headers.setdefault(name, value)
                headers.setdefault("Content-Security-Policy", _POLICY)
            complete |= message["type"] == "http.response.body" and not message.get("more_body", False)
            await send(message)

        try:
            await self.app(scope, receive, answer)
        finally:
            if status is not None:
                self._answered(self._route(scope), status)
                more |= {"peer": peer(scope.get("client"))} if status >= 400 else {}
            facts: dict[str, Any] = {"request_id": request_id, "method": scope["method"], "path": scope["path"][:200]}
            facts |= {"status": status, "seconds": round(time.perf_counter() - began, 4)}
            facts |= {} if complete else {"complete": False}  # the client has left, or the answer failed half-way
            refused = status is not None and 400 <= status < 500
            level = logging.DEBUG if scope["path"] in _PROBES and not refused else logging.INFO
            log.log(logging.ERROR if status == 500 else level, "request", extra={"facts": facts | more})

    def _route(self, scope: Scope) -> str:
        """The route that a path belongs to, whoever answered: ``/v1/models/{name}``. Paths themselves have no end."""
        found = (route.path_format for route in self._routes if route.matches(scope)[0] is not Match.NONE)
        return next(found, NO_ROUTE)


def peer(client: Sequence | None) -> str | None:
    """The address of the other end of a connection, as ASGI and uvicorn have it: host and port."""
    if client is None:
        return None
    host, port = client[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


class Failures:
    """Answers an error that no route expects with status 500 and the request's id. Its trace goes to the log."""

    def __init__(self, app: ASGIApp):
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = False

        async def watched(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        try:
            await self.app(scope, receive, watched)
        except Exception as error:
            if scope["type"] != "http":
                raise
            request_id = scope["state"]["request_id"]
            log.error("a request failed", extra={"facts": {"request_id": request_id, "trace": trace(error)}})
            if not started:  # otherwise a stream has told it, or the connection is closed before the end of the answer
                await ApiError.unexpected(request_id).response(scope)(scope, receive, send)

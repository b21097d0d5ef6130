"""What a request must be before a route sees it, and how many of them an owner may send in a minute."""

from __future__ import annotations

import asyncio
import codecs
import hashlib
import hmac
import math
import time
from collections import deque

from starlette.datastructures import Headers
from starlette.routing import Match
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .errors import ApiError
from .json_body import check_json
from .service import Service

WITHOUT_KEY = ("/", "/health", "/ready")  # GET and HEAD; the page itself holds nothing secret
WHILE_DRAINING = ("/health", "/ready", "/metrics")
LOOPBACK_NAMES = ("localhost", "127.0.0.1", "[::1]")
EVERYONE = "everyone"  # the owner of what is decoded where there are no keys


class Guards:
    """Checks a request's host, size, key, rate and body, in this order; what is refused is answered here, as OpenAI's
    error. A body is read here as a whole, so a route never waits for a client.

    ``request.state.owner`` is then a name of who asks, which is made from the key and does not reveal it.
    """

    def __init__(self, app: ASGIApp, service: Service, on_loopback: bool):
        self.app, self.service, self.settings = app, service, service.settings
        self._keys = {digest(key): "key-" + digest(f"owner of {key}").hex()[:12] for key in self.settings.api_keys}
        most, host = self.settings.requests_per_minute, self.settings.host
        self._rate = None if most is None else RateLimit(most)
        names = (*LOOPBACK_NAMES, f"[{host}]" if ":" in host else host, *self.settings.allowed_hosts)
        self._hosts = {name.lower() for name in names} if on_loopback else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        headers = Headers(scope=scope)
        try:
            self._check_host(headers)
            self._check_head(scope)
            self._check_key(scope, headers)
            self._check_phase(scope)
            self._check_rate(scope)
            if (body := await self._read_body(scope, headers, receive)) is None:
                return  # the client has left
        except ApiError as error:
            return await error.response(scope)(scope, receive, send)
        await serve_while_connected(self.app, body, scope, receive, send)

    def _check_host(self, headers: Headers) -> None:
        """A page of another site whose name its owner had resolve to the loopback interface sends that name."""
        given = headers.get("host")
        if given is None or self._hosts is None:  # HTTP/1.0 may have none; browsers always send it
            return
        name, _, port = given.rpartition(":")
        if (name if name and port.isdigit() else given).lower() not in self._hosts:
            raise ApiError(403, f"Host: got another name than {', '.join(sorted(self._hosts))}", "unknown_host")

    def _check_head(self, scope: Scope) -> None:
        size = len(scope.get("raw_path") or b"") + len(scope["query_string"])
        size += sum(len(name) + len(value) + 4 for name, value in scope["headers"])
        if size > self.settings.max_header_bytes:
            allowed = f"allowed: {self.settings.max_header_bytes} bytes"
            raise ApiError(431, f"the request's head: got {size} bytes, {allowed}", "headers_too_large")

    def _check_key(self, scope: Scope, headers: Headers) -> None:
        owner: str | None = EVERYONE
        if self._keys and not (scope["path"] in WITHOUT_KEY and scope["method"] in ("GET", "HEAD")):
            given = headers.getlist("authorization")
            scheme, _, key = (given[0] if len(given) == 1 else "").partition(" ")
            if scheme.lower() != "bearer" or (owner := self._owner_of(key.strip())) is None:
                told = "Authorization: allowed is 'Bearer KEY' with a key of this server"
                raise ApiError(401, told, "invalid_api_key", headers={"WWW-Authenticate": "Bearer"})
        scope.setdefault("state", {})["owner"] = owner

    def _owner_of(self, key: str) -> str | None:
        """Takes the same time for every key of a length, right or wrong."""
        given, found = digest(key), None
        for known, owner in self._keys.items():
            if hmac.compare_digest(known, given):
                found = owner
        return found

    def _check_phase(self, scope: Scope) -> None:
        if self.service.draining.is_set() and scope["path"] not in WHILE_DRAINING:
            told = {"Retry-After": "5", "Connection": "close"}
            raise ApiError(503, "the server is shutting down", "shutting_down", headers=told)

    def _check_rate(self, scope: Scope) -> None:
        """Of what costs time: other methods than POST decode nothing."""
        if self._rate is None or scope["method"] != "POST":
            return
        if (seconds := self._rate.wait(scope["state"]["owner"], time.monotonic())) > 0:
            self.service.metrics.over_rate += 1
            told = f"more than {self.settings.requests_per_minute} requests in a minute"
            raise ApiError(429, told, "rate_limit_exceeded", headers={"Retry-After": str(math.ceil(seconds))})

    async def _read_body(self, scope: Scope, headers: Headers, receive: Receive) -> bytes | None:
        """Returns the body; None: the client has left."""
        length = headers.get("content-length", "0")
        if not length.isdecimal() or int(length) > self.settings.max_body_bytes:
            raise self._too_large(length)
        posted = scope["method"] == "POST" and ("transfer-encoding" in headers or length != "0")
        posted = posted and taken(scope)  # what no route takes is answered 404 or 405, whatever its body is
        kind = headers.get("content-type", "").partition(";")[0].strip().lower()
        is_json = kind == "application/json" and headers.get("content-encoding", "identity") == "identity"
        if posted and not is_json:  # browsers let pages of other sites send other types unasked
            told = f"Content-Type: got {kind[:100]!r}, allowed: application/json, not compressed"
            raise ApiError(415, told, "unsupported_media_type")
        body = bytearray()
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            body += message.get("body", b"")
            if len(body) > self.settings.max_body_bytes:
                raise self._too_large(f"more than {self.settings.max_body_bytes}")
            if not message.get("more_body", False):
                break
        whole = bytes(body).removeprefix(codecs.BOM_UTF8)  # which some clients send, on Windows
        if posted:
            check_json(whole)
        return whole

    def _too_large(self, given: str) -> ApiError:
        told = f"the body: got {given[:20]} bytes, allowed: {self.settings.max_body_bytes}"
        return ApiError(413, told, "body_too_large")


def taken(scope: Scope) -> bool:
    """Whether a route takes the path with this method."""
    return any(route.matches(scope)[0] is Match.FULL for route in scope["app"].routes)


def digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("latin-1", "replace")).digest()


async def serve_while_connected(app: ASGIApp, body: bytes, scope: Scope, receive: Receive, send: Send) -> None:
    """Calls ``app`` with a request whose body has been read. If the client leaves before the response is complete, what
    ``app`` waits for is cancelled, and so is the text that it decodes."""
    unread: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]
    complete = False
    leaving = asyncio.ensure_future(receive())

    async def receive_read() -> Message:
        return unread.pop() if unread else await asyncio.shield(leaving)

    async def send_watched(message: Message) -> None:
        nonlocal complete
        complete |= message["type"] == "http.response.body" and not message.get("more_body", False)
        await send(message)
        await asyncio.sleep(0)  # ``send`` itself need not wait, so a long response would keep others from being served

    serving = asyncio.ensure_future(app(scope, receive_read, send_watched))
    try:
        await asyncio.wait((serving, leaving), return_when=asyncio.FIRST_COMPLETED)
        if complete:  # which a server tells in the same way as a client that leaves
            await serving
    finally:
        leaving.cancel()
        if not serving.done():
            serving.cancel()
        await asyncio.wait((serving,))
    if not serving.cancelled():
        serving.result()


MINUTE = 60.0  # seconds


class RateLimit:
    """Admits at most ``most`` requests of each owner in any minute. What was refused does not count.

    Args:
        most: >= 1.
    """

    def __init__(self, most: int):
        self._most = most
        self._admitted: dict[str, deque[float]] = {}  # when the newest were; as many owners as there are keys

    def wait(self, owner: str, now: float) -> float:
        """Returns after how many seconds the next request of ``owner`` is admitted. 0: this one is."""
        times = self._admitted.setdefault(owner, deque(maxlen=self._most))
        if len(times) == self._most and (left := times[0] + MINUTE - now) > 0:
            return left
        times.append(now)
        return 0.0

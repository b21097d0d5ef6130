"""A connection that a client cannot hold for long by being slow. uvicorn has no such limits of its own."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import sys
from functools import partial
from typing import Any, ClassVar, cast

import h11
from uvicorn.protocols.http.h11_impl import STATUS_PHRASES, H11Protocol, RequestResponseCycle

from .errors import ApiError
from .events import PIECE
from .metrics import NO_ROUTE, Metrics
from .request_log import peer
from .server_settings import ServerSettings

SEND_BUFFER = 131_072  # bytes that the system holds of a response
log = logging.getLogger(__name__)
FORGOTTEN_BODIES = 4  # how much of a refused body is read, in times of the largest that is allowed


class TimedConnection(H11Protocol):
    """HTTP/1.0 and 1.1, with the time limits of ``ServerSettings``:

    - the head of a request is there ``header_seconds`` after its first byte, or after the connection was opened;
    - its body ``body_seconds`` after the head; that of a request which was refused is read, too, and forgotten, since a
      client that is still sending could not read the answer otherwise;
    - what is sent is taken within ``write_seconds``, otherwise the connection is aborted and the request cancelled.

    Beyond ``max_connections``, a connection is answered 503 and closed.
    """

    limits: ClassVar[ServerSettings]
    metrics: ClassVar[Metrics]

    _reading: asyncio.TimerHandle | None = None
    _writing: asyncio.TimerHandle | None = None
    _phase: tuple | None = None  # what ``_reading`` waits for
    _forgotten = 0  # bytes of a refused request's body

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        # So that a response waits for its client after each message. With 0, asyncio's TLS would wait for ever.
        transport.set_write_buffer_limits(high=1)
        # The system would hold megabytes of each, and wake a waiting writer only when a third of them is gone.
        transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER)
        if len(self.connections) > self.limits.max_connections:
            told = f"connections: {self.limits.max_connections} are open, which are all that are allowed"
            self._refuse(ApiError(503, told, "too_many_connections", headers={"Retry-After": "1"}))
        else:
            self._watch_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self._reading, self._writing):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        if self.conn.our_state is h11.DONE and self.conn.their_state is h11.SEND_BODY:
            self._forgotten += len(data)
            if self._forgotten > FORGOTTEN_BODIES * self.limits.max_body_bytes:
                self.transport.close()
                return
        super().data_received(data)
        self._watch_reading()

    def on_response_complete(self) -> None:
        self.cycle.scope["extensions"].pop(PIECE, None)  # it refers to the cycle
        super().on_response_complete()
        self._watch_reading()

    def handle_events(self) -> None:
        super().handle_events()
        if self.cycle is not None:
            extensions = cast(dict[str, Any], self.cycle.scope.setdefault("extensions", {}))
            extensions[PIECE] = partial(self._send_piece, self.cycle)
        waiting = self.conn.their_state is h11.DONE  # for its response; other requests may have come after it
        if waiting and len(self.conn.trailing_data[0]) <= self.limits.max_header_bytes:
            self.flow.resume_reading()  # or nobody would notice that the client leaves

    def send_400_response(self, msg: str) -> None:
        """Called where what was received is not HTTP, or a head is too large."""
        error = sys.exception()
        status = error.error_status_hint if isinstance(error, h11.RemoteProtocolError) else 400
        told = f"the request's head: allowed are {self.limits.max_header_bytes} bytes" if status == 431 else msg
        self._refuse(ApiError(status, told, "headers_too_large" if status == 431 else "invalid_http"))

    def shutdown(self) -> None:
        if self.cycle is None or self.cycle.response_complete:
            self.transport.close()
        else:
            self.cycle.keep_alive = False

    async def _send_piece(self, cycle: RequestResponseCycle, data: bytes) -> None:
        """Sends a part of a body, as ``cycle.send`` does."""
        if self.flow.write_paused and not cycle.disconnected:
            await self.flow.drain()
        if cycle.disconnected:
            await asyncio.sleep(0)  # or who writes on and on would never be cancelled, and nobody else served
            return
        version = self.conn.their_http_version
        chunked = version is not None and version >= b"1.1"
        self.transport.write(b"%x\r\n%b\r\n" % (len(data), data) if chunked else data)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._writing = self.loop.call_later(self.limits.write_seconds, self._drop_slow_reader)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._writing is not None:
            self._writing.cancel()

    def _watch_reading(self) -> None:
        """Starts the clock of what the client is to send now, once for each head and each body."""
        state, seconds = self.conn.their_state, None
        if state is h11.SEND_BODY:
            seconds = self.limits.body_seconds
        elif state is h11.IDLE and (self.cycle is None or self.conn.trailing_data[0]):
            seconds = self.limits.header_seconds
        phase = None if seconds is None else (state, self.cycle)
        if phase == self._phase:
            return
        if self._reading is not None:
            self._reading.cancel()
        self._phase, self._forgotten = phase, 0
        self._reading = None if seconds is None else self.loop.call_later(seconds, self._drop_slow_writer)

    def _drop_slow_writer(self) -> None:
        if self.conn.their_state is h11.IDLE and not self.conn.trailing_data[0]:
            self.transport.close()  # nothing was asked
        else:
            self._refuse(ApiError(408, "the request did not arrive in time", "timeout"))

    def _drop_slow_reader(self) -> None:
        facts = {"reason": "its client did not read", "peer": peer(self.client)}
        log.info("connection aborted", extra={"facts": facts})
        self.transport.abort()

    def _refuse(self, error: ApiError) -> None:
        """Answers, if no other answer has begun, and closes the connection. The request, if there is one, is cancelled
        like that of a client that has left."""
        facts = {"status": error.status, "reason": error.message, "code": error.code, "peer": peer(self.client)}
        log.info("connection closed", extra={"facts": facts})
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            self.metrics.answered(NO_ROUTE, error.status)
            body = json.dumps(error.body).encode()
            headers = {"Content-Type": "application/json", "Content-Length": str(len(body)), "Connection": "close"}
            sent = [*(headers | (error.headers or {})).items()]
            head = h11.Response(status_code=error.status, headers=sent, reason=STATUS_PHRASES[error.status])
            for event in (head, h11.Data(data=body), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

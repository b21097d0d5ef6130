"""Server-sent events."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

Write = Callable[[str], Awaitable[None]]


class EventStream(Response):
    """A response of server-sent events, each of which is sent when it is written.

    Args:
        run: writes them, and returns after the last one.
        close: called at the end, however it came: after ``run``, or instead of it.
    """

    media_type = "text/event-stream"

    def __init__(self, run: Callable[[Write], Awaitable[None]], close: Callable[[], Awaitable[None]]):
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._run, self._close = run, close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def write(event: str) -> None:
            await send({"type": "http.response.body", "body": event.encode(), "more_body": True})

        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            await self._run(write)
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            await self._close()

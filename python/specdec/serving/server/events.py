"""Server-sent events."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable

from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from .errors import ApiError

Write = Callable[[str], Awaitable[None]]
# The name of an ASGI extension: an asynchronous function that sends a part of a body, between the start of a response
# and its end. On the way through all middleware, which has nothing to do with it, a part costs several times as much.
PIECE = "specdec.piece"


class EventStream(Response):
    """A response of server-sent events, each of which is sent when it is written. Where ``run`` raises, the last event
    is an error as OpenAI's interface has it, and what was raised is raised again once the response is complete.

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
        piece = (scope.get("extensions") or {}).get(PIECE)

        async def write(event: str) -> None:
            if event and piece is not None:
                await piece(event.encode())
            elif event:
                await send({"type": "http.response.body", "body": event.encode(), "more_body": True})

        end: Message = {"type": "http.response.body", "body": b"", "more_body": False}
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            try:
                await self._run(write)
            except Exception:
                await write(f"data: {json.dumps(ApiError.unexpected(scope['state']['request_id']).body)}\n\n")
                await send(end)
                raise
            await send(end)
        finally:
            await self._close()

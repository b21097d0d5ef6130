"""Responses that end when the client leaves."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

T = TypeVar("T")


async def unless_gone(receive: Receive, work: Coroutine[None, None, T]) -> T | None:
    """Returns the result of ``work``, or None if the client disconnects before; ``work`` is then cancelled."""
    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.wait((working, leaving))


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """Server-sent events.

    Args:
        run: is given what writes an event, and returns after the last one.
        close: called at the end, however it came.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        run: Callable[[Callable[[str], Awaitable[None]]], Coroutine[None, None, None]],
        close: Callable[[], Awaitable[None]],
    ):
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._run, self._close = run, close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def write(event: str) -> None:
            await send({"type": "http.response.body", "body": event.encode(), "more_body": True})

        async def stream() -> None:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            await self._run(write)
            await send({"type": "http.response.body", "body": b"", "more_body": False})

        try:
            await unless_gone(receive, stream())
        except OSError:  # the client left while something was sent
            pass
        finally:
            await self._close()

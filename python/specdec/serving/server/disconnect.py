"""A request whose client has left is cancelled, whatever its route waits for."""

from __future__ import annotations

import asyncio

from starlette.types import ASGIApp, Message, Receive, Scope, Send


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

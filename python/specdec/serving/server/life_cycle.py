"""How a server begins, drains and ends."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
from collections.abc import Callable
from types import FrameType

import uvicorn
from uvicorn.server import HANDLED_SIGNALS

from .app import create_app
from .connection import TimedConnection
from .server_settings import is_loopback
from .service import Service

log = logging.getLogger(__name__)
CLOSE_SECONDS = 2.0  # for what is still to be written after all requests have ended


class Server(uvicorn.Server):
    """Serves until a signal. The first SIGTERM or SIGINT: other requests are refused, those that are open continue for
    up to ``drain_seconds``, and are then cancelled. A second one ends the process at once, as without a handler.

    Args:
        on_start: called when the server accepts connections.
    """

    def __init__(self, service: Service, bound: socket.socket, on_start: Callable[[], None] = lambda: None):
        settings = service.settings
        config = uvicorn.Config(
            create_app(service, on_loopback=is_loopback(bound.getsockname()[0])),
            http=type("Connection", (TimedConnection,), {"limits": settings, "metrics": service.metrics}),
            ws="none",
            lifespan="on",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            server_header=False,
            timeout_keep_alive=settings.idle_seconds,  # type: ignore[arg-type]  # a delay as asyncio takes it
            timeout_graceful_shutdown=CLOSE_SECONDS,  # type: ignore[arg-type]
            ssl_certfile=settings.ssl_certfile,
            ssl_keyfile=settings.ssl_keyfile,
            h11_max_incomplete_event_size=settings.max_header_bytes,
        )
        super().__init__(config)
        self.service, self.bound, self._on_start = service, bound, on_start

    async def run_until_signal(self) -> None:
        await self.serve(sockets=[self.bound])

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._on_start()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self.stop()
        for handled in HANDLED_SIGNALS:
            signal.signal(handled, signal.SIG_DFL)

    def stop(self) -> None:
        """What the first signal does."""
        self.service.draining.set()
        self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        tasks, settings = self.server_state.tasks, self.service.settings
        log.info("draining", extra={"facts": {"open": len(tasks), "seconds": settings.drain_seconds}})
        try:
            async with asyncio.timeout(settings.drain_seconds):
                while tasks:
                    await asyncio.wait(tasks)
        except TimeoutError:
            log.warning("cancelling", extra={"facts": {"open": len(tasks)}})
        await self.service.lanes.close()  # whoever still waits for a text is told that it was cancelled
        await super().shutdown(sockets)
        for connection in list(self.server_state.connections):
            connection.transport.abort()
        log.info("stopped")

"""From the socket to the end of the process: how a server begins, drains and ends."""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import signal
import socket
from collections.abc import Callable
from types import FrameType

import uvicorn
from uvicorn.server import HANDLED_SIGNALS

from .app import create_app
from .connection import TimedConnection
from .service import Service
from .settings import ServerSettings

log = logging.getLogger(__name__)
CLOSE_SECONDS = 2.0  # for what is still to be written after all requests have ended


def bind(settings: ServerSettings) -> socket.socket:
    """Returns a socket with the server's address, which does not listen yet.

    Raises:
        ValueError: the address is not of the loopback interface, and there is no API key.
        OSError: it is not of this machine, or in use.
    """
    try:
        found = socket.getaddrinfo(
            settings.host or None, settings.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        family, kind, protocol, _, address = found[0]
        bound = socket.socket(family, kind, protocol)
    except OSError as error:
        raise OSError(f"host: got {settings.host!r}, allowed: an address of this machine ({error.strerror})") from error
    try:
        if not settings.api_keys and not is_loopback(str(address[0])):
            given = f"{settings.host!r}, which other machines can reach, without an API key"
            raise ValueError(f"host: got {given}, allowed: an address of the loopback interface, or an API key")
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
    except OSError as error:
        bound.close()
        given = f"{settings.port} on {settings.host}"
        raise OSError(f"port: got {given}, allowed: a free port of this machine ({error.strerror})") from error
    except ValueError:
        bound.close()
        raise
    return bound


def is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def url_of(bound: socket.socket) -> str:
    host, port = bound.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


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
            http=type("Connection", (TimedConnection,), {"limits": settings}),
            ws="none",
            lifespan="on",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            server_header=False,
            timeout_keep_alive=settings.idle_seconds,  # type: ignore[arg-type]  # a delay as asyncio takes it
            timeout_graceful_shutdown=CLOSE_SECONDS,  # type: ignore[arg-type]
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

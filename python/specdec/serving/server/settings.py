"""The settings of a server that do not belong to its models."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ServerSettings:
    """Where a server listens, and what it accepts.

    Args:
        host, port: the address. 0 is any free port.
        api_keys: a request needs one of them; none: every request is accepted.
        max_body_bytes, max_header_bytes: of one request.
        drain_seconds: how long open requests may continue after the first SIGTERM.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    api_keys: tuple[str, ...] = ()
    max_body_bytes: int = 1_000_000
    max_header_bytes: int = 16_384
    drain_seconds: float = 30.0

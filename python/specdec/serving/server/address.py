"""Where a server may listen."""

from __future__ import annotations

import ipaddress
import socket

from .server_settings import ServerSettings


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


def url_of(bound: socket.socket, tls: bool = False) -> str:
    (host, port), scheme = bound.getsockname()[:2], "https" if tls else "http"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"

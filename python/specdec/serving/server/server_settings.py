"""The settings of a server that do not belong to its models, and the address that it has by them."""

from __future__ import annotations

import ipaddress
import re
import socket
import ssl
from dataclasses import dataclass, field, fields

from ...checks import refuse

_ORIGIN = re.compile(r"https?://[a-z0-9.-]+(:[0-9]{1,5})?|https?://\[[0-9a-f:]+\](:[0-9]{1,5})?")
_VISIBLE = re.compile(r"[!-~]*")


@dataclass(frozen=True)
class ServerSettings:
    """Where a server listens, and what it accepts.

    Args:
        host, port: the address. 0 is any free port.
        api_keys: a request needs one of them, 8 to 1024 visible ASCII characters each; none: every request is accepted.
        allowed_hosts: names of the server in ``Host`` headers, besides those of the loopback interface and ``host``.
            A server on another interface accepts all, because it has keys.
        cors_origins: other web sites whose pages may use the server: "https://example.org", or "*" for all.
        max_body_bytes, max_header_bytes: of one request, both > 0.
        max_connections: open at one time, > 0.
        requests_per_minute: POST requests of one API key in any minute, or of all without keys, >= 1; None: any number.
        header_seconds, body_seconds: by when the whole head of a request is there, and its whole body after that.
        write_seconds: by when a client has taken what was sent to it; a streamed text is sent piece by piece.
        idle_seconds: how long a connection stays open between two requests.
        share_prefixes: whether a prompt may take over what was read of prompts that came with other keys. Who sends
            one then can tell by the time whether others sent its beginning.
        ssl_certfile, ssl_keyfile: a certificate chain and its key, for TLS; None: no TLS, or a key in the other file.
        drain_seconds: how long open requests may continue after the first signal to end, >= 0.

    Raises:
        ValueError: names the argument, what was given and what is allowed.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    api_keys: tuple[str, ...] = field(default=(), repr=False)
    allowed_hosts: tuple[str, ...] = ()
    cors_origins: tuple[str, ...] = ()
    max_body_bytes: int = 1_000_000
    max_header_bytes: int = 16_384
    max_connections: int = 512
    header_seconds: float = 10.0
    body_seconds: float = 30.0
    write_seconds: float = 30.0
    idle_seconds: float = 60.0
    drain_seconds: float = 30.0
    share_prefixes: bool = False
    requests_per_minute: int | None = None
    ssl_certfile: str | None = None
    ssl_keyfile: str | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.port < 65536:
            refuse("port", self.port, "0 to 65535")
        for each in fields(self):
            value = getattr(self, each.name)
            if each.name.startswith("max_") and value < 1:
                refuse(each.name, value, "an integer >= 1")
            if each.name.endswith("_seconds") and not 0 < value < 1e6 and (value, each.name) != (0, "drain_seconds"):
                refuse(each.name, value, "a number > 0")
        if self.requests_per_minute is not None and self.requests_per_minute < 1:
            refuse("requests_per_minute", self.requests_per_minute, "an integer >= 1")
        if self.ssl_keyfile is not None and self.ssl_certfile is None:
            refuse("ssl_keyfile", repr(self.ssl_keyfile), "with ssl_certfile")
        if self.ssl_certfile is not None:
            try:  # an empty password, or a person would be asked for one
                ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(self.ssl_certfile, self.ssl_keyfile, "")
            except (OSError, ValueError) as error:
                refuse("ssl_certfile", f"{self.ssl_certfile!r} ({error})", "a PEM certificate whose key is there, too")
        for key in self.api_keys:  # none of which is told
            if not 8 <= len(key) <= 1024:
                refuse("api_keys", f"a key that is too {'short' if len(key) < 8 else 'long'}", "8 to 1024 characters")
            if _VISIBLE.fullmatch(key) is None:
                refuse("api_keys", "a key with other characters", "visible ASCII characters, without blanks")
        for origin in self.cors_origins:
            if origin == "*" and not self.api_keys:
                refuse("cors_origins", "'*' without an API key", "with '*' a key, or the origins by name")
            if origin != "*" and _ORIGIN.fullmatch(origin) is None:
                refuse("cors_origins", repr(origin), "'*', or a scheme and a host: https://example.org")


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

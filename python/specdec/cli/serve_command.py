"""``specdec serve``: an HTTP server with OpenAI's interface."""

from __future__ import annotations

import os
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import typer

from .models import DividedModelOptions
from .option_groups import command, option
from .options import ROWS, SchedulingOptions
from .served import ServedDrafts, make_service, run
from .user_errors import check_counts, refuse

if TYPE_CHECKING:
    from ..serving.server.server_settings import ServerSettings

ENVIRONMENT = "SPECDEC_SERVE"  # SPECDEC_SERVE_ROWS is --rows, and so on


@dataclass(frozen=True)
class CapacityOptions(SchedulingOptions):
    """Capacity"""

    rows: int | None = option(ROWS, "Sequences that are decoded at a time, for each drafter and rule.")
    max_waiting: int = option(256, "Sequences that may wait for a row; others are answered 429.")
    prefix_reuse: Literal["off", "exact", "rounding"] | None = option(
        None,
        "What a prompt takes over of earlier ones that begin in the same way. exact: whole parts of --prefill-chunk, "
        "which changes no text; rounding: also generated tokens, and near-ties may fall differently. Default: exact, "
        "where the target can.",
    )

    def scheduling(self) -> dict[str, Any]:
        check_counts(1, max_waiting=self.max_waiting)
        more = {} if self.prefix_reuse is None else {"prefix_reuse": self.prefix_reuse}
        return {**super().scheduling(), "max_waiting": self.max_waiting, **more}


@dataclass(frozen=True)
class AccessOptions:
    """Access"""

    host: str = option("127.0.0.1", "Address to listen on. One that other machines can reach needs an API key.")
    port: int = option(8000, "0 is any free one.")
    api_key: list[str] | None = option(
        None,
        f"Repeatable. Other users see it in the list of processes, unlike --api-key-file and {ENVIRONMENT}_API_KEY.",
        metavar="KEY",
    )
    api_key_file: Path | None = option(None, "API keys, one a line.", metavar="FILE")
    allowed_host: list[str] | None = option(
        None, "Another name of this server, of a proxy before it perhaps. Repeatable.", metavar="NAME"
    )
    share_prefixes: bool = option(
        False, "Let prompts take over what was read for other keys. Their senders can then tell what others sent."
    )
    ssl_certfile: Path | None = option(None, "A certificate chain in PEM, for HTTPS.", metavar="FILE")
    ssl_keyfile: Path | None = option(None, "Its private key, unless it is in the same file.", metavar="FILE")
    cors_origin: list[str] | None = option(
        None, "A web site whose pages may use the server: https://host. Repeatable.", metavar="ORIGIN"
    )

    def settings(self, limits: LimitOptions, operation: OperationOptions) -> ServerSettings:
        from ..serving.server.server_settings import ServerSettings

        return ServerSettings(
            self.host,
            self.port,
            read_keys(self.api_key, self.api_key_file),
            tuple(self.allowed_host or ()),
            tuple(self.cors_origin or ()),
            **vars(limits),
            drain_seconds=operation.drain_seconds,
            share_prefixes=self.share_prefixes,
            ssl_certfile=None if self.ssl_certfile is None else str(self.ssl_certfile),
            ssl_keyfile=None if self.ssl_keyfile is None else str(self.ssl_keyfile),
        )


@dataclass(frozen=True)
class LimitOptions:
    """Limits of requests and connections"""

    max_body_bytes: int = option(1_000_000, "Of a request.")
    max_header_bytes: int = option(16_384, "Of a request.")
    max_connections: int = option(512, "Open at a time; others are answered 503.")
    requests_per_minute: int | None = option(
        None, "Of each API key, or of all without keys; more are answered 429. Default: any number.", metavar="N"
    )
    header_seconds: float = option(10.0, "In which the head of a request must arrive.")
    body_seconds: float = option(30.0, "In which its body must arrive after that.")
    write_seconds: float = option(30.0, "In which a client must take what it is sent.")
    idle_seconds: float = option(60.0, "How long a connection may be idle between requests.")


@dataclass(frozen=True)
class OperationOptions:
    """Operation"""

    name: str | None = option(None, "Of the model, in requests and answers. Default: the last part of --target.")
    response_template: Path | None = option(
        None,
        "How the model writes reasoning and calls of tools: a response template of transformers, as JSON, or a "
        "tokenizer_config.json that has one. Default: the tokenizer's, or what its chat template shows.",
        metavar="FILE",
    )
    drain_seconds: float = option(
        30.0, "How long open requests may continue after the first SIGTERM; a second ends at once."
    )
    log_format: Literal["text", "json"] = option("text", "json: one object a line.")
    log_level: Literal["debug", "info", "warning", "error"] = option("info", "info has a line for each request.")


@command
def serve(
    at: DividedModelOptions,
    drafts: ServedDrafts,
    capacity: CapacityOptions,
    access: AccessOptions,
    limits: LimitOptions,
    operation: OperationOptions,
) -> None:
    """Serves the target over HTTP, with OpenAI's interface, on this machine's loopback interface. Every option may be
    given by the environment: SPECDEC_SERVE_MAX_LENGTH is --max-length; of repeatable ones, values are separated by
    blanks. Exit codes: 0 after the first SIGTERM or SIGINT and its drain, 2 where an option is refused; a second signal
    kills the process."""
    if missing := [name for name in ("fastapi", "uvicorn", "prometheus_client") if find_spec(name) is None]:
        told = f'specdec serve needs the extra [serve], {missing[0]} is missing: pip install "specdec-kernels[serve]"'
        typer.echo(f"Error: {told}", err=True)
        raise typer.Exit(2)
    at.join()
    from ..serving.server import logs
    from ..serving.server.server_settings import bind

    scheduling = capacity.scheduling()
    settings = access.settings(limits, operation)
    with bind(settings) as bound:
        logs.configure(operation.log_format, operation.log_level)
        service = make_service(at, drafts, scheduling, settings, operation.name, operation.response_template)
        run(service, bound, operation.log_format == "json")


def read_keys(given: list[str] | None, file: Path | None) -> tuple[str, ...]:
    """All keys. Without any, everyone who reaches the server may use it, so whatever looks like a key that was
    forgotten is refused."""
    if not given and f"{ENVIRONMENT}_API_KEY" in os.environ:
        refuse(f"{ENVIRONMENT}_API_KEY", "no key", "one or more, separated by blanks, or an unset variable")
    keys = list(given or [])
    if file is not None:
        try:
            found = file.read_text("utf-8-sig").split()
        except (OSError, UnicodeDecodeError) as error:
            refuse("--api-key-file", f"{str(file)!r} ({type(error).__name__})", "a readable text file")
        if not found:
            refuse("--api-key-file", f"{str(file)!r} without a key", "a file with one key a line")
        keys += found
    return tuple(dict.fromkeys(keys))

"""``specdec serve``: an HTTP server with OpenAI's interface."""

from __future__ import annotations

import enum
import os
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from . import options
from .drafters import HEAD, NAMES
from .grouped import GroupedCommand
from .options import refuse

ENVIRONMENT = "SPECDEC_SERVE"  # SPECDEC_SERVE_ROWS is --rows, and so on


class LogFormat(enum.StrEnum):
    TEXT = "text"
    JSON = "json"


class LogLevel(enum.StrEnum):
    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


class ServeCommand(GroupedCommand):
    groups = {
        "Models": ("target", "adapter", "draft", "device", "dtype", "name"),
        "Drafting": ("drafter", "exit_layers", "num_drafts", "tree", "rule"),
        "Capacity": ("rows", "max_length", "cache_tokens", "cache_bytes", "prefill_chunk", "max_waiting"),
        "Access": ("host", "port", "api_key", "api_key_file", "allowed_host", "cors_origin"),
        "Limits of requests and connections": (
            *("max_body_bytes", "max_header_bytes", "max_connections"),
            *("header_seconds", "body_seconds", "write_seconds", "idle_seconds"),
        ),
        "Operation": ("drain_seconds", "log_format", "log_level"),
    }


def serve(
    target: options.Target = None,
    adapter: options.Adapter = None,
    draft: options.Draft = None,
    device: options.Device = None,
    dtype: options.Dtype = None,
    name: Annotated[
        str | None, typer.Option(help="Of the model, in requests and answers. Default: the last part of --target.")
    ] = None,
    drafter: Annotated[
        list[str] | None,
        typer.Option(
            help=f"Repeatable: the first is the default, requests may ask for the others. {', '.join(NAMES)}, {HEAD}. "
            "Default: model; with the embedded pair also none, lookup, suffix, eagle3, medusa, dflash.",
            metavar="NAME",
        ),
    ] = None,
    exit_layers: options.ExitLayers = None,
    num_drafts: Annotated[
        str,
        typer.Option(
            "--num-drafts",
            "-k",
            help="K, drafted tokens a step; auto chooses it by load, down to 0 where no draft pays. With a tree: the "
            "most tokens of a path through it.",
        ),
    ] = "auto",
    tree: options.Tree = None,
    rule: Annotated[
        list[str] | None,
        typer.Option(
            metavar="RULE",
            help="Repeatable, as --drafter: coupled (the text depends on target, prompt, settings and seed alone), "
            "token, block. Default: coupled; with the embedded pair also the others.",
        ),
    ] = None,
    rows: Annotated[int, typer.Option(help="Sequences that are decoded at a time, for each drafter and rule.")] = 8,
    max_length: Annotated[
        int | None, typer.Option(help="Tokens of a prompt and its text, at most. Default: what fits.")
    ] = None,
    cache_tokens: Annotated[int | None, typer.Option(help="Tokens in the caches, all rows together.")] = None,
    cache_bytes: options.CacheBytes = None,
    prefill_chunk: Annotated[int, typer.Option(help="Tokens of a prompt that are read at a time.")] = 256,
    max_waiting: Annotated[int, typer.Option(help="Sequences that may wait for a row; others are answered 429.")] = 256,
    host: Annotated[
        str, typer.Option(help="Address to listen on. One that other machines can reach needs an API key.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="0 is any free one.")] = 8000,
    api_key: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY",
            help=f"Repeatable. Other users see it in the list of processes, unlike --api-key-file and {ENVIRONMENT}"
            "_API_KEY.",
        ),
    ] = None,
    api_key_file: Annotated[Path | None, typer.Option(metavar="FILE", help="API keys, one a line.")] = None,
    allowed_host: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Another name of this server, of a proxy before it perhaps. Repeatable."),
    ] = None,
    cors_origin: Annotated[
        list[str] | None,
        typer.Option(metavar="ORIGIN", help="A web site whose pages may use the server: https://host. Repeatable."),
    ] = None,
    max_body_bytes: Annotated[int, typer.Option(help="Of a request.")] = 1_000_000,
    max_header_bytes: Annotated[int, typer.Option(help="Of a request.")] = 16_384,
    max_connections: Annotated[int, typer.Option(help="Open at a time; others are answered 503.")] = 512,
    header_seconds: Annotated[float, typer.Option(help="In which the head of a request must arrive.")] = 10.0,
    body_seconds: Annotated[float, typer.Option(help="In which its body must arrive after that.")] = 30.0,
    write_seconds: Annotated[float, typer.Option(help="In which a client must take what it is sent.")] = 30.0,
    idle_seconds: Annotated[float, typer.Option(help="How long a connection may be idle between requests.")] = 60.0,
    drain_seconds: Annotated[
        float, typer.Option(help="How long open requests may continue after the first SIGTERM; a second ends at once.")
    ] = 30.0,
    log_format: Annotated[LogFormat, typer.Option(help="json: one object a line.")] = LogFormat.TEXT,
    log_level: Annotated[LogLevel, typer.Option(help="info has a line for each request.")] = LogLevel.INFO,
) -> None:
    """Serves the target over HTTP, with OpenAI's interface, on this machine's loopback interface. Every option may be
    given by the environment: SPECDEC_SERVE_MAX_LENGTH is --max-length; of repeatable ones, values are separated by
    blanks. Exit codes: 0 after the first SIGTERM or SIGINT and its drain, 2 where an option is refused; a second signal
    kills the process."""
    if missing := [name for name in ("fastapi", "uvicorn", "prometheus_client") if find_spec(name) is None]:
        told = f'specdec serve needs the extra [serve], {missing[0]} is missing: pip install "specdec[serve]"'
        typer.echo(f"Error: {told}", err=True)
        raise typer.Exit(2)
    from ..serving.server import address, logs
    from ..serving.server.server_settings import ServerSettings
    from . import serving

    options.check_counts(
        1, rows=rows, max_length=max_length, cache_tokens=cache_tokens, prefill_chunk=prefill_chunk,
        max_waiting=max_waiting,
    )  # fmt: skip
    if cache_tokens is not None and cache_bytes is not None:
        refuse("--cache-tokens / --cache-bytes", "both", "one of the two")
    capacity = serving.Capacity(
        rows,
        max_length,
        cache_tokens,
        None if cache_bytes is None else options.read_bytes("--cache-bytes", cache_bytes),
        prefill_chunk,
        max_waiting,
    )
    asked = serving.Asked(target, adapter, draft, device, dtype, drafter, exit_layers, num_drafts, tree, rule)
    with options.user_errors():
        settings = ServerSettings(
            host, port, read_keys(api_key, api_key_file), tuple(allowed_host or ()), tuple(cors_origin or ()),
            max_body_bytes, max_header_bytes, max_connections, header_seconds, body_seconds, write_seconds,
            idle_seconds, drain_seconds,
        )  # fmt: skip
        bound = address.bind(settings)
    with bound:
        logs.configure(log_format, log_level)
        service = serving.make_service(asked, capacity, settings, name)
        serving.run(service, bound, log_format == "json")


def read_keys(given: list[str] | None, file: Path | None) -> tuple[str, ...]:
    """All keys. Without any, everyone who reaches the server may use it, so whatever looks like a key that was
    forgotten is refused."""
    if not given and f"{ENVIRONMENT}_API_KEY" in os.environ:
        refuse(f"{ENVIRONMENT}_API_KEY", "no key", "one or more, separated by blanks, or an unset variable")
    keys = list(given or [])
    if file is not None:
        try:
            found = file.read_text().split()
        except (OSError, UnicodeDecodeError) as error:
            refuse("--api-key-file", f"{str(file)!r} ({type(error).__name__})", "a readable text file")
        if not found:
            refuse("--api-key-file", f"{str(file)!r} without a key", "a file with one key a line")
        keys += found
    return tuple(dict.fromkeys(keys))

"""Errors of those who call a command: they name the option, what was given and what is allowed, and end it with 2."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

import typer

# Arguments of the library whose option has another name, where the command has none of their own.
_OTHERWISE = {
    "target": "--target",
    "draft": "--draft",
    "drafter": "--drafter",
    "draft_tokenizer": "--draft",
    "banned_tokens": "--ban",
    "bits": "--load-in-8bit / --load-in-4bit",
    "cache": "--cache-bytes",
    "num_layers": "--exit-layers",
    "stop_strings": "--stop",
    "grammar": "--json-schema / --regex",
    "json_schema / regex": "--json-schema / --regex",
    "checks": "--check",
    "rules": "--rule",
    "batch_sizes": "--batch-size",
    "api_keys": "--api-key",
    "cors_origins": "--cors-origin",
    "format": "--format",
    "report": "--report",
    "embed_tokens.weight": "TARGET",  # of which a head cannot be trained
    "lm_head.weight": "TARGET",
    "TARGET": "TARGET",
    "DRAFT": "DRAFT",
    "SPECDEC_CPU_ISA": "SPECDEC_CPU_ISA",
}
_SOURCES = ("batch_file", "prompt_file", "prompts", "prompt_set")  # options whose files have the prompts


def refuse(option: str, given: object, allowed: str) -> NoReturn:
    raise typer.BadParameter(f"got {given}, allowed: {allowed}", param_hint=option)


def option_name(name: str) -> str:
    return "--" + name.replace("_", "-")


def check_counts(smallest: int, **counts: int | None) -> None:
    """Refuses smaller ones. typer's own message would not say what was given, and the library's would come after the
    models were loaded."""
    for name, count in counts.items():
        if count is not None and count < smallest:
            refuse(option_name(name), count, f"an integer >= {smallest}")


@contextmanager
def without_warnings() -> Iterator[None]:
    """Hides the loop's warnings of single sequences: results hold the same, and commands print it."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="a sequence drafts no more")
        yield


@contextmanager
def user_errors(context: typer.Context) -> Iterator[None]:
    """The library's errors begin with the name of an argument. Here they end the command with exit code 2 and name the
    option instead, as errors of an input or an output file do. Any other error is a bug and keeps its traceback."""
    try:
        with without_warnings():
            yield
    except (ValueError, OSError) as error:
        from ..jobs.input import InputError
        from ..line_file import OutputError

        names = _OTHERWISE | {param.name or "": _shown(param) for param in context.command.params}
        source = next((names[name] for name in _SOURCES if context.params.get(name)), "PROMPT")
        if isinstance(error, (InputError, OutputError)):
            hint = source if isinstance(error, InputError) else "--output"
            raise typer.BadParameter(str(error), param_hint=hint) from error
        argument, _, what = str(error).partition(": ")
        if argument not in (names := {**names, "input_ids": source}):
            raise
        raise typer.BadParameter(what, param_hint=names[argument]) from error


@contextmanager
def as_arguments() -> Iterator[None]:
    """For what is called from Python but reads options as commands do: their errors name arguments, as ValueErrors."""
    try:
        yield
    except typer.BadParameter as error:
        named = re.sub("--([a-z-]+)", lambda option: option[1].replace("-", "_"), str(error.param_hint))
        raise ValueError(f"{named}: {error.message}") from error


def _shown(param: object) -> str:
    """An option's long name, or an argument's as ``--help`` has it."""
    if getattr(param, "param_type_name", "") == "argument":
        named = getattr(param, "metavar", None) or getattr(param, "name", None) or ""
        return str(named).strip("[].").upper()
    return next(name for name in getattr(param, "opts", ()) if name.startswith("--"))

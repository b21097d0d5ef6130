"""The command line, one command a file.

Answers go to stdout, everything else to stderr. Whatever imports torch is imported inside the commands:
``--help`` is to be fast."""

from __future__ import annotations

import gc
from typing import Annotated

import typer

from .advise_command import advise
from .bench_command import bench
from .chat_command import chat
from .compare_command import compare
from .convert_command import convert
from .distill_command import distill
from .doctor_command import doctor
from .generate_command import generate
from .option_groups import GroupedCommand
from .report_command import report
from .roofline_command import roofline
from .serve_command import ENVIRONMENT, serve
from .simulate_command import simulate
from .train_heads_command import train_heads
from .verify_command import verify

# Without rich's boxes, which would break long paths in error messages.
app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Speculative decoding, exact and fast.")
for command in (
    *(generate, chat, advise, compare, report, verify, simulate, roofline, doctor, bench, distill, train_heads, serve),
    convert,
):
    prefix = {"auto_envvar_prefix": ENVIRONMENT} if command is serve else {}
    app.command(cls=GroupedCommand, context_settings=prefix)(command)


def show_version(asked: bool) -> None:
    if asked:
        from importlib import metadata  # slow to import, and specdec_kernels.__version__ would import torch

        typer.echo(f"specdec {metadata.version('specdec')}")
        raise typer.Exit()


@app.callback()
def options_of_specdec(
    version: Annotated[
        bool, typer.Option("--version", callback=show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None: ...


def main() -> None:
    """The process ``specdec``. Until its models are loaded, nothing is garbage: looking through what torch and
    transformers import would make it start a quarter slower."""
    gc.disable()
    app(prog_name="specdec")

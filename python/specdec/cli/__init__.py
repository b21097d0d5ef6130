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
from .merge_command import merge
from .option_groups import GroupedCommand
from .report_command import report
from .serve_command import ENVIRONMENT, serve
from .simulate_command import simulate
from .terminal import UNLIMITED
from .train_heads_command import train_heads
from .verify_command import verify

# Without rich's boxes, which would break long paths in error messages. Help is as wide as the terminal.
app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    context_settings={"max_content_width": UNLIMITED},
    help="Speculative decoding, exact and fast.",
)
COMMANDS = {  # and what the list of all commands says of each, in 41 columns: it cuts what is longer
    generate: "Continues a prompt, or a file of prompts.",
    merge: "Joins the results of a job's shards.",
    chat: "Talks with a model, here or on a server.",
    advise: "Says whether speculation pays, and how.",
    compare: "Times one setting beside transformers.",
    report: "Makes a page of what bench measured.",
    verify: "Checks that texts are the target's own.",
    simulate: "Predicts a speed-up from alpha and c.",
    doctor: "Says what can run on this machine.",
    bench: "Measures every method, and the fastest K.",
    convert: "Makes a model's folder of a GGUF file.",
    distill: "Trains a draft model for a target.",
    train_heads: "Trains a head for a target.",
    serve: "Serves a model with OpenAI's interface.",
}
for command, short in COMMANDS.items():
    prefix = {"auto_envvar_prefix": ENVIRONMENT} if command is serve else {}
    app.command(cls=GroupedCommand, context_settings=prefix, short_help=short)(command)


def show_version(asked: bool) -> None:
    if asked:
        from importlib import metadata  # slow to import, and specdec_kernels.__version__ would import torch

        typer.echo(f"specdec {metadata.version('specdec-kernels')}")
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

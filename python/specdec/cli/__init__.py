"""The command line, one command a file.

Answers go to stdout, everything else to stderr. Whatever imports torch is imported inside the commands:
``--help`` is to be fast."""

from __future__ import annotations

import gc
from typing import Annotated

import typer

from . import (
    advise,
    bench,
    chat,
    compare,
    distill,
    doctor,
    generate,
    report,
    roofline,
    serve,
    simulate,
    train_heads,
    verify,
)

# Without rich's boxes, which would break long paths in error messages.
app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Speculative decoding, exact and fast.")
for command in (
    *(generate.generate, chat.chat, advise.advise, compare.compare, report.report, verify.verify),
    *(simulate.simulate, roofline.roofline, doctor.doctor),
):
    app.command()(command)
app.command(cls=bench.BenchCommand)(bench.bench)
app.command(cls=distill.DistillCommand)(distill.distill)
app.command(cls=train_heads.TrainHeadsCommand)(train_heads.train_heads)
app.command(cls=serve.ServeCommand, context_settings={"auto_envvar_prefix": serve.ENVIRONMENT})(serve.serve)


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

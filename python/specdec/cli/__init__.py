"""The command line: ``specdec generate``, ``chat``, ``compare``, ``verify`` and ``doctor``, a file each.

Answers go to stdout, everything else to stderr. Whatever imports torch is imported inside the commands:
``--help`` is to be fast."""

from __future__ import annotations

import typer

from . import chat, compare, doctor, generate, verify

# Without rich's boxes, which would break long paths in error messages.
app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Speculative decoding, exact and fast.",
)
for command in (generate.generate, chat.chat, compare.compare, verify.verify, doctor.doctor):
    app.command()(command)

"""``specdec convert``: a folder in transformers' format of a GGUF file."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from .option_groups import command, option
from .progress_bar import progress
from .terminal import remark


@dataclass(frozen=True)
class ConvertOptions:
    """The folder"""

    dtype: str = option(
        "float32", "Of the weights: float32, bfloat16, float16. Packed ones are exact in float32 alone."
    )
    overwrite: bool = option(False, "Replace a folder that has a model.", "--overwrite")


@command
def convert(
    asked: ConvertOptions,
    path: Annotated[Path, typer.Argument(metavar="FILE", help="A GGUF file of a language model.", show_default=False)],
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="What is written.", show_default=False)],
) -> None:
    """Makes of a GGUF file a folder, for a GPU, for adapters and for training; on a CPU every command takes the file
    itself as --target or --draft. It is done once, and takes four bytes of memory and disk for each parameter (--dtype
    float32).

    What cannot be read is refused by name. docs/models.md says more."""
    with progress("loading transformers") as show:
        from transformers.utils import logging

        from ..models.load.gguf.convert import convert_gguf

        logging.set_verbosity_error()
        logging.disable_progress_bar()
        file = convert_gguf(path, folder, asked.dtype, asked.overwrite, show)
    expanded = f" Expanded from {', '.join(file.packed)}." if file.packed else ""
    remark(f"{file.architecture}, {asked.dtype}.{expanded}")
    typer.echo(folder)

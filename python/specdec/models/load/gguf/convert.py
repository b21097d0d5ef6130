"""Makes a folder in transformers' format of a GGUF file."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ....checks import refuse
from ..location import CONFIG
from .config import configuration
from .file import GgufFile, read_gguf
from .model import gguf_model
from .tokenizer import gguf_tokenizer

DTYPES = ("float32", "bfloat16", "float16")
STEPS = ("reading the file", "making the tokenizer", "expanding the weights", "writing")


def convert_gguf(
    path: str | os.PathLike,
    folder: str | os.PathLike,
    dtype: str = "float32",
    overwrite: bool = False,
    show: Callable[[int, int, str], None] = lambda done, total, what: None,
) -> GgufFile:
    """Writes a folder that ``load_model`` reads: weights in safetensors, configuration, tokenizer and chat template.
    It is whole or not there: it gets its name when all is written.

    Args:
        path: the file. Packed weights (Q4_K and so on) are expanded.
        folder: where it goes. It must not exist, or be empty.
        dtype: of the weights. Those that are expanded are exact in float32 alone.
        overwrite: whether a folder that has a model is replaced.
        show: called before each step, with its number, the number of steps, and what it is.

    Returns:
        What the file says.

    Raises:
        OSError: names ``path``, which cannot be read, or ``folder``, which cannot be written.
        ValueError: names ``dtype``, ``folder``, or ``path``: the file has something that is not read, without which it
            would be another model.
    """
    path, folder = Path(path).expanduser(), Path(folder).expanduser()
    if dtype not in DTYPES:
        refuse("dtype", repr(dtype), ", ".join(DTYPES))
    _require_room(folder, overwrite)
    step = iter(range(len(STEPS)))

    def begin() -> None:
        i = next(step)
        show(i, len(STEPS), STEPS[i])

    begin()
    file = read_gguf(path)
    begin()
    tokenizer = gguf_tokenizer(file)
    begin()
    model = gguf_model(file, configuration(file), getattr(torch, dtype))
    begin()
    _write(model, tokenizer, folder)
    return file


def _require_room(folder: Path, overwrite: bool) -> None:
    if folder.exists() and not folder.is_dir():
        refuse("folder", f"{str(folder)!r}, a file", "a folder")
    if not folder.is_dir() or not any(folder.iterdir()):
        return
    if not overwrite:
        refuse("folder", f"{str(folder)!r}, which is not empty", "a new or empty one, or --overwrite")
    if not (folder / CONFIG).is_file():
        refuse(
            "folder", f"{str(folder)!r}, which holds something else than a model", "a new or empty one, or a model's"
        )


def _write(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    part, old = (folder.with_name(f".{folder.name}.{kind}") for kind in ("part", "old"))  # beside it, to be renamed
    try:
        for left in (part, old):  # by a run that was killed
            shutil.rmtree(left, ignore_errors=True)
        part.mkdir(parents=True)
        model.save_pretrained(part)
        tokenizer.save_pretrained(part)
        if folder.is_dir():
            folder.replace(old)
        part.replace(folder)
    except OSError as error:
        raise OSError(f"folder: cannot write {str(folder)!r}: {error}") from error
    finally:
        for left in (part, old):
            shutil.rmtree(left, ignore_errors=True)

"""The prompts of a command: its arguments, or the lines of a file."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from .options import refuse

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from ..jobs.lines import JobLine, LineSettings
    from ..jobs.questions import Question


def read_texts(prompts: list[str], batch_file: Path | None) -> list[str]:
    """The prompts of the arguments or of the file, for a command that decodes all of them alike: a line of the file
    may have no settings of its own."""
    if batch_file is None:
        return check_texts(prompts)
    with _input_errors():
        from ..jobs.input import read_batch
        from ..jobs.lines import LineSettings

        return [line.prompt for line in read_batch(batch_file, LineSettings(), 0, keys=("id", "prompt"))]


def read_questions(batch_file: Path, tokenizer: Callable[[], PreTrainedTokenizerBase]) -> list[Question]:
    """The questions of a file, each with a category."""
    with _input_errors():
        from ..jobs import questions

        return questions.read_questions(batch_file, tokenizer)


def read_lines(
    batch_file: Path,
    defaults: LineSettings,
    vocab_size: int,
    texts: int,
    tokenizer: Callable[[], PreTrainedTokenizerBase],
    option: str = "--batch-file",
) -> list[JobLine]:
    """The lines of a file, with their own settings; ``texts`` are made of each. ``tokenizer`` is for messages."""
    with _input_errors(option):
        from ..jobs.input import read_batch

        return read_batch(batch_file, defaults, vocab_size, texts=texts, tokenizer=tokenizer)


def read_prompt_file(path: Path) -> str:
    """A whole file as one prompt."""
    with _input_errors("--prompt-file"):
        from ..jobs.input import read_prompt

        return read_prompt(path)


def check_texts(texts: list[str]) -> list[str]:
    """Refuses arguments that no tokenizer takes."""
    for text in texts:
        if not text:
            refuse("PROMPT", "an empty prompt", "at least one character")
        if any("\ud800" <= c <= "\udfff" for c in text):  # from an argument that is not UTF-8
            refuse("PROMPT", ascii(text[:60]), "text without lone surrogates")
    return texts


@contextmanager
def _input_errors(option: str = "--batch-file") -> Iterator[None]:
    from ..jobs.input import InputError

    try:
        yield
    except InputError as error:
        raise typer.BadParameter(str(error), param_hint=option) from error

"""What the commands that train share: options, the texts, and how a training ends."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from . import models
from .bench import BUILT_IN
from .prompts import read_lines
from .terminal import remark

if TYPE_CHECKING:
    from ..training.texts import Corpus
    from ..training.trainer import Logged

STOPPED = 1  # the exit code of a training that an error ended
# Options in the order in which they are shown; a command has some of its own beside them.
TEXTS = ("data", "prompts", "held_out", "text", "batch_size", "length", "temperature")
RESULTS = ("output_dtype", "every", "num_drafts", "judged", "source", "licence", "tensorboard", "as_json")

Data = Annotated[
    list[Path],
    typer.Option(
        help="Repeatable: .jsonl or .parquet with text, messages, or prompt and completion; results of specdec "
        "generate --output; a folder of datasets' save_to_disk; any other file is one text."
    ),
]
Prompts = Annotated[
    Path | None, typer.Option(metavar="FILE", help="The --batch-file of the results of specdec generate in --data.")
]
HeldOut = Annotated[Path | None, typer.Option(metavar="FILE", help="Texts to judge by. Default: about 3 % of --data.")]
BatchSize = Annotated[int, typer.Option(help="Texts of a step.")]
Length = Annotated[int, typer.Option(help="Tokens of a text.")]
TextTemperature = Annotated[float, typer.Option(help="At which texts are written.")]
Steps = Annotated[int, typer.Option(help="Updates of the weights.")]
Rate = Annotated[float, typer.Option(help="The peak learning rate.")]
WarmUp = Annotated[int, typer.Option(help="Steps until it is reached.")]
Precision = Annotated[str, typer.Option(help="bf16: matrices in bfloat16; no: float32.")]
Every = Annotated[int, typer.Option(help="Steps between two judgements and checkpoints.")]
Judged = Annotated[int, typer.Option(help="Held-out prompts that it is judged by.")]
OutputDtype = Annotated[str, typer.Option(help="Of the saved weights: bfloat16, float16, float32.")]
TensorBoard = Annotated[
    bool, typer.Option("--tensorboard", help="Write the log for it, too: tensorboard --logdir OUTPUT/training")
]
Source = Annotated[str, typer.Option(help="Where the data is from, for the model card.")]
Licence = Annotated[str, typer.Option(help="Of the data, for the model card.")]
Target = Annotated[
    str | None, typer.Argument(help="Folder or hub name. Default: the embedded target.", show_default=False)
]


@contextmanager
def kept(output: Path) -> Iterator[None]:
    """Errors that end a training, and leave its last checkpoint as it was, end the command with a line that says so."""
    from ..line_file import WriteError
    from ..training.trainer import Diverged

    try:
        yield
    except (Diverged, OSError, WriteError) as error:
        if isinstance(error, OSError) and error.errno is None:  # about an argument
            raise
        remark(f"stopped: {error}. What there was is in {str(output)!r}; the same command goes on", "red")
        raise typer.Exit(STOPPED) from error


def logging(tensorboard: bool, output: Path) -> AbstractContextManager[Logged]:
    """What is to be called with each line of the log."""
    if not tensorboard:
        return nullcontext(lambda row: None)
    from ..training.curves import board

    return board(output)


@contextmanager
def stop_once() -> Iterator[Callable[[], bool]]:
    """Inside the block, the first Ctrl-C asks to stop after the step, and a second one raises KeyboardInterrupt."""
    pressed: list[int] = []

    def press(number: int, frame: object) -> None:
        pressed.append(number)
        signal.signal(signal.SIGINT, before)

    before = signal.signal(signal.SIGINT, press)
    try:
        yield lambda: bool(pressed)
    finally:
        signal.signal(signal.SIGINT, before)


def read_corpus(data: Sequence[Path], prompts: Path | None, held_out: Path | None, loaded: models.Models) -> Corpus:
    from ..jobs.lines import LineSettings
    from ..jobs.questions import read_questions
    from ..training.texts import read_documents, split

    def tokenizer():
        return loaded.tokenizer

    given: list[str] = []
    if prompts is not None:
        vocab_size = loaded.target.config.get_text_config(decoder=True).vocab_size
        given = [line.prompt for line in read_lines(prompts, LineSettings(), vocab_size, 1, tokenizer, "--prompts")]
    documents = [text for path in data for text in read_documents(path, tokenizer, given)]
    aside = None if held_out is None else read_documents(held_out, tokenizer)
    return split(documents, [question.prompt for question in read_questions(BUILT_IN)], aside)

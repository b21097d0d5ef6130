"""What the commands that train share: options, the texts, and how a training ends."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from . import drafting, models
from .option_groups import option
from .options import as_json
from .terminal import remark

if TYPE_CHECKING:
    from ..training.model_card import Card
    from ..training.settings import DistillSettings
    from ..training.texts import Corpus
    from ..training.trainer import Logged

STOPPED = 1  # the exit code of a training that an error ended
Target = Annotated[
    str | None, typer.Argument(help="Folder or hub name. Default: the embedded target.", show_default=False)
]


@dataclass(frozen=True)
class LessonOptions:
    """What it learns from"""

    data: list[Path] = option(
        ...,
        "Repeatable: .jsonl or .parquet with text, messages, or prompt and completion; results of specdec generate "
        "--output; a folder of datasets' save_to_disk; any other file is one text.",
    )
    prompts: Path | None = option(
        None, "The --batch-file of the results of specdec generate in --data.", metavar="FILE"
    )
    held_out: Path | None = option(None, "Texts to judge by. Default: about 3 % of --data.", metavar="FILE")
    text: str = option("data")
    batch_size: int = option(4, "Texts of a step.")
    length: int = option(256, "Tokens of a text.")
    temperature: float = option(1.0, "At which texts are written.")

    def corpus(self, loaded: models.Models) -> Corpus:
        from ..jobs.input import read_batch
        from ..jobs.lines import LineSettings
        from ..jobs.prompt_sets import evaluation_texts
        from ..training.texts import read_documents, split

        def tokenizer():
            return loaded.tokenizer

        given: list[str] = []
        if self.prompts is not None:
            vocab_size = loaded.target.config.get_text_config(decoder=True).vocab_size
            lines = read_batch(self.prompts, LineSettings(), vocab_size, tokenizer=tokenizer)
            given = [line.prompt for line in lines]
        documents = [text for path in self.data for text in read_documents(path, tokenizer, given)]
        aside = None if self.held_out is None else read_documents(self.held_out, tokenizer)
        return split(documents, evaluation_texts(), aside)


@dataclass(frozen=True)
class HowOptions:
    """How"""

    loss: str = option(...)
    steps: int = option(1000, "Updates of the weights.")
    rate: float = option(1e-3, "The peak learning rate.")
    warm_up: int = option(50, "Steps until it is reached.")
    precision: str = option("no", "bf16: matrices in bfloat16; no: float32.")
    seed: int = option(0, "Of the order of texts, and all else.")


@dataclass(frozen=True)
class TrainedOptions:
    """Results"""

    output: Path = option(..., "The folder of the result. The same command goes on where it stopped.")
    output_dtype: str = option("bfloat16", "Of the saved weights: bfloat16, float16, float32.")
    every: int = option(100, "Steps between two judgements and checkpoints.")
    num_drafts: int = option(4, "K, for alpha and tau.", *drafting.K)
    judged: int = option(32, "Held-out prompts that it is judged by.")
    source: str = option("not said", "Where the data is from, for the model card.")
    licence: str = option("not said", "Of the data, for the model card.")
    tensorboard: bool = option(
        False, "Write the log for it, too: tensorboard --logdir OUTPUT/training", "--tensorboard"
    )
    as_json: bool = as_json()

    def card(self, target: str | None, start: str) -> Card:
        from ..training.model_card import Card

        command = shlex.join(["specdec", *sys.argv[1:]])
        return Card(target or "the embedded target", start, self.source, self.licence, command)

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Errors that end a training, and leave its last checkpoint as it was, end the command with a line that says
        so."""
        from ..line_file import WriteError
        from ..training.trainer import Diverged

        try:
            yield
        except (Diverged, OSError, WriteError) as error:
            if isinstance(error, OSError) and error.errno is None:  # about an argument
                raise
            told = f"stopped: {error}. What there was is in {str(self.output)!r}; the same command goes on"
            remark(told, "red")
            raise typer.Exit(STOPPED) from error

    def logging(self) -> AbstractContextManager[Logged]:
        """What is to be called with each line of the log."""
        if not self.tensorboard:
            return nullcontext(lambda row: None)
        from ..training.curves import board

        return board(self.output)

    def show(self, done: Any, show: Callable[[Any, int], None]) -> None:
        """Prints what came of a training, by ``show`` if not as JSON. None: it was stopped, which ends the command."""
        if done is None:
            remark(f"stopped; the same command goes on from here ({str(self.output)!r})")
            raise typer.Exit(130)
        if self.as_json:
            typer.echo(json.dumps(done.to_dict()))
        else:
            show(done, self.num_drafts)


def settings(texts: LessonOptions, how: HowOptions, results: TrainedOptions, **others: Any) -> DistillSettings:
    """``others`` are settings that only one of the commands has."""
    from ..training.distill import read_loss, read_text
    from ..training.settings import DistillSettings, TrainSettings

    of_training = {name: others.pop(name) for name in ("gradient_checkpointing",) if name in others}
    train = TrainSettings(
        read_loss(how.loss),
        **{name: getattr(how, name) for name in ("steps", "rate", "warm_up", "precision", "seed")},
        **{name: getattr(results, name) for name in ("every", "num_drafts")},
        **of_training,
    )
    return DistillSettings(
        train,
        read_text(texts.text),
        **{name: getattr(texts, name) for name in ("batch_size", "length", "temperature")},
        **{name: getattr(results, name) for name in ("output_dtype", "judged")},
        **others,
    )

"""What the commands that train share: options, the texts, and how a training ends."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from . import drafting, models
from .option_groups import option
from .options import MachineOptions, as_json
from .own_texts import OwnTexts, fast_bfloat16
from .terminal import remark
from .user_errors import refuse

if TYPE_CHECKING:
    from ..jobs.questions import Question
    from ..training.held_out import Worth
    from ..training.model_card import Card
    from ..training.settings import DistillSettings
    from ..training.texts import Corpus

EVENING = 120  # minutes
MOST_STEPS, ROUNDS = 100_000, 12  # of a training that minutes limit; how often it sees each text at most
OF_TARGET = "texts that the target wrote itself, from prompts that specdec has"
NOTHING = 0.05  # an alpha with which no draft is worth its time
STOPPED = 1  # the exit code of a training that an error ended
Target = Annotated[
    str | None, typer.Argument(help="Folder, hub name or GGUF file. Default: the embedded target.", show_default=False)
]


def used(covered: float) -> str:
    """What help says of a vocabulary that nobody chose."""
    return f"0; without --data: those that are {covered:.1%} of the texts"


@dataclass(frozen=True)
class LessonOptions:
    """What it learns from"""

    data: list[Path] | None = option(
        None,
        "Default: texts that the target writes, from built-in prompts. Repeatable: .jsonl or .parquet with text, "
        "messages, or prompt and completion; results of specdec generate "
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

    def check(self) -> None:
        if not self.data and self.prompts is not None:
            refuse("--prompts", "--prompts without --data", "both, or neither: texts that the target writes")

    def written(self, own: OwnTexts) -> LessonOptions:
        """These options with data: what is given, or else the target's own texts, which it writes now."""
        if self.data:
            return self
        own.write()
        return replace(self, data=[own.texts], prompts=own.prompts)

    def judging(self, loaded: models.Models, count: int) -> list[list[int]] | None:
        """Prompts to judge by that are no beginnings of held-out texts: for a target that chats and writes its own
        texts, so many of the built-in set of conversations, those of all kinds alike. No text has one of them."""
        from ..jobs.prompt_sets import prompt_set

        if self.data or self.held_out is not None or not loaded.tokenizer.chat_template:
            return None
        questions = [q.as_message(loaded.tokenizer) for q in prompt_set("instruct", loaded.tokenizer)]
        kinds: dict[str, list[Question]] = {}
        for question in questions:
            kinds.setdefault(question.category, []).append(question)
        in_turn = [q for each in zip_longest(*kinds.values()) for q in each if q is not None]
        return [q.tokens(loaded.tokenizer) for q in in_turn[:count]]

    def corpus(self, loaded: models.Models) -> Corpus:
        from ..jobs.input import read_batch
        from ..jobs.lines import LineReader, LineSettings
        from ..jobs.prompt_sets import evaluation_texts
        from ..training.texts import read_documents, split

        def tokenizer():
            return loaded.tokenizer

        given: list[str] = []
        if self.prompts is not None:
            vocab_size = loaded.target.config.get_text_config(decoder=True).vocab_size
            lines = read_batch(LineReader(self.prompts, LineSettings(), vocab_size, tokenizer=tokenizer))
            given = [line.prompt for line in lines]
        documents = [text for path in self.data or () for text in read_documents(path, tokenizer, given)]
        aside = None if self.held_out is None else read_documents(self.held_out, tokenizer)
        return split(documents, evaluation_texts(), aside)


@dataclass(frozen=True)
class HowOptions:
    """How"""

    loss: str = option(...)
    steps: int | None = option(
        None, "Updates of the weights.", show_default="1000; with --minutes as many as there is time for"
    )
    minutes: float | None = option(
        None,
        "That it may take on this machine. Without --data, a half is for the texts that the target writes.",
        show_default=f"no limit; {EVENING} without --data",
    )
    rate: float = option(1e-3, "The peak learning rate.")
    warm_up: int = option(50, "Steps until it is reached.")
    precision: str | None = option(
        None, "bf16: matrices in bfloat16; no: float32.", show_default="no; without --data: what is faster here"
    )
    seed: int = option(0, "Of the order of texts, and all else.")

    def limit(self, own: bool) -> float | None:
        """Minutes of all, with ``own`` texts or given ones."""
        if self.minutes is not None and not 0 < self.minutes < float("inf"):
            refuse("--minutes", self.minutes, "a number > 0")
        return EVENING if own and self.minutes is None else self.minutes


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
    as_json: bool = as_json()

    @property
    def folder(self) -> Path:
        """Of what is not finished."""
        return self.output / "training"

    def card(self, target: str | None, start: str, own: bool) -> Card:
        """Of a training with ``own`` texts of the target, or given ones."""
        from ..training.model_card import NOT_SAID, Card

        command = shlex.join(["specdec", *map(_name, sys.argv[1:])])
        source = OF_TARGET if own and self.source == NOT_SAID else self.source
        return Card(_name(target or "the embedded target"), start, source, self.licence, command)

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

    def show(self, done: Any, show: Callable[[Any, int], None]) -> None:
        """Prints what came of a training, by ``show`` if not as JSON. None: it was stopped, which ends the command."""
        if done is None:
            remark(f"stopped; the same command goes on from here ({str(self.output)!r})")
            raise typer.Exit(130)
        if self.as_json:
            typer.echo(json.dumps(done.to_dict()))
        else:
            show(done, self.num_drafts)


def _name(given: str) -> str:
    """What it is called elsewhere: of a folder or file the last part."""
    return Path(given).resolve().name if Path(given).exists() else given


def tell_next(target: str | None, option: str, output: Path, worths: Sequence[Worth]) -> None:
    """Prints the command that uses what was trained for a ``target`` of the user's, or what to do where it drafts
    nothing yet."""
    greedy = next(worth.alpha for worth in worths if worth.temperature == 0)
    if greedy < NOTHING:
        more = "more --steps or --minutes, and with --data more texts, into another --output"
        remark(f"it drafts nothing yet: greedily alpha is {greedy:.3f}. It has learned too little: {more}", "red")
    elif target is not None:
        remark(f"next: {shlex.join(['specdec', 'generate', '...', '--target', target, option, str(output)])}")


def settings(
    texts: LessonOptions, how: HowOptions, results: TrainedOptions, machine: MachineOptions, **others: Any
) -> DistillSettings:
    """``others`` are settings that only one of the commands has."""
    from ..training.distill import read_loss, read_text
    from ..training.settings import DistillSettings

    minutes, own = how.limit(not texts.data), not texts.data
    return DistillSettings(
        loss=read_loss(how.loss),
        text=read_text(texts.text),
        steps=(1000 if minutes is None else MOST_STEPS) if how.steps is None else how.steps,
        minutes=_of_training(how, minutes, own),
        precision=how.precision or ("bf16" if own and fast_bfloat16(machine) else "no"),
        **{name: getattr(how, name) for name in ("rate", "warm_up", "seed")},
        **{name: getattr(texts, name) for name in ("batch_size", "length", "temperature")},
        **{name: getattr(results, name) for name in ("every", "num_drafts", "output_dtype", "judged")},
        **others,
    )


def _of_training(how: HowOptions, minutes: float | None, own: bool) -> float | None:
    """The minutes that are left for the training itself. With ``own`` texts and a number of steps, minutes are for the
    texts alone."""
    if minutes is None or not own:
        return minutes
    return minutes / 2 if how.steps is None else None


def fitted(run: DistillSettings, loaded: models.Models, corpus: Corpus, covered: float | None) -> DistillSettings:
    """``run`` for texts that the target wrote: no more steps than see each of them ROUNDS times, and the vocabulary
    that is this share of them, if one is wanted."""
    import torch

    from ..training.lessons import encoded
    from ..training.reduced_vocabulary import covering

    tokens = torch.tensor([token for text in encoded(loaded.tokenizer, corpus.training) for token in text])
    most = max(1, ROUNDS * len(tokens) // (run.batch_size * run.length))
    run = run if run.minutes is None else replace(run, steps=min(run.steps, most))
    if covered is None:
        return run
    vocabulary, whole = covering(tokens, covered), loaded.target.config.get_text_config(decoder=True).vocab_size
    return replace(run, vocabulary=vocabulary if vocabulary < whole else run.vocabulary)

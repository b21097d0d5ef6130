"""``specdec distill``: trains a draft for a target."""

from __future__ import annotations

import json
import shlex
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar

import typer

from . import models, options
from .bench import BUILT_IN
from .grouped import GroupedCommand
from .layout import print_table
from .options import refuse
from .progress import progress
from .terminal import remark

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from ..training.settings import Distilled
    from ..training.texts import Corpus

NO_SPACE = 1  # the exit code of a training that stopped before its end


class DistillCommand(GroupedCommand):
    groups: ClassVar[dict[str, tuple[str, ...]]] = {
        "The draft": ("draft", "layers", "intermediate", "config", "vocabulary", "lora"),
        "What it learns from": ("data", "held_out", "text", "batch_size", "length", "temperature", "cache_logits"),
        "How": ("loss", "steps", "rate", "warm_up", "precision", "gradient_checkpointing", "seed"),
        "Results": ("output", "output_dtype", "every", "num_drafts", "judged", "source", "licence", "as_json"),
        "Machine": ("device", "dtype"),
    }


def distill(
    data: Annotated[
        list[Path],
        typer.Option(
            help="Repeatable: .jsonl or .parquet with text, messages, or prompt and completion; a folder of datasets' "
            "save_to_disk; any other file is one text."
        ),
    ],
    output: Annotated[Path, typer.Option(help="The folder of the draft. The same command goes on where it stopped.")],
    target: Annotated[
        str | None, typer.Argument(help="Folder or hub name. Default: the embedded target.", show_default=False)
    ] = None,
    draft: Annotated[
        str | None, typer.Option(help="A draft that exists. Default: the embedded pair's; else choose --layers.")
    ] = None,
    layers: Annotated[
        int | None, typer.Option(help="A new draft of so many of the target's layers, with its embedding and head.")
    ] = None,
    intermediate: Annotated[int | None, typer.Option(help="With --layers: neurons that each MLP keeps.")] = None,
    config: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A new draft of random weights, by this config.json.")
    ] = None,
    vocabulary: Annotated[
        int, typer.Option(metavar="N", help="Let it draft only the N most frequent tokens of the data; 0: all.")
    ] = 0,
    lora: Annotated[int, typer.Option(help="Train adapters of this rank, which are merged at the end; 0: all.")] = 0,
    held_out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Texts to judge by. Default: about 3 % of --data.")
    ] = None,
    text: Annotated[
        str,
        typer.Option(
            help="Learn from data, target (texts that it writes), draft (texts of its own): target:0.5,data:0.5"
        ),
    ] = "data",
    loss: Annotated[
        str, typer.Option(help="data, forward_kl, reverse_kl, total_variation, or a mixture: forward_kl:0.9,data:0.1")
    ] = "total_variation",
    batch_size: Annotated[int, typer.Option(help="Texts of a step.")] = 4,
    length: Annotated[int, typer.Option(help="Tokens of a text.")] = 256,
    temperature: Annotated[float, typer.Option(help="At which texts are written.")] = 1.0,
    cache_logits: Annotated[
        int, typer.Option(metavar="N", help="Compute the target's N most likely tokens of the data once; 0: each time.")
    ] = 0,
    steps: Annotated[int, typer.Option(help="Updates of the weights.")] = 1000,
    rate: Annotated[float, typer.Option(help="The peak learning rate.")] = 1e-3,
    warm_up: Annotated[int, typer.Option(help="Steps until it is reached.")] = 50,
    precision: Annotated[str, typer.Option(help="bf16: matrices in bfloat16; no: float32.")] = "no",
    gradient_checkpointing: Annotated[
        bool, typer.Option("--gradient-checkpointing", help="Less memory, more time.")
    ] = False,
    seed: Annotated[int, typer.Option(help="Of the order of texts, and all else.")] = 0,
    every: Annotated[int, typer.Option(help="Steps between two judgements and checkpoints.")] = 100,
    num_drafts: Annotated[int, typer.Option("--num-drafts", "-k", help="K, for tau.")] = 4,
    judged: Annotated[int, typer.Option(help="Held-out prompts that it is judged by.")] = 32,
    output_dtype: Annotated[str, typer.Option(help="Of the saved weights: bfloat16, float16, float32.")] = "bfloat16",
    source: Annotated[str, typer.Option(help="Where the data is from, for the model card.")] = "not said",
    licence: Annotated[str, typer.Option(help="Of the data, for the model card.")] = "not said",
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
    device: options.Device = None,
    dtype: options.Dtype = None,
) -> None:
    """Trains a draft for TARGET, so that more of its tokens are accepted: one that exists, one cut from the target's
    layers, or a new one. On one GPU, or, for small models, a CPU. docs/training.md says which loss and text to take.

    It can be stopped by Ctrl-C or killed at any time: the same command goes on from the last checkpoint."""
    starts = [("--draft", draft), ("--layers", layers), ("--config", config)]
    given = [name for name, value in starts if value is not None]
    if len(given) > 1:
        refuse(" / ".join(given), "several", "one of them")
    if not given and target is not None:
        refuse("--draft", "none", "--draft, --layers or --config, with a target")
    if intermediate is not None and layers is None:
        refuse("--intermediate", intermediate, "it with --layers")
    with options.user_errors(), progress("loading models") as show, stop_once() as stopped:
        from ..training.card import Card
        from ..training.distill import distill as train
        from ..training.distill import read_loss, read_text
        from ..training.settings import DistillSettings, TrainSettings
        from ..training.trainer import Diverged

        settings = DistillSettings(
            TrainSettings(
                read_loss(loss), steps, rate, warm_up, precision, gradient_checkpointing, every, num_drafts, seed
            ),
            read_text(text),
            batch_size,
            length,
            temperature=temperature,
            cache_logits=cache_logits,
            vocabulary=vocabulary,
            lora=lora,
            output_dtype=output_dtype,
            judged=judged,
        )
        loaded = models.load(target, None, [], device, dtype)
        corpus = read_corpus(data, held_out, loaded)
        start, said = _start(loaded, draft, layers, intermediate, config, seed)
        name = target or "the embedded target"
        card = Card(name, said, source, licence, shlex.join(["specdec", *sys.argv[1:]]))
        try:
            done = train(loaded.target, start, loaded.tokenizer, corpus, settings, output, show, stopped, card, remark)
        except (Diverged, OSError) as error:
            if isinstance(error, OSError) and error.errno is None:
                raise
            remark(f"stopped: {error}. What there was is in {str(output)!r}; the same command goes on", "red")
            raise typer.Exit(NO_SPACE) from error
    if done is None:
        remark(f"stopped; the same command goes on from here ({str(output)!r})")
        raise typer.Exit(130)
    _picture(output)
    if as_json:
        typer.echo(json.dumps(done.to_dict()))
        return
    _print(done, num_drafts)
    remark(f"the draft of step {done.best_step} is in {str(output)!r}, with its model card")


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


def read_corpus(data: Sequence[Path], held_out: Path | None, loaded: models.Models) -> Corpus:
    from ..jobs.questions import read_questions
    from ..training.texts import read_documents, split

    def tokenizer():
        return loaded.tokenizer

    documents = [text for path in data for text in read_documents(path, tokenizer)]
    aside = None if held_out is None else read_documents(held_out, tokenizer)
    return split(documents, [question.prompt for question in read_questions(BUILT_IN)], aside)


def _start(
    loaded: models.Models,
    draft: str | None,
    layers: int | None,
    intermediate: int | None,
    config: Path | None,
    seed: int,
) -> tuple[PreTrainedModel, str]:
    """The draft before its training, and what it is."""
    from ..models.loading import load_model
    from ..training import starts

    if layers is not None:
        narrow = "" if intermediate is None else f", with MLPs of {intermediate} neurons"
        return starts.cut(loaded.target, layers, intermediate), f"{layers} layers of the target{narrow}"
    if config is not None:
        return starts.fresh(loaded.target, config, seed), f"random weights by {config.name}"
    if draft is not None:
        return load_model(draft, "float32", loaded.target.device, name="draft"), draft
    assert loaded.draft is not None  # of the embedded pair
    return loaded.draft.float(), "the embedded draft"


def _picture(output: Path) -> None:
    from ..training.curves import NoMatplotlib, draw

    try:
        draw(output)
    except NoMatplotlib:
        remark('no picture of the curves without matplotlib: pip install -e ".[train]"')
    except OSError as error:  # the draft itself is saved
        remark(f"no picture of the curves: {error}", "red")


def _print(done: Distilled, k: int) -> None:
    columns = ("temperature", "alpha before", "alpha", f"tau before\n(K = {k})", "tau")
    print_table(
        columns,
        [
            (f"{a.temperature:g}", f"{b.alpha:.3f}", f"{a.alpha:.3f}", f"{b.tau:.2f}", f"{a.tau:.2f}")
            for b, a in zip(done.before, done.after, strict=True)
        ],
    )

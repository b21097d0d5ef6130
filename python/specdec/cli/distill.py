"""``specdec distill``: trains a draft for a target."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar

import typer

from . import models, options, training
from .grouped import GroupedCommand
from .layout import print_table
from .options import refuse
from .progress import progress
from .terminal import remark

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from ..training.settings import Distilled


class DistillCommand(GroupedCommand):
    groups: ClassVar[dict[str, tuple[str, ...]]] = {
        "The draft": ("draft", "layers", "intermediate", "config", "vocabulary", "lora"),
        "What it learns from": (*training.TEXTS, "cache_logits"),
        "How": ("loss", "steps", "rate", "warm_up", "precision", "gradient_checkpointing", "seed"),
        "Results": ("output", *training.RESULTS),
        "Machine": ("device", "dtype"),
    }


def distill(
    data: training.Data,
    output: Annotated[Path, typer.Option(help="The folder of the draft. The same command goes on where it stopped.")],
    target: training.Target = None,
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
    prompts: training.Prompts = None,
    held_out: training.HeldOut = None,
    text: Annotated[
        str,
        typer.Option(
            help="Learn from data, target (texts that it writes), draft (texts of its own): target:0.5,data:0.5"
        ),
    ] = "data",
    loss: Annotated[
        str, typer.Option(help="data, forward_kl, reverse_kl, total_variation, or a mixture: forward_kl:0.9,data:0.1")
    ] = "total_variation",
    batch_size: training.BatchSize = 4,
    length: training.Length = 256,
    temperature: training.TextTemperature = 1.0,
    cache_logits: Annotated[
        int, typer.Option(metavar="N", help="Compute the target's N most likely tokens of the data once; 0: each time.")
    ] = 0,
    steps: training.Steps = 1000,
    rate: training.Rate = 1e-3,
    warm_up: training.WarmUp = 50,
    precision: training.Precision = "no",
    gradient_checkpointing: Annotated[
        bool, typer.Option("--gradient-checkpointing", help="Less memory, more time.")
    ] = False,
    seed: Annotated[int, typer.Option(help="Of the order of texts, and all else.")] = 0,
    every: training.Every = 100,
    num_drafts: Annotated[int, typer.Option("--num-drafts", "-k", help="K, for tau.")] = 4,
    judged: training.Judged = 32,
    output_dtype: training.OutputDtype = "bfloat16",
    source: training.Source = "not said",
    licence: training.Licence = "not said",
    tensorboard: training.TensorBoard = False,
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
    with options.user_errors(), progress("loading models") as show, training.stop_once() as stopped:
        from ..training.distill import distill as train
        from ..training.distill import read_loss, read_text
        from ..training.model_card import Card
        from ..training.settings import DistillSettings, TrainSettings
        from ..training.trainer import Watch

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
        corpus = training.read_corpus(data, prompts, held_out, loaded)
        start, said = _start(loaded, draft, layers, intermediate, config, seed)
        name = target or "the embedded target"
        card = Card(name, said, source, licence, shlex.join(["specdec", *sys.argv[1:]]))
        pair = (loaded.target, start, loaded.tokenizer)
        with training.kept(output), training.logging(tensorboard, output) as logged:
            done = train(*pair, corpus, settings, output, card, Watch(show, stopped, logged, remark))
    if done is None:
        remark(f"stopped; the same command goes on from here ({str(output)!r})")
        raise typer.Exit(130)
    _picture(output)
    if as_json:
        typer.echo(json.dumps(done.to_dict()))
        return
    _print(done, num_drafts)
    remark(f"the draft of step {done.best_step} is in {str(output)!r}, with its model card")


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

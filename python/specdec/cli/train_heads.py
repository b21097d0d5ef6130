"""``specdec train-heads``: trains a head for a target."""

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
from .progress import progress
from .terminal import remark

if TYPE_CHECKING:
    from ..training.head_settings import TrainedHead

HARDLY_DRAFTS = 1  # the exit code of a training whose head the self-check warns of


class TrainHeadsCommand(GroupedCommand):
    groups: ClassVar[dict[str, tuple[str, ...]]] = {
        "The head": ("kind", "depth", "layers", "layer_ids", "vocabulary"),
        "What it learns from": (*training.TEXTS, "cache_features"),
        "How": ("loss", "steps", "rate", "warm_up", "precision", "seed"),
        "Results": ("output", "format_", *training.RESULTS),
        "Machine": ("device", "dtype"),
    }


def train_heads(
    kind: Annotated[str, typer.Option(help="medusa, eagle3, dflash, or mtp, for targets of type qwen2 or mimo.")],
    data: training.Data,
    output: Annotated[Path, typer.Option(help="The folder of the head. The same command goes on where it stopped.")],
    target: training.Target = None,
    depth: Annotated[int, typer.Option(help="Drafts that it learns to make in a step; Medusa: its heads.")] = 4,
    layers: Annotated[int | None, typer.Option(help="Of DFlash.", show_default="2")] = None,
    layer_ids: Annotated[
        str | None,
        typer.Option(
            metavar="IDS",
            help="Hidden states that EAGLE-3 and DFlash read, as transformers counts them: 2,16,29. Default: their "
            "formats' usual ones.",
        ),
    ] = None,
    vocabulary: Annotated[
        int, typer.Option(metavar="N", help="EAGLE-3 drafts the N most frequent tokens of the data alone; 0: all.")
    ] = 0,
    prompts: training.Prompts = None,
    held_out: training.HeldOut = None,
    text: Annotated[
        str, typer.Option(help="Learn from data, target (texts that it writes), or both: target:0.5,data:0.5")
    ] = "data",
    batch_size: training.BatchSize = 4,
    length: training.Length = 256,
    temperature: training.TextTemperature = 1.0,
    cache_features: Annotated[
        bool,
        typer.Option("--cache-features", help="Compute the target's hidden states in the data once, and keep them."),
    ] = False,
    loss: Annotated[str, typer.Option(help="forward_kl, reverse_kl, total_variation, or a mixture.")] = "forward_kl",
    steps: training.Steps = 1000,
    rate: training.Rate = 1e-3,
    warm_up: training.WarmUp = 50,
    precision: training.Precision = "no",
    seed: Annotated[int, typer.Option(help="Of the first weights, the order of texts, and all else.")] = 0,
    format_: Annotated[str, typer.Option("--format", help="Of the files: published, or speculators.")] = "published",
    output_dtype: training.OutputDtype = "bfloat16",
    every: training.Every = 100,
    num_drafts: Annotated[int, typer.Option("--num-drafts", "-k", help="K, for alpha and tau.")] = 4,
    judged: training.Judged = 32,
    source: training.Source = "not said",
    licence: training.Licence = "not said",
    tensorboard: training.TensorBoard = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
    device: options.Device = None,
    dtype: options.Dtype = None,
) -> None:
    """Trains a head for TARGET: a small network that reads its hidden states and proposes tokens. --drafter FOLDER then
    drafts with it. On one GPU, or, for small models, a CPU.

    It can be stopped by Ctrl-C or killed at any time: the same command goes on from the last checkpoint. At the end the
    files are loaded back and tried; exit code 1 says that the head hardly drafts."""
    ids = None if layer_ids is None else (*options.read_counts("--layer-ids", layer_ids, 0),)
    with options.user_errors(), progress("loading models") as show, training.stop_once() as stopped:
        from ..training.distill import read_loss, read_text
        from ..training.head_settings import HeadSettings
        from ..training.model_card import Card
        from ..training.settings import DistillSettings, TrainSettings
        from ..training.train_heads import train_head
        from ..training.trainer import Watch

        train = TrainSettings(
            read_loss(loss), steps, rate, warm_up, precision, every=every, num_drafts=num_drafts, seed=seed
        )
        run = DistillSettings(
            train,
            read_text(text),
            batch_size,
            length,
            temperature=temperature,
            vocabulary=vocabulary,
            output_dtype=output_dtype,
            judged=judged,
        )
        settings = HeadSettings(kind, run, depth, layers, ids, cache_features, format_)
        loaded = models.load(target, None, [], device, dtype)
        corpus = training.read_corpus(data, prompts, held_out, loaded)
        card = Card(target or "the embedded target", kind, source, licence, shlex.join(["specdec", *sys.argv[1:]]))
        with training.kept(output), training.logging(tensorboard, output) as logged:
            watch = Watch(show, stopped, logged)
            done = train_head(loaded.target, loaded.tokenizer, corpus, settings, output, card, watch)
    if done is None:
        remark(f"stopped; the same command goes on from here ({str(output)!r})")
        raise typer.Exit(130)
    if as_json:
        typer.echo(json.dumps(done.to_dict()))
    else:
        _print(done, num_drafts)
    if done.trouble is not None:
        remark(f"the self-check failed: {done.trouble}", "red")
        raise typer.Exit(HARDLY_DRAFTS)
    remark(f"the head of step {done.best_step} is in {str(output)!r}, with its model card")


def _print(done: TrainedHead, k: int) -> None:
    columns = ("temperature", "alpha", f"tau\n(K = {k})")
    print_table(columns, [(f"{w.temperature:g}", f"{w.alpha:.3f}", f"{w.tau:.2f}") for w in done.after])

"""``specdec train-heads``: trains a head for a target."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar

import typer

from . import models, options
from .distill import NO_SPACE, read_corpus, stop_once
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
        "What it learns from": ("data", "held_out", "text", "batch_size", "length", "temperature", "cache_features"),
        "How": ("loss", "steps", "rate", "warm_up", "precision", "seed"),
        "Results": (
            *("output", "format_", "output_dtype", "every", "num_drafts", "judged", "source", "licence", "as_json"),
        ),
        "Machine": ("device", "dtype"),
    }


def train_heads(
    kind: Annotated[str, typer.Option(help="medusa, eagle3, dflash, or mtp, for targets of type qwen2 or mimo.")],
    data: Annotated[
        list[Path],
        typer.Option(
            help="Repeatable: .jsonl or .parquet with text, messages, or prompt and completion; a folder of datasets' "
            "save_to_disk; any other file is one text."
        ),
    ],
    output: Annotated[Path, typer.Option(help="The folder of the head. The same command goes on where it stopped.")],
    target: Annotated[
        str | None, typer.Argument(help="Folder or hub name. Default: the embedded target.", show_default=False)
    ] = None,
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
    held_out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Texts to judge by. Default: about 3 % of --data.")
    ] = None,
    text: Annotated[
        str, typer.Option(help="Learn from data, target (texts that it writes), or both: target:0.5,data:0.5")
    ] = "data",
    batch_size: Annotated[int, typer.Option(help="Texts of a step.")] = 4,
    length: Annotated[int, typer.Option(help="Tokens of a text.")] = 256,
    temperature: Annotated[float, typer.Option(help="At which texts are written.")] = 1.0,
    cache_features: Annotated[
        bool,
        typer.Option("--cache-features", help="Compute the target's hidden states in the data once, and keep them."),
    ] = False,
    loss: Annotated[str, typer.Option(help="forward_kl, reverse_kl, total_variation, or a mixture.")] = "forward_kl",
    steps: Annotated[int, typer.Option(help="Updates of the weights.")] = 1000,
    rate: Annotated[float, typer.Option(help="The peak learning rate.")] = 1e-3,
    warm_up: Annotated[int, typer.Option(help="Steps until it is reached.")] = 50,
    precision: Annotated[str, typer.Option(help="bf16: matrices in bfloat16; no: float32.")] = "no",
    seed: Annotated[int, typer.Option(help="Of the first weights, the order of texts, and all else.")] = 0,
    format_: Annotated[str, typer.Option("--format", help="Of the files: published, or speculators.")] = "published",
    output_dtype: Annotated[str, typer.Option(help="Of the saved weights: bfloat16, float16, float32.")] = "bfloat16",
    every: Annotated[int, typer.Option(help="Steps between two judgements and checkpoints.")] = 100,
    num_drafts: Annotated[int, typer.Option("--num-drafts", "-k", help="K, for alpha and tau.")] = 4,
    judged: Annotated[int, typer.Option(help="Held-out prompts that it is judged by.")] = 32,
    source: Annotated[str, typer.Option(help="Where the data is from, for the model card.")] = "not said",
    licence: Annotated[str, typer.Option(help="Of the data, for the model card.")] = "not said",
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
    device: options.Device = None,
    dtype: options.Dtype = None,
) -> None:
    """Trains a head for TARGET: a small network that reads its hidden states and proposes tokens. --drafter FOLDER then
    drafts with it. On one GPU, or, for small models, a CPU.

    It can be stopped by Ctrl-C or killed at any time: the same command goes on from the last checkpoint. At the end the
    files are loaded back and tried; exit code 1 says that the head hardly drafts."""
    ids = None if layer_ids is None else (*options.read_counts("--layer-ids", layer_ids, 0),)
    with options.user_errors(), progress("loading models") as show, stop_once() as stopped:
        from ..line_file import WriteError
        from ..training.card import Card
        from ..training.distill import read_loss, read_text
        from ..training.head_settings import HeadSettings
        from ..training.settings import DistillSettings, TrainSettings
        from ..training.train_heads import train_head
        from ..training.trainer import Diverged

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
        corpus = read_corpus(data, held_out, loaded)
        card = Card(target or "the embedded target", kind, source, licence, shlex.join(["specdec", *sys.argv[1:]]))
        try:
            done = train_head(loaded.target, loaded.tokenizer, corpus, settings, output, show, stopped, card)
        except (Diverged, OSError, WriteError) as error:
            if isinstance(error, OSError) and error.errno is None:
                raise
            remark(f"stopped: {error}. What there was is in {str(output)!r}; the same command goes on", "red")
            raise typer.Exit(NO_SPACE) from error
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

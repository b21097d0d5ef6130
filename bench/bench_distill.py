"""What each loss and each kind of text is worth: drafts from the same start, trained for as many steps.

    python bench/bench_distill.py --json bench/results/cpu/distill.json

docs/training.md has the table.
"""

from __future__ import annotations

import copy
import dataclasses
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Annotated

import report
import torch
import typer
from specdec import load_embedded_pair
from specdec.training.distill import distill, read_loss, read_text
from specdec.training.settings import DistillSettings, TrainSettings
from specdec.training.starts import cut
from specdec.training.texts import Corpus

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tools"))
from standard_library import corpus as standard_library  # noqa: E402  a script, of the folder above

CPU = torch.device("cpu")
METHODS = {  # loss, text, and how many tokens of the vocabulary the draft keeps (0: all)
    "data only": ("data", "data", 0),
    "forward KL": ("forward_kl", "data", 0),
    "reverse KL": ("reverse_kl", "data", 0),
    "total variation": ("total_variation", "data", 0),
    "total variation, every second step on the target's own texts": ("total_variation", "data:0.5,target:0.5", 0),
    "total variation, every second step on-policy": ("total_variation", "data:0.5,draft:0.5", 0),
    "total variation, a quarter of the vocabulary": ("total_variation", "data", 1024),
}
LAYERS = 2  # of the start, out of the target's 16


def corpus_of(quick: bool) -> Corpus:
    """The Python standard library, or a little of it."""
    training, held_out = standard_library()
    return Corpus(training[:20] if quick else training, held_out, 0, 0)


def main(
    methods: Annotated[str | None, typer.Option(help=f"separated by semicolons; of {'; '.join(METHODS)}")] = None,
    steps: Annotated[int, typer.Option(min=1)] = 300,
    seeds: Annotated[int, typer.Option(min=1)] = 3,
    batch_size: Annotated[int, typer.Option(min=1, help="texts of a step")] = 4,
    length: Annotated[int, typer.Option(min=2, help="tokens of a text")] = 128,
    rate: float = 2e-3,
    judged: Annotated[int, typer.Option(min=1, help="held-out prompts")] = 64,
    threads: report.Threads = None,
    quick: report.Quick = False,
    json_path: report.JsonPath = None,
) -> None:
    """Trains a draft of 2 of the embedded target's layers in each way."""
    names = [*METHODS] if methods is None else methods.split(";")
    if unknown := [name for name in names if name not in METHODS]:
        report.refuse("methods", repr(unknown[0]), "; ".join(METHODS))
    if quick:
        names, steps, seeds, batch_size, length, judged = names[:1], 2, 1, 1, 48, 2
    target, _, tokenizer = load_embedded_pair()
    texts = corpus_of(quick)
    facts = {
        "steps": steps,
        "batch_size": batch_size,
        "length": length,
        "rate": rate,
        "layers": LAYERS,
        "judged": judged,
    }
    results = report.Report("distill", CPU, json_path, threads, quick=quick, seeds=seeds, **facts)
    start = cut(target, LAYERS).eval()
    for name in names:
        loss, text, vocabulary = METHODS[name]
        found = []
        for seed in range(seeds):
            train = TrainSettings(read_loss(loss), steps, rate, warm_up=20, every=max(steps // 4, 1), seed=seed)
            settings = DistillSettings(
                train,
                read_text(text),
                batch_size,
                length,
                vocabulary=vocabulary,
                judged=judged,
                output_dtype="float32",
            )
            with tempfile.TemporaryDirectory() as folder:
                done = distill(target, copy.deepcopy(start), tokenizer, texts, settings, Path(folder))
            assert done is not None
            found.append(done)
        row = {"method": name, "loss": loss, "text": text, "before": [dataclasses.asdict(w) for w in found[0].before]}
        results.add(row | {"seeds": [dataclasses.asdict(d) for d in found]})
        alphas = [statistics.mean(d.after[i].alpha for d in found) for i in (0, 1)]
        results.say({name: f"alpha {alphas[0]:.3f} greedy, {alphas[1]:.3f} at temperature 1"})
    results.finish()


if __name__ == "__main__":
    typer.run(main)

"""A picture of how a training went: the loss, and what the draft was worth."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ..checks import refuse
from .trainer import RUN, Logged, log_of

FILE = "curves.svg"
COLOURS = {0.0: "#0072b2", 1.0: "#d55e00"}  # Okabe and Ito's, which the colour-blind tell apart
MARKS = {0.0: "o", 1.0: "s"}


class NoMatplotlib(Exception):
    """It is not installed."""


def draw(folder: Path) -> Path:
    """Draws the log of the training in ``folder``, and returns the picture's path.

    Raises:
        NoMatplotlib: it is not installed.
        OSError: the picture cannot be written.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise NoMatplotlib
    from matplotlib.figure import Figure

    rows = log_of(folder)
    figure = Figure(figsize=(8, 3.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    learned = [row for row in rows if row["loss"] is not None]
    left.plot([row["step"] for row in learned], [row["loss"] for row in learned], color="#444444")
    left.set(xlabel="step", ylabel="mean loss")
    for i, first in enumerate(rows[0]["held_out"]):
        temperature = first["temperature"]
        values = [row["held_out"][i]["alpha"] for row in rows]
        style = {"color": COLOURS.get(temperature), "marker": MARKS.get(temperature), "markersize": 4}
        right.plot([row["step"] for row in rows], values, label=f"temperature {temperature:g}", **style)
    right.set(xlabel="step", ylabel="alpha, held-out")
    right.legend(frameon=False)
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.3)
    path = folder / FILE
    figure.savefig(path, metadata={"Date": None})
    return path


FOLDER = "tensorboard"


@contextmanager
def board(output: Path) -> Iterator[Logged]:
    """Inside the block, what it yields writes a line of the log as scalars, to ``output``/training/tensorboard. Of a
    training that goes on after it was killed, TensorBoard leaves out what comes again.

    Raises:
        ValueError: names ``tensorboard``, which is not installed.
        OSError: an event cannot be written.
    """
    if importlib.util.find_spec("tensorboard") is None:
        refuse("tensorboard", "True without it", "False, or: pip install tensorboard")
    from torch.utils.tensorboard import SummaryWriter

    writers: list[SummaryWriter] = []

    def write(row: dict[str, Any]) -> None:
        if not writers:
            writers.append(SummaryWriter(str(output / RUN / FOLDER), purge_step=row["step"]))
        for name, value in scalars(row).items():
            writers[0].add_scalar(name, value, row["step"])
        writers[0].flush()

    try:
        yield write
    finally:
        for writer in writers:
            writer.close()


def scalars(row: dict[str, Any]) -> dict[str, float]:
    """The numbers of a line of the log, by names whose first part is the group of a curve."""
    found = {} if row["loss"] is None else {"loss/mean": row["loss"]}
    for worth in row["held_out"]:
        for name in ("alpha", "tau"):
            found[f"{name}/temperature_{worth['temperature']:g}"] = worth[name]
    for name in ("hits", "training_hits"):  # of a head
        found |= {f"{name}/depth_{depth}": hit for depth, hit in enumerate(row.get(name, ()), 1)}
    return found

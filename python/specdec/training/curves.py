"""A picture of how a training went: the loss, and what the draft was worth."""

from __future__ import annotations

from pathlib import Path

from .trainer import log_of

FILE = "curves.svg"
COLOURS = {0.0: "#0072b2", 1.0: "#d55e00"}  # Okabe and Ito's, which the colour-blind tell apart
MARKS = {0.0: "o", 1.0: "s"}


def draw(folder: Path) -> Path:
    """Draws the log of the training in ``folder``, and returns the picture's path.

    Raises:
        ImportError: matplotlib is not installed.
        OSError: the picture cannot be written.
    """
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

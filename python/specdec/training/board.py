"""The log of a training for TensorBoard."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ..checks import refuse
from .distill import RUN
from .trainer import Logged

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

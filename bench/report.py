"""What a benchmark leaves after: a JSON file, and a table on the terminal."""

from __future__ import annotations

import datetime
import json
import shlex
import sys
from pathlib import Path

import torch
from machine import hardware, versions
from rich.console import Console
from rich.table import Table


class Report:
    """The JSON file. It is written anew after every row, so that a run cut short leaves what it has."""

    def __init__(self, benchmark: str, device: torch.device, path: Path | None, **more: object):
        self.path = path
        self.rows: list[dict] = []
        self.content: dict[str, object] = {
            "benchmark": benchmark,
            "complete": False,
            "command": shlex.join(["python", *sys.argv]),
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "device": device.type,
            "threads": torch.get_num_threads(),
            "hardware": hardware(device),
            "versions": versions(),
            **more,
            "rows": self.rows,
        }
        self._write()

    def add(self, row: dict[str, object]) -> None:
        self.rows.append(row)
        self._write()

    def replace(self, rows: list[dict], **more: object) -> None:
        """Other rows instead: what counts something while it runs."""
        self.rows[:] = rows
        self.content |= more
        self._write()

    def finish(self) -> None:
        self.content["complete"] = True
        self._write()

    def _write(self) -> None:
        if self.path is None:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        partial = self.path.with_name(self.path.name + ".partial")
        partial.write_text(json.dumps(self.content, indent=1) + "\n")
        partial.replace(self.path)


def terminal() -> Console:
    console = Console(stderr=True)
    return console if console.is_terminal else Console(stderr=True, width=220)  # a file has no width


def show_steps(console: Console, title: str, rows: list[dict], head: tuple[str, ...], floor: str) -> None:
    """One line a row: its ``head`` columns, every method's microseconds, and ours as multiples of a floor."""
    methods = list(dict.fromkeys(key for row in rows for key in row["seconds"]))
    floors = list(dict.fromkeys(key for row in rows for key in row["ratios"] if key.endswith(floor)))
    table = Table(*head, *methods, *floors, title=title)
    for row in rows:
        times = [row["seconds"].get(key) for key in methods]
        over = [row["ratios"].get(key) for key in floors]
        table.add_row(
            *(f"{row[key]:.2f}" if isinstance(row[key], float) else str(row[key]) for key in head),
            *("-" if t is None else f"{t['median'] * 1e6:.1f}" for t in times),
            *("-" if r is None else f"{r['median']:.2f}" for r in over),
        )
    console.print(table)
    reasons = {name: reason for row in rows for name, reason in row["unavailable"].items()}
    for name, reason in reasons.items():
        console.print(f"{name}: not measured in some rows: {reason}")

"""The JSON file that a benchmark writes, and the terminal that it prints tables on."""

from __future__ import annotations

import datetime
import json
import shlex
import sys
from collections.abc import Mapping, Sequence
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


def show_table(console: Console, title: str, rows: Sequence[Mapping], columns: Sequence[str]) -> None:
    """A line for each row. Of a summary it shows the median and the quartiles."""
    table = Table(*(column.replace("_", " ") for column in columns), title=title)
    for row in rows:
        table.add_row(*(_cell(row.get(column)) for column in columns))
    console.print(table)


def _cell(value: object) -> str:
    if isinstance(value, Mapping):
        return f"{value['median']:.4g} ({value['q1']:.4g} to {value['q3']:.4g})"
    return "-" if value is None else f"{value:.3g}" if isinstance(value, float) else str(value)

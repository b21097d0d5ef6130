"""The JSON file that a benchmark writes, and the terminal that it prints tables on."""

from __future__ import annotations

import datetime
import json
import shlex
import sys
from pathlib import Path

import torch
from machine import hardware, versions
from rich.console import Console


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

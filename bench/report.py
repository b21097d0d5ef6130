"""What all programs share: options of their command lines, the JSON file of results, and tables on the terminal."""

from __future__ import annotations

import datetime
import json
import shlex
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import torch
import typer
from machine import hardware, versions
from rich.console import Console
from rich.table import Table
from specdec.checks import refuse

DeviceName = Annotated[str, typer.Option("--device", help="cpu or cuda")]
Threads = Annotated[int | None, typer.Option(min=1, help="default: torch's")]
Quick = Annotated[
    bool, typer.Option(help="a smoke run: few small inputs, whatever sizes are asked for; no compiling of peers")
]
JsonPath = Annotated[Path | None, typer.Option("--json", help="where the results go")]


@contextmanager
def reading() -> Iterator[None]:
    """A ValueError, which names an option, ends the command with exit code 2."""
    try:
        yield
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


def read_device(name: str) -> torch.device:
    (name,) = read_names("device", name, ("cpu", "cuda"))
    if name == "cuda" and not torch.cuda.is_available():
        refuse("device", "'cuda', but torch finds no GPU here", "'cpu'")
    return torch.device(name)


def read_integers(name: str, text: str) -> list[int]:
    """Integers >= 1 separated by commas."""
    try:
        values = [int(part) for part in text.split(",")]
    except ValueError:
        values = []
    if not values or min(values) < 1:
        refuse(name, repr(text), "integers >= 1 separated by commas, such as 1,8")
    return values


def read_names(name: str, text: str, allowed: Iterable[str]) -> list[str]:
    """Names out of ``allowed``, separated by commas."""
    names, allowed = text.split(","), list(allowed)
    if unknown := [n for n in names if n not in allowed]:
        refuse(name, repr(unknown[0]), ", ".join(allowed))
    return names


class Report:
    """The JSON file. It is written anew after every row, so that a run cut short leaves what it has.

    Args:
        threads: how many torch shall use from now on; None: as many as before.
        more: further keys of the file.
    """

    def __init__(self, benchmark: str, device: torch.device, path: Path | None, threads: int | None, **more: object):
        if threads is not None:
            torch.set_num_threads(threads)
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
        self.console = Console(stderr=True)
        if not self.console.is_terminal:  # a file has no width
            self.console = Console(stderr=True, width=220)

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

    def show(self, title: str, rows: Sequence[Mapping], columns: Sequence[str]) -> None:
        """A table with a line for each row. Of a summary it shows the median and the quartiles."""
        table = Table(*(column.replace("_", " ") for column in columns), title=title)
        for row in rows:
            table.add_row(*(_cell(row.get(column)) for column in columns))
        self.console.print(table)

    def say(self, remarks: Mapping[str, object]) -> None:
        for name, value in remarks.items():
            self.console.print(f"{name}: {_cell(value)}")


def _cell(value: object) -> str:
    if isinstance(value, Mapping):
        return f"{value['median']:.4g} ({value['q1']:.4g} to {value['q3']:.4g})"
    return "-" if value is None else f"{value:.3g}" if isinstance(value, float) else str(value)

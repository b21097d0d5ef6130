"""The output of a job: one line for each result, and the state with which a job that was killed goes on."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..checks import differences
from ..line_file import LineFile, OutputError
from .manifest import read_settings, settings_path, write_settings
from .result_line import KEYS, OPTIONAL_KEYS

COUNTS = ("steps", "cut_steps", "emitted")
COUNTS_BY_POSITION = ("drafted_by_position", "tested_by_position", "accepted_by_position")


@dataclass
class Totals:
    """Sums over the lines of an output file."""

    ends: Counter[str] = field(default_factory=Counter)
    emitted: int = 0
    steps: int = 0
    drafted: int = 0
    accepted: int = 0

    @property
    def results(self) -> int:
        return self.ends.total()

    @property
    def tau(self) -> float:
        return self.emitted / self.steps if self.steps else 0.0

    @property
    def acceptance_rate(self) -> float:
        return self.accepted / self.drafted if self.drafted else 0.0

    def add(self, row: dict) -> None:
        stats = row["stats"]
        self.ends[row["finish_reason"]] += 1
        self.emitted += stats["emitted"]
        self.steps += stats["steps"]
        self.drafted += sum(stats["drafted_by_position"])
        self.accepted += sum(stats["accepted_by_position"])


class Results:
    """A locked output file and the results in it. Nothing is changed before :meth:`begin`.

    Args:
        path: of the file, which need not exist yet; its settings lie beside it.

    Raises:
        OutputError: it cannot be written, another process writes to it, or it holds something else than results, of
            which it names the line.
    """

    def __init__(self, path: Path):
        self.path = path
        self.totals = Totals()
        self.done: dict[str | int, int] = {}  # ids that have a result, and its line
        self.settings: dict | None = None  # with which the results were made; None where there are none
        self._lines = LineFile(path)
        try:
            self._read()
        except BaseException:
            self.close()
            raise

    def begin(self, settings: dict) -> None:
        """Makes the file ready for more lines: cuts off an incomplete last line, and writes the settings if they are
        new.

        Args:
            settings: of the job, as ``manifest.make_settings`` makes them.

        Raises:
            OutputError: the lines in the file were made with other settings, or the settings cannot be written.
        """
        if self.settings is not None:
            other = differences(self.settings["settings"], settings["settings"])
            if other:
                given = f"{str(self.path)!r}, whose results were made with other settings ({'; '.join(other)})"
                raise OutputError(f"got {given}, allowed: the same settings, or another file")
        if self.settings != settings:
            try:
                write_settings(self.path, settings)
            except OSError as error:
                where = str(error.filename or settings_path(self.path))
                raise OutputError(f"got {where!r} ({error.strerror}), allowed: a file that can be written") from error
            self.settings = settings
        self._lines.cut()

    def append(self, row: dict) -> None:
        """Writes one result, as a line of its own.

        Raises:
            WriteError: there is no room, or the disk failed; the file then ends with the line before.
        """
        self._lines.append(row)
        self.totals.add(row)

    def sync(self) -> None:
        """As :meth:`~specdec.line_file.LineFile.sync`."""
        self._lines.sync()

    def close(self) -> None:
        """Unlocks the file, and removes it if it was created and has no line."""
        if self._lines.useless and self.settings is not None:
            settings_path(self.path).unlink(missing_ok=True)
        self._lines.close()

    def _read(self) -> None:
        for number, line in self._lines.read():
            try:
                row = read_row(line)
            except ValueError as error:
                raise self._error(number, str(error)) from error
            if row["id"] in self.done:
                raise self._error(number, f"got id {row['id']!r} again, allowed: each once")
            self.done[row["id"]] = number
            self.totals.add(row)
        if self._lines.size == 0:
            return
        settings = read_settings(self.path, OutputError)
        if self._lines.end:
            self.settings = settings

    def check_ids(self, ids: Set[str | int]) -> None:
        """Raises OutputError if there is a result whose id the input does not have."""
        for name, number in self.done.items():
            if name not in ids:
                raise self._error(number, f"got a result for id {name!r}, allowed: ids of the input")

    def _error(self, number: int, what: str) -> OutputError:
        return OutputError(f"line {number} of {str(self.path)!r}: {what}")


_KINDS: dict[str, Any] = dict(zip(KEYS, ((str, int), int, str, list, list, str, str, dict), strict=True))


def read_row(line: bytes) -> dict:
    """A line of an output file. Raises ValueError if it is not a result."""
    allowed = f"a result: an object with {', '.join(KEYS)}"
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        row = None
    if not isinstance(row, dict) or tuple(row) != (*KEYS, *(key for key in OPTIONAL_KEYS if key in row)):
        raise ValueError(f"got {ascii(line[:60])}, allowed: {allowed}")
    wrong = [key for key, kind in _KINDS.items() if not isinstance(row[key], kind) or isinstance(row[key], bool)]
    if wrong or not _are_counts(row["stats"]):
        raise ValueError(f"got a wrong {wrong[0] if wrong else 'stats'}, allowed: {allowed}")
    return row


def _are_counts(stats: dict) -> bool:
    counts = [stats.get(name) for name in COUNTS]
    for name in COUNTS_BY_POSITION:
        by_position = stats.get(name)
        counts += by_position if isinstance(by_position, list) else [None]
    return all(type(count) is int for count in counts)

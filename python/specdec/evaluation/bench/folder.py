"""The folder of a benchmark. Every round is added to rounds.jsonl as it ends, so that a stopped run can resume;
results.json, results.csv and log.csv are written from it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from ...checks import differences
from ...files import write_whole
from ...line_file import LineFile, OutputError, WriteError

FORMAT = "specdec bench rounds 1"
ROUNDS = "rounds.jsonl"


class Folder:
    """
    Args:
        path: of the folder, which is made if it is not there. Its parent must be.

    Attributes:
        header: what the rounds that are there were measured with; None: there are none.
        rounds: that are there.

    Raises:
        OutputError: it cannot be written, another process writes to it, or it has something else in its rounds.jsonl,
            of which it names the line.
    """

    def __init__(self, path: Path):
        self.path = path
        self.header: dict | None = None
        self.rounds: list[dict] = []
        self._made = not path.exists()
        try:
            path.mkdir(exist_ok=True)
        except OSError as error:
            allowed = "a folder that is there or can be made"
            raise OutputError(f"got {str(path)!r} ({error.strerror}), allowed: {allowed}") from error
        self._file = LineFile(path / ROUNDS)
        try:
            self._read()
        except BaseException:
            self._file.close()
            raise

    def begin(self, header: dict) -> None:
        """Makes the folder ready for more rounds.

        Args:
            header: for JSON; "grid" in it has all that must be the same for rounds to be compared.

        Raises:
            OutputError: the rounds that are there were measured with another grid: names what differs.
            WriteError: the header cannot be written.
        """
        header = json.loads(json.dumps({"format": FORMAT, **header}))
        if self.header is None:
            self._file.cut()
            self._file.append(header)
        elif other := differences(self.header["grid"], header["grid"]):
            given = f"{str(self.path)!r}, whose rounds were measured with other settings ({'; '.join(other)})"
            raise OutputError(f"got {given}, allowed: the same settings, or another folder")
        else:
            self._file.cut()
        self.header = header

    def append(self, line: dict) -> None:
        """Adds a round. Raises WriteError; all rounds before it are then in the file."""
        self._file.append(line)
        self.rounds.append(json.loads(json.dumps(line)))

    def write(self, files: Mapping[str, str]) -> None:
        """Writes whole files by their names, each or none of it, also in a folder within. Raises WriteError."""
        for name, text in files.items():
            try:
                (self.path / name).parent.mkdir(exist_ok=True)
                write_whole(self.path / name, text)
            except OSError as error:
                raise WriteError(f"cannot write to {str(self.path / name)!r}: {error.strerror}") from error

    def close(self) -> None:
        """Unlocks the folder, and removes it if it was made and has nothing."""
        self._file.close()
        if self._made and self.header is None:
            with suppress(OSError):
                self.path.rmdir()

    def _read(self) -> None:
        for number, line in self._file.read():
            try:
                row = json.loads(line)
            except (ValueError, RecursionError):
                row = None
            fine = isinstance(row, dict) and (
                row.get("format") == FORMAT and isinstance(row.get("grid"), dict)
                if number == 1
                else {"setting", "round", "cells", "differences"} <= {*row}
            )
            if not fine:
                what = f"line {number} of {str(self._file.path)!r}: got {ascii(line[:60])}"
                raise OutputError(f"{what}, allowed: what specdec bench wrote, or no such file")
            if number == 1:
                self.header = row
            else:
                self.rounds.append(row)

"""The output of a job: one line for each result, and the state with which a job that was killed goes on."""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .files import open_itself
from .manifest import differences, read_settings, settings_path, write_settings
from .result_line import FAILED_KEYS, KEYS

COUNTS = ("steps", "cut_steps", "emitted")
COUNTS_BY_POSITION = ("drafted_by_position", "tested_by_position", "accepted_by_position")
# A process that is killed loses nothing that was written; a machine that loses power may lose what was written since
# the last fsync, which a resumed job makes again. One fsync a line took 0.3 ms on a virtual disk, 60 times the write.
SYNC_SECONDS = 1.0


class OutputError(ValueError):
    """The output file cannot be used: says what was found and what is allowed."""


class WriteError(Exception):
    """A line could not be written. All lines before it are in the file."""


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
        self.ends[row["end"]] += 1
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
        self.done: set[str | int] = set()  # ids that have a result
        self.settings: dict | None = None  # with which the results were made; None where there are none
        self._end = 0  # where the last complete line ends, in bytes
        self._synced = time.monotonic()
        self._file, self._made = self._open()
        self._closed = False
        try:
            self._lock()
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
        os.ftruncate(self._file, self._end)

    def append(self, row: dict) -> None:
        """Writes one result, as a line of its own.

        Raises:
            WriteError: there is no room, or the disk failed; the file then ends with the line before.
        """
        line = json.dumps(row).encode() + b"\n"
        try:
            written = os.pwrite(self._file, line, self._end)
            while written < len(line):  # a disk that is almost full takes a part, and the next call fails
                written += os.pwrite(self._file, line[written:], self._end + written)
            self._end += len(line)
        except OSError as error:
            self._cut()
            raise self._failed(error) from error
        self.totals.add(row)
        if time.monotonic() - self._synced > SYNC_SECONDS:
            self.sync()

    def sync(self) -> None:
        """Waits until all lines are on the disk, where not even a loss of power loses them. Raises WriteError."""
        try:
            os.fsync(self._file)
        except OSError as error:
            raise self._failed(error) from error
        self._synced = time.monotonic()

    def close(self) -> None:
        """Unlocks the file, and removes it if it was created and has no line."""
        if self._closed:
            return
        self._closed = True
        if self._made and self._end == 0:
            self.path.unlink(missing_ok=True)
            if self.settings is not None:
                settings_path(self.path).unlink(missing_ok=True)
        os.close(self._file)

    def _open(self) -> tuple[int, bool]:
        allowed = "a file in a folder that can be written to"
        if self.path.is_dir() or not self.path.parent.is_dir():
            found = "a folder" if self.path.is_dir() else "in no folder"
            raise OutputError(f"got {str(self.path)!r}, {found}, allowed: {allowed}")
        if self.path.exists() and not self.path.is_file():  # a pipe or a device cannot be read again
            raise OutputError(f"got {str(self.path)!r}, which is no regular file, allowed: {allowed}")
        made = not self.path.exists()
        try:
            return open_itself(self.path, os.O_RDWR | os.O_CREAT), made
        except OSError as error:
            raise OutputError(f"got {str(self.path)!r} ({error.strerror}), allowed: {allowed}") from error

    def _lock(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self._made = False  # so it is not ours to remove
            message = f"got {str(self.path)!r}, which another process is writing, allowed: one job a file"
            raise OutputError(message) from error
        except OSError as error:
            raise OutputError(
                f"got {str(self.path)!r} (no lock: {error.strerror}), allowed: a file system with locks"
            ) from error
        if os.fstat(self._file).st_nlink == 0:  # the other process removed its empty file meanwhile
            raise OutputError(f"got {str(self.path)!r}, which another process has removed, allowed: to try again")

    def _read(self) -> None:
        for number, line in self._complete_lines():
            try:
                row = read_row(line)
            except ValueError as error:
                raise OutputError(f"line {number} of {str(self.path)!r}: {error}") from error
            if row["id"] in self.done:
                raise OutputError(
                    f"line {number} of {str(self.path)!r}: got id {row['id']!r} again, allowed: each once"
                )
            self.done.add(row["id"])
            self.totals.add(row)
            self._end += len(line)
        if os.fstat(self._file).st_size == 0:
            return
        settings = read_settings(self.path, OutputError)
        if self._end:
            self.settings = settings

    def check_ids(self, ids: set[str | int]) -> None:
        """Raises OutputError if there is a result whose id the input does not have."""
        if self.done <= ids:
            return
        for number, line in self._complete_lines():
            name = read_row(line)["id"]
            if name not in ids:
                message = (
                    f"line {number} of {str(self.path)!r}: got a result for id {name!r}, allowed: ids of the input"
                )
                raise OutputError(message)

    def _complete_lines(self) -> Iterator[tuple[int, bytes]]:
        """Line numbers from 1, and lines with their ends."""
        with open(os.dup(self._file), "rb") as file:
            file.seek(0)
            for number, line in enumerate(file, 1):
                if line.endswith(b"\n"):
                    yield number, line

    def _failed(self, error: OSError) -> WriteError:
        return WriteError(f"cannot write to {str(self.path)!r}: {error.strerror}")

    def _cut(self) -> None:
        with suppress(OSError):  # then it is cut when the job is resumed
            os.ftruncate(self._file, self._end)


def read_row(line: bytes) -> dict:
    """A line of an output file. Raises ValueError if it is not a result."""
    allowed = f"a result: an object with {', '.join(KEYS)}"
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        row = None
    if not isinstance(row, dict) or tuple(row) not in (KEYS, FAILED_KEYS):
        raise ValueError(f"got {ascii(line[:60])}, allowed: {allowed}")
    stats = row["stats"]
    counts = [stats.get(name) for name in COUNTS] if isinstance(stats, dict) else [None]
    if isinstance(stats, dict):
        lists = [stats.get(name) for name in COUNTS_BY_POSITION]
        counts += [count for each in lists for count in (each if isinstance(each, list) else [None])]
    types: dict[str, Any] = {
        "id": (str, int),
        "prompt": int,
        "text": str,
        "token_ids": list,
        "produced_by": list,
        "end": str,
        "status": str,
    }
    wrong = [key for key, kind in types.items() if not isinstance(row[key], kind) or isinstance(row[key], bool)]
    if wrong or not all(type(count) is int for count in counts):
        raise ValueError(f"got a wrong {wrong[0] if wrong else 'stats'}, allowed: {allowed}")
    return row

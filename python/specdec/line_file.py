"""A file of JSON lines that grows while a program runs, and with which the program goes on after it was killed."""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from .files import open_itself

# A process that is killed loses nothing that was written; a machine that loses power may lose what was written since
# the last fsync, which a resumed job makes again. One fsync a line took 0.3 ms on a virtual disk, 60 times the write.
SYNC_SECONDS = 1.0


class OutputError(ValueError):
    """The output file cannot be used: says what was found and what is allowed."""


class WriteError(Exception):
    """A line could not be written. All lines before it are in the file."""


class LineFile:
    """A locked file, of which only complete lines count. Nothing is changed before :meth:`cut` or :meth:`append`.

    Args:
        path: of the file, which need not exist yet.

    Attributes:
        end: where the last complete line that was read or written ends, in bytes.

    Raises:
        OutputError: it cannot be written, or another process writes to it.
    """

    def __init__(self, path: Path):
        self.path, self.end, self._synced, self._closed = path, 0, time.monotonic(), False
        self._file, self._made = self._open()
        try:
            self._lock()
        except BaseException:
            self.close()
            raise

    @property
    def size(self) -> int:
        """Bytes, those of an incomplete line included."""
        return os.fstat(self._file).st_size

    def read(self) -> Iterator[tuple[int, bytes]]:
        """As :meth:`complete`; what is written next comes after the last line that was read."""
        self.end = 0
        for number, line in self.complete():
            self.end += len(line)
            yield number, line

    def complete(self) -> Iterator[tuple[int, bytes]]:
        """Line numbers from 1, and lines with their ends."""
        with open(os.dup(self._file), "rb") as file:
            file.seek(0)
            for number, line in enumerate(file, 1):
                if line.endswith(b"\n"):
                    yield number, line

    def at(self, begin: int, size: int) -> bytes:
        """So many bytes from there on."""
        return os.pread(self._file, size, begin)

    def cut(self) -> None:
        """Cuts off what comes after the last line."""
        os.ftruncate(self._file, self.end)

    def append(self, row: dict) -> None:
        """Writes one object, as a line of its own.

        Raises:
            WriteError: there is no room, or the disk failed; the file then ends with the line before.
        """
        line = json.dumps(row).encode() + b"\n"
        try:
            written = os.pwrite(self._file, line, self.end)
            while written < len(line):  # a disk that is almost full takes a part, and the next call fails
                written += os.pwrite(self._file, line[written:], self.end + written)
            self.end += len(line)
        except OSError as error:
            with suppress(OSError):  # then it is cut when the job is resumed
                self.cut()
            raise self._failed(error) from error
        if time.monotonic() - self._synced > SYNC_SECONDS:
            self.sync()

    def sync(self) -> None:
        """Waits until all lines are on the disk, where not even a loss of power loses them. Raises WriteError."""
        try:
            os.fsync(self._file)
        except OSError as error:
            raise self._failed(error) from error
        self._synced = time.monotonic()

    @property
    def useless(self) -> bool:
        """Whether the file was created and has no line."""
        return self._made and self.end == 0

    def close(self) -> None:
        """Unlocks the file, and removes it if it is useless."""
        if self._closed:
            return
        self._closed = True
        if self.useless:
            self.path.unlink(missing_ok=True)
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

    def _failed(self, error: OSError) -> WriteError:
        return WriteError(f"cannot write to {str(self.path)!r}: {error.strerror}")

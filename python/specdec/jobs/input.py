"""A file of prompts, one a line: read as a stream, once to be checked and once to be run, or read whole."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, NoReturn, TextIO

from .lines import KEYS, JobLine, LineReader, LineSettings, shown


class InputError(ValueError):
    """Names the file, the line (from 1), the key, what was given and what is allowed."""


class InputMark(NamedTuple):
    """The beginning of an input file: so many prompts, and a digest of the lines up to the last of them."""

    prompts: int
    digest: str


class JobFile:
    """A file of prompts: JSON lines (.jsonl), or text with a prompt a line. Blank lines do not count.

    It is opened once, so that a file that takes its place meanwhile changes nothing.

    Args:
        path: of a regular file, UTF-8.
        defaults: for what a line leaves open.
        vocab_size: V of the target: ids of ``logit_bias`` and ``banned_tokens`` are below it.

    Raises:
        InputError: it cannot be read.
    """

    def __init__(self, path: Path, defaults: LineSettings, vocab_size: int):
        self.path, self._reader = path, LineReader(path, defaults, vocab_size)
        self.mark = InputMark(0, "")  # of what was checked
        if not path.is_file():  # a pipe cannot be read twice
            raise InputError(f"got {str(path)!r}, allowed: a regular file")
        self._file = _open(path)

    def close(self) -> None:
        self._file.close()

    def check(self, earlier: InputMark | None = None) -> set[str | int]:
        """Reads all lines, without models.

        Args:
            earlier: of the file with which the job began: lines may have been added since, not changed.

        Returns:
            The ids of all prompts.

        Raises:
            InputError: a line is not right, an id comes twice, there is no prompt, or ``earlier`` is of another file.
        """
        ids: set[str | int] = set()
        digest = self._new_digest()
        count = 0
        for count, (number, text) in enumerate(self._prompts(), 1):
            line = self._read(number, count - 1, text)
            if line.id in ids:
                first = next(n for i, (n, t) in enumerate(self._prompts()) if self._read(n, i, t).id == line.id)
                _refuse_twice(self.path, number, line, first)
            ids.add(line.id)
            digest.update(text.encode() + b"\n")
            if earlier is not None and count == earlier.prompts and digest.hexdigest() != earlier.digest:
                raise self._other(earlier)
        if count == 0:
            _refuse_empty(self.path)
        if earlier is not None and count < earlier.prompts:
            raise self._other(earlier)
        self.mark = InputMark(count, digest.hexdigest())
        return ids

    def lines(self) -> Iterator[JobLine]:
        """The lines that were checked. Raises InputError if the file is no longer the one that was."""
        digest = self._new_digest()
        for count, (number, text) in enumerate(self._prompts()):
            if count == self.mark.prompts:
                break
            digest.update(text.encode() + b"\n")
            yield self._read(number, count, text)
        if digest.hexdigest() != self.mark.digest:
            raise InputError(f"got {str(self.path)!r}, which changed while the job ran, allowed: a file that stays")

    def _prompts(self) -> Iterator[tuple[int, str]]:
        self._file.seek(0)
        return _numbered(self._file, self.path)

    def _new_digest(self) -> hashlib.blake2b:
        return hashlib.blake2b(b"jsonl" if self._reader.is_json else b"text", digest_size=16)

    def _read(self, number: int, index: int, text: str) -> JobLine:
        return _read(self._reader, self.path, number, index, text)

    def _other(self, earlier: InputMark) -> InputError:
        return InputError(
            f"got {str(self.path)!r}, whose first {earlier.prompts} prompts are not those that the job began with, "
            "allowed: the same lines, and more after them; or another --output"
        )


def read_batch(
    path: Path, defaults: LineSettings, vocab_size: int, keys: Sequence[str] = KEYS, texts: int = 1
) -> list[JobLine]:
    """All lines of a file, which may be a pipe. The arguments are those of :class:`~specdec.jobs.lines.LineReader`.

    Raises:
        InputError: the file cannot be read or has no prompt, a line is not right, a prompt is empty, or an id comes
            twice.
    """
    reader = LineReader(path, defaults, vocab_size, keys, texts)
    lines: list[JobLine] = []
    first: dict[str | int, int] = {}  # id -> number of its line
    with _open(path) as file:
        for number, text in _numbered(file, path):
            line = _read(reader, path, number, len(lines), text)
            if not line.prompt:
                raise _error(path, number, "prompt: got an empty prompt, allowed: at least one character")
            if line.id in first:
                _refuse_twice(path, number, line, first[line.id])
            first[line.id] = number
            lines.append(line)
    if not lines:
        _refuse_empty(path)
    return lines


def _open(path: Path) -> TextIO:
    try:
        # As Path.read_text has it: lines end at \n, \r\n or \r, not at form feeds.
        return path.open(encoding="utf-8-sig")
    except OSError as error:
        raise InputError(f"got {str(path)!r} ({error.strerror}), allowed: a file that can be read") from error


def _numbered(file: TextIO, path: Path) -> Iterator[tuple[int, str]]:
    """Line numbers from 1, and the lines that are not blank without their ends."""
    try:
        for number, line in enumerate(file, 1):
            if line.strip():
                yield number, line.removesuffix("\n")
    except UnicodeDecodeError as error:
        where = f"line {_first_not_utf8(path)} of {str(path)!r}" if path.is_file() else repr(str(path))
        raise InputError(f"got {where}, which is not UTF-8 ({error.reason}), allowed: UTF-8") from error
    except OSError as error:
        raise InputError(f"got {str(path)!r} ({error.strerror}), allowed: a file that can be read") from error


def _read(reader: LineReader, path: Path, number: int, index: int, text: str) -> JobLine:
    try:
        return reader.read(text, index)
    except ValueError as error:
        raise _error(path, number, str(error)) from error


def _error(path: Path, number: int, what: str) -> InputError:
    return InputError(f"line {number} of {str(path)!r}: {what}")


def _refuse_twice(path: Path, number: int, line: JobLine, first: int) -> NoReturn:
    raise _error(path, number, f"id: got {shown(line.id)}, which line {first} has, allowed: every id once")


def _refuse_empty(path: Path) -> NoReturn:
    raise InputError(f"got {str(path)!r} without a prompt, allowed: at least one line that is not empty")


def _first_not_utf8(path: Path) -> int:
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            try:
                line.decode()
            except UnicodeDecodeError:
                return number
    return 0  # it changed meanwhile

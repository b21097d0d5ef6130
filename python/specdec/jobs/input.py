"""A file of prompts, one a line: read as a stream, once to be checked and once to be run, or read whole. No line is
longer than LONGEST, so that what is no file of prompts does not fill the memory."""

from __future__ import annotations

import hashlib
import io
import sys
from collections.abc import Callable, Iterator, Set
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, TextIO, TypeVar

from ..checks import shown
from .lines import STANDARD_INPUT, JobLine, LineReader, Prompt
from .shard import WHOLE, Shard

LONGEST = 2**24  # characters of a line, or of a file that is one prompt


MOST_TOLD = 10  # wrong lines of a file


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
        reader: of its lines. The file is a regular one, UTF-8.
        shard: which of its prompts are run; all are checked.

    Raises:
        InputError: it cannot be read.
    """

    def __init__(self, reader: LineReader, shard: Shard = WHOLE):
        path = self.path = reader.path
        self._reader, self._shard, self.mark = reader, shard, InputMark(0, "")  # of what was checked
        if path == STANDARD_INPUT or (path.exists() and not path.is_file()):  # a pipe cannot be read twice
            raise InputError(f"got {_name(path)}, allowed: a regular file")
        self._file = _open(path)

    def close(self) -> None:
        self._file.close()

    @property
    def prompts(self) -> int:
        """How many are run, of those that were checked."""
        return self._shard.size(self.mark.prompts)

    def check(self, earlier: InputMark | None = None) -> Set[str | int]:
        """Reads all lines, without models.

        Args:
            earlier: of the file with which the job began: lines may have been added since, not changed.

        Returns:
            The ids of all prompts.

        Raises:
            InputError: a line is not right, an id comes twice, there is no prompt, or ``earlier`` is of another file.
        """
        ids: dict[str | int, int] = {}
        digest = self._new_digest()
        for _, text, line in _each(self.path, self._prompts(), self._reader.read, ids):
            digest.update(text.encode() + b"\n")
            if earlier is not None and line.index + 1 == earlier.prompts and digest.hexdigest() != earlier.digest:
                raise self._other(earlier)
        if earlier is not None and len(ids) < earlier.prompts:
            raise self._other(earlier)
        self.mark = InputMark(len(ids), digest.hexdigest())
        return ids.keys()

    def lines(self) -> Iterator[JobLine]:
        """The lines that are run, of those that were checked. Raises InputError if the file is no longer the one that
        was."""
        digest = self._new_digest()
        for count, (number, text) in enumerate(self._prompts()):
            if count == self.mark.prompts:
                break
            digest.update(text.encode() + b"\n")
            if self._shard.has(count):
                yield _read(self._reader.read, self.path, number, count, text)
        if digest.hexdigest() != self.mark.digest:
            raise InputError(f"got {_name(self.path)}, which changed while the job ran, allowed: a file that stays")

    def _prompts(self) -> Iterator[tuple[int, str]]:
        self._file.seek(0)
        return _numbered(self._file, self.path)

    def _new_digest(self) -> hashlib.blake2b:
        return hashlib.blake2b(b"jsonl" if self._reader.is_json else b"text", digest_size=16)

    def _other(self, earlier: InputMark) -> InputError:
        return InputError(
            f"got {_name(self.path)}, whose first {earlier.prompts} prompts are not those that the job began with, "
            "allowed: the same lines, and more after them; or another --output"
        )


def read_batch(reader: LineReader) -> list[JobLine]:
    """All lines of a file, which may be a pipe, or "-": standard input.

    Raises:
        InputError: the file cannot be read or has no prompt, a line is not right, a prompt is empty, or an id comes
            twice.
    """
    return read_each(reader.path, reader.read)


L = TypeVar("L", bound=Prompt)


def read_each(path: Path, read: Callable[[str, int], L]) -> list[L]:
    """All lines of a file, which may be a pipe, or "-": standard input.

    Args:
        read: makes something of a line, which it gets without its end, and of its number among the prompts, from 0.
            Its ValueErrors are raised again with the number of the line.

    Raises:
        InputError: as :func:`read_batch`.
    """
    with _opened(path) as file:
        lines = []
        for number, _, line in _each(path, _numbered(file, path), read, {}):
            if not line.prompt:
                raise _error(path, number, "prompt: got an empty prompt, allowed: at least one character")
            lines.append(line)
    return lines


def _each(
    path: Path, numbered: Iterator[tuple[int, str]], read: Callable[[str, int], L], ids: dict[str | int, int]
) -> Iterator[tuple[int, str, L]]:
    """The number of each line, the line, and what ``read`` makes of it; ``ids`` gets the number of the line of each.
    Raises InputError, after the last line or MOST_TOLD wrong ones, if a line is wrong, an id comes twice, or there is
    no prompt."""
    wrong: dict[int, InputError] = {}
    for number, text in numbered:
        try:
            line = _read(read, path, number, len(ids), text)
            if (first := ids.setdefault(line.id, number)) != number:
                raise _error(path, number, f"id: got {shown(line.id)}, which line {first} has, allowed: every id once")
        except InputError as error:
            wrong[number] = error
            if len(wrong) == MOST_TOLD:
                break
            continue
        yield number, text, line
    if wrong:
        first, *others = wrong
        told = f"; so is line {others[0]}" if len(others) == 1 else f"; so are lines {', '.join(map(str, others))}"
        raise InputError(f"{wrong[first]}{told if others else ''}")
    if not ids:
        raise InputError(f"got {_name(path)} without a prompt, allowed: at least one line that is not empty")


def read_prompt(path: Path) -> str:
    """A whole file as one prompt, with its line ends as they are. It may be a pipe, or "-": standard input.

    Raises:
        InputError: it cannot be read, is empty, longer than LONGEST, or not UTF-8.
    """
    try:
        with _opened(path, newline="") as file:
            text = file.read(LONGEST + 1)
    except OSError as error:
        raise _unreadable(path, error) from error
    if not text:
        raise InputError(f"got {_name(path)}, which is empty, allowed: at least one character")
    if len(text) > LONGEST:
        raise InputError(f"got {_name(path)}, which is longer, allowed: {LONGEST} characters")
    _check_utf8(text, _name(path))
    return text


# Lines end at \n, \r\n or \r, not at form feeds. What is not UTF-8 becomes lone surrogates, to be found line by line.
_TEXT: dict[str, Any] = {"encoding": "utf-8-sig", "errors": "surrogateescape"}


@contextmanager
def _opened(path: Path, newline: str | None = None) -> Iterator[TextIO]:
    if path != STANDARD_INPUT:
        with _open(path, newline) as file:
            yield file
        return
    if sys.stdin is None:  # the shell's <&-
        raise InputError("got standard input, which is closed, allowed: one that can be read")
    wrapped = io.TextIOWrapper(sys.stdin.buffer, **_TEXT, newline=newline)
    try:
        yield wrapped
    finally:
        wrapped.detach()  # or standard input would be closed with it


def _open(path: Path, newline: str | None = None) -> TextIO:
    try:
        return path.open(**_TEXT, newline=newline)
    except OSError as error:
        raise _unreadable(path, error) from error


def _numbered(file: TextIO, path: Path) -> Iterator[tuple[int, str]]:
    """Line numbers from 1, and the lines that are not blank without their ends."""
    number = 0
    try:
        while line := file.readline(LONGEST + 1):
            number += 1
            if len(line) > LONGEST and not line.endswith("\n"):
                raise _error(path, number, f"got a longer line, allowed: {LONGEST} characters")
            if line.strip():
                _check_utf8(line, f"line {number} of {_name(path)}")
                yield number, line.removesuffix("\n")
    except OSError as error:
        raise _unreadable(path, error) from error


def _check_utf8(text: str, where: str) -> None:
    try:
        text.encode(errors="surrogateescape").decode()
    except UnicodeDecodeError as error:
        raise InputError(f"got {where}, which is not UTF-8 ({error.reason}), allowed: UTF-8") from error


def _name(path: Path) -> str:
    return "standard input" if path == STANDARD_INPUT else repr(str(path))


def _unreadable(path: Path, error: OSError) -> InputError:
    return InputError(f"got {_name(path)} ({error.strerror}), allowed: a file that can be read")


def _read(read: Callable[[str, int], L], path: Path, number: int, index: int, text: str) -> L:
    try:
        return read(text, index)
    except ValueError as error:
        raise _error(path, number, str(error)) from error


def _error(path: Path, number: int, what: str) -> InputError:
    return InputError(f"line {number} of {_name(path)}: {what}")

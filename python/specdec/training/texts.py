"""Texts to learn from: where they are read, and which of them are left out."""

from __future__ import annotations

import hashlib
import importlib.util
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..chat_template import chat_text
from ..checks import refuse, shown
from ..jobs.lines import read_text

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

KEYS = ("text", "messages", "prompt", "completion")
SHORTEST = 40  # characters of a prompt that a document is searched for; shorter ones are in many texts by chance
HELD_OUT = 8  # of 256: about 3 %


@dataclass(frozen=True)
class Corpus:
    training: list[str]
    held_out: list[str]
    duplicates: int  # documents that were left out, because they had come before
    known: int  # that were left out, because they contain an evaluation prompt


def read_documents(
    path: Path, tokenizer: Callable[[], PreTrainedTokenizerBase], prompts: Sequence[str] = ()
) -> list[str]:
    """Returns the texts of a file, or of a folder that ``datasets`` has saved.

    A line of a .jsonl file, a row of a .parquet file and a row of a saved dataset have a ``text``; or ``messages``,
    which the chat template makes a text of; or a ``prompt`` with a ``completion``. A result of a job (``specdec
    generate --output``) is a text that follows its prompt; failed ones are left out. Any other file is one text.

    Args:
        tokenizer: returns that of the target. It is called for messages.
        prompts: of the job.

    Raises:
        ValueError: names ``data`` and the line: it cannot be read, a row is not right, or there is no text.
    """
    documents = []
    for place, row in _rows(path):
        text = row if isinstance(row, str) else _text(place, row, tokenizer, prompts)
        if text.strip():
            documents.append(text)
    if not documents:
        refuse("data", f"{str(path)!r}, without a text", "at least one text")
    return documents


def _rows(path: Path) -> Iterator[tuple[str, Any]]:
    """Rows, and where they are."""
    try:
        if path.is_dir():
            yield from _dataset(path)
        elif path.suffix == ".parquet":
            yield from _parquet(path)
        elif path.suffix == ".jsonl":
            yield from _lines(path)
        else:
            yield repr(str(path)), path.read_text(encoding="utf-8-sig")
    except OSError as error:
        refuse("data", f"{str(path)!r} ({error.strerror or error})", "a file that can be read")
    except UnicodeDecodeError:
        refuse("data", f"{str(path)!r}, which is not UTF-8", "text in UTF-8")


def _lines(path: Path) -> Iterator[tuple[str, Any]]:
    with path.open(encoding="utf-8-sig") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            place = f"line {number} of {str(path)!r}"
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:
                ends = "" if line.endswith("\n") else ", where the file ends in the middle of a line"
                refuse("data", f"{place}{ends} ({error})", "a JSON object on each line")
            yield place, row


def _parquet(path: Path) -> Iterator[tuple[str, Any]]:
    if importlib.util.find_spec("pyarrow") is None:
        refuse("data", f"{str(path)!r} without pyarrow", "JSON lines, or: pip install pyarrow")
    import pyarrow
    from pyarrow import parquet

    try:
        rows = parquet.read_table(path, columns=None).to_pylist()
    except pyarrow.ArrowException as error:
        refuse("data", f"{str(path)!r} ({error})", "a Parquet file")
    yield from _numbered(rows, path)


def _dataset(path: Path) -> Iterator[tuple[str, Any]]:
    if importlib.util.find_spec("datasets") is None:
        refuse("data", f"the folder {str(path)!r} without datasets", "a file, or: pip install datasets")
    import datasets

    try:
        found = datasets.load_from_disk(str(path))
    except FileNotFoundError:
        refuse("data", f"the folder {str(path)!r}", "a file, or a folder that datasets' save_to_disk wrote")
    if isinstance(found, datasets.DatasetDict):
        refuse("data", f"{str(path)!r}, with {', '.join(found)}", "the folder of one of these")
    yield from _numbered(found, path)


def _numbered(rows: Iterable[dict], path: Path) -> Iterator[tuple[str, Any]]:
    for number, row in enumerate(rows, 1):
        yield f"row {number} of {str(path)!r}", {key: value for key, value in row.items() if value is not None}


def _text(place: str, row: Any, tokenizer: Callable[[], PreTrainedTokenizerBase], prompts: Sequence[str]) -> str:
    if not isinstance(row, dict):
        refuse("data", f"{place}, {shown(row)}", "an object")
    before = ""
    if "text" in row and type(number := row.get("prompt")) is int:  # a job's result
        if not 0 <= number < len(prompts):
            refuse("data", f"{place}, the text of prompt {number}", f"those of the prompts given, {len(prompts)}")
        failed = row.get("status") != "OK" or row.get("finish_reason") == "failed"
        if failed:
            return ""
        before = prompts[number]
    try:
        if "text" in row:
            return before + read_text("text", row["text"])
        if "messages" in row:
            return chat_text(tokenizer(), row["messages"], answered=True)
        if "prompt" in row:
            return read_text("prompt", row["prompt"]) + read_text("completion", row.get("completion", ""))
    except ValueError as error:
        raise ValueError(f"data: {place}: {error}") from error
    refuse("data", f"{place}, with the keys {shown(sorted(row))}", f"one of {', '.join(KEYS[:3])}")


def split(documents: Iterable[str], prompts: Sequence[str] = (), held_out: Sequence[str] | None = None) -> Corpus:
    """Leaves out what comes twice and what contains an evaluation prompt, and puts some texts aside.

    Args:
        prompts: that drafts are judged by. Those of fewer than SHORTEST characters are not looked for.
        held_out: texts to judge by, which are left out of the training; None: about 3 % of the documents, chosen by a
            hash of the text, so the same ones each time.
    """
    aside = {text.strip() for text in held_out or ()}
    wanted = [p.strip() for p in prompts if len(p.strip()) >= SHORTEST]
    seen: set[bytes] = set()
    corpus = Corpus([], list(held_out or ()), 0, 0)
    duplicates = known = 0
    for text in documents:
        digest = hashlib.sha256(text.strip().encode()).digest()
        if digest in seen:
            duplicates += 1
            continue
        seen.add(digest)
        if text.strip() in aside or any(p in text for p in wanted):
            known += 1
        elif held_out is None and digest[0] < HELD_OUT:
            corpus.held_out.append(text)
        else:
            corpus.training.append(text)
    return Corpus(corpus.training, corpus.held_out, duplicates, known)

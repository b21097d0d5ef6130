"""The prompts of a command: its arguments, or the lines of a file."""

from __future__ import annotations

import json
from pathlib import Path

from .options import refuse


def read_texts(texts: list[str], batch_file: Path | None) -> list[str]:
    """The prompts of the arguments or of the file."""
    if batch_file is not None:
        try:
            # Not splitlines, which takes form feeds and others for ends of lines.
            lines = batch_file.read_text("utf-8-sig").split("\n")
        except UnicodeDecodeError as error:
            refuse("--batch-file", f"{str(batch_file)!r}, which is not UTF-8 ({error})", "UTF-8")
        numbered = [(i, line) for i, line in enumerate(lines, 1) if line.strip()]
        if batch_file.suffix == ".jsonl":
            texts = [_read_json_line(batch_file, i, line) for i, line in numbered]
        else:
            texts = [line for _, line in numbered]
        if not texts:
            refuse("--batch-file", f"{str(batch_file)!r} without a prompt", "at least one line that is not empty")
    source = "PROMPT" if batch_file is None else "--batch-file"
    for text in texts:
        if not text:
            refuse(source, "an empty prompt", "at least one character")
        # From a JSON escape, or an argument that is not UTF-8; no tokenizer takes them.
        if any("\ud800" <= c <= "\udfff" for c in text):
            refuse(source, ascii(text[:60]), "text without lone surrogates")
    return texts


def _read_json_line(batch_file: Path, number: int, line: str) -> str:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):  # not only JSONDecodeError: also numbers and nesting beyond python's
        value = None
    text = value.get("prompt") if isinstance(value, dict) else value
    if not isinstance(text, str):
        given = f"line {number} of {str(batch_file)!r}: {line[:60]!r}"
        refuse("--batch-file", given, 'a JSON string or {"prompt": "..."} a line')
    return text

"""Log lines: for people, or one JSON object each. They hold no key, no prompt and no text."""

from __future__ import annotations

import json
import logging
import traceback
from datetime import UTC, datetime
from typing import Any


def configure(form: str, level: str) -> None:
    """Sends the log of the whole process to stderr.

    Args:
        form: "text" or "json".
        level: "debug", "info", "warning" or "error".
    """
    handler = logging.StreamHandler()
    handler.setFormatter(JsonLines() if form == "json" else TextLines())
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    logging.getLogger("specdec").setLevel(level.upper())
    logging.getLogger("uvicorn").setLevel(logging.ERROR)  # clients could make it warn at will
    logging.captureWarnings(True)


class JsonLines(logging.Formatter):
    """Characters beyond ASCII and control characters are escaped, as everywhere in JSON."""

    def format(self, record: logging.LogRecord) -> str:
        return json.dumps(_facts(record), default=str)


class TextLines(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        facts = _facts(record)
        begin = f"{facts.pop('time')} {facts.pop('level').upper():7} {json.dumps(facts.pop('message'))[1:-1]}"
        frames = [f"\n    {frame}" for frame in facts.pop("trace", [])]
        return begin + "".join(f" {name}={_word(value)}" for name, value in facts.items()) + "".join(frames)


def trace(error: BaseException) -> list[str]:
    """Where an error was raised, and those that it came from. Their messages are left out: they may quote a prompt."""
    lines: list[str] = []
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        lines.append(f"{type(current).__module__}.{type(current).__qualname__}")
        frames = traceback.extract_tb(current.__traceback__)
        lines += [f"  {frame.filename}:{frame.lineno} {frame.name}" for frame in frames]
        current = current.__cause__ or (None if current.__suppress_context__ else current.__context__)
    return lines


def _facts(record: logging.LogRecord) -> dict[str, Any]:
    time = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    facts: dict[str, Any] = {"time": time, "level": record.levelname.lower(), "message": record.getMessage()}
    facts |= getattr(record, "facts", {})
    if record.exc_info and record.exc_info[1] is not None:
        facts["trace"] = trace(record.exc_info[1])
    return facts


def _word(value: object) -> str:
    text = json.dumps(value, default=str)
    return text[1:-1] if isinstance(value, str) and text[1:-1] == value and " " not in value else text

"""The sets of prompts that come with the package: what is measured where nobody gives prompts.

``instruct`` has what people ask a model that answers, ``general`` beginnings and questions for one that continues text,
``code`` beginnings of code, which the embedded pair was trained on. Nothing here imports torch before a set is read.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...checks import refuse

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from ..questions import Question

NAMES = ("instruct", "general", "code")
# The categories of ``instruct``, in the order of the file.
INSTRUCT = ("explain", "story", "code", "edit", "extract", "translate", "summarise", "turns")


def prompt_set(name: str, tokenizer: PreTrainedTokenizerBase | None = None) -> list[Question]:
    """Returns a set of prompts, those of a category side by side.

    Args:
        name: of NAMES.
        tokenizer: with a chat template, of which conversations are made; None: they are transcripts, which a model
            without a template can continue.

    Raises:
        ValueError: names ``prompt_set``, or ``messages`` where the tokenizer has no chat template.
    """
    from ...chat_template import chat_text
    from ..questions import Question

    found = []
    for i, row in enumerate(_rows(name)):
        text, chat = row.get("prompt"), False
        if text is None:
            chat = tokenizer is not None
            text = _transcript(row["messages"]) if tokenizer is None else chat_text(tokenizer, row["messages"])
        found.append(Question(row["id"], i, text, chat, row["category"]))
    return found


def evaluation_texts() -> list[str]:
    """Returns what users say in all sets, and the prompts that are continued: drafts are judged by them, so texts with
    one of them are not trained on."""
    rows = [row for name in NAMES for row in _rows(name)]
    said = [m["content"] for row in rows for m in row.get("messages", ()) if m["role"] == "user"]
    return [row["prompt"] for row in rows if "prompt" in row] + said


def _rows(name: str) -> list[dict[str, Any]]:
    if name not in NAMES:
        refuse("prompt_set", repr(name), ", ".join(NAMES))
    text = (Path(__file__).parent / f"{name}.jsonl").read_text("utf-8")
    return [json.loads(line) for line in text.splitlines()]


def _transcript(messages: Sequence[Mapping[str, str]]) -> str:
    return "".join(f"{m['role'].capitalize()}: {m['content']}\n" for m in messages) + "Assistant:"

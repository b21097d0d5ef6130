"""Files of questions, each with a category: prompts as jobs read them, or questions of Spec-Bench and SPEED-Bench."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ..chat_template import chat_text, chat_tokens
from ..checks import refuse, shown
from .input import read_each
from .lines import LineReader, LineSettings, read_json

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

KEYS = ("id", "prompt", "messages", "category")
NO_CATEGORY = "other"
# What SPEED-Bench has instead of texts that it may not pass on; its own program fetches them.
PLACEHOLDER = "FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE USING SPECDEC_BENCH"


@dataclass(frozen=True)
class Question:
    id: str | int
    category: str
    prompt: str  # the text to continue; of messages, what the chat template makes of them
    chat: bool = False  # whether it was given as messages

    def tokens(self, tokenizer: PreTrainedTokenizerBase, as_chat: bool = False) -> list[int]:
        """The ids of the prompt, or with ``as_chat`` of what the chat template makes of it as a user's message. Raises
        ValueError naming ``messages`` where the tokenizer has no template."""
        if self.chat:
            return chat_tokens(tokenizer, self.prompt)
        if as_chat:
            return chat_tokens(tokenizer, chat_text(tokenizer, [{"role": "user", "content": self.prompt}]))
        return tokenizer(self.prompt).input_ids


def read_questions(path: Path, tokenizer: Callable[[], PreTrainedTokenizerBase] | None = None) -> list[Question]:
    """All questions of a file, which may be a pipe, or "-": standard input.

    A line is what a line of a job is, with ``prompt`` or ``messages`` and an ``id``, and may have a ``category``; or
    it is a question of Spec-Bench (github.com/hemingkx/Spec-Bench) or SPEED-Bench (arXiv 2604.09557), with
    ``question_id``, ``category`` and ``turns``, of which the first one is the prompt, as the second one would need an
    answer. Their other keys say where a question is from, and do not matter here.

    Args:
        tokenizer: returns that of the target. It is called for lines with messages, which are refused without it.

    Raises:
        InputError: the file cannot be read or has no prompt, a line is not right, a prompt is empty, or an id comes
            twice. It names the line.
    """
    reader = LineReader(path, LineSettings(), 0, KEYS[:3], tokenizer=tokenizer)

    def read(text: str, index: int) -> Question:
        given = read_json(text) if reader.is_json else {"prompt": text}
        if "turns" in given:
            return _read_turns(given, index)
        for key in given:
            if key not in KEYS:
                refuse("keys", shown(key), f"{', '.join(KEYS)}; or question_id, category and turns")
        category = _text("category", given.pop("category", NO_CATEGORY))
        line = reader.read_given(given, index)
        return Question(line.id, category, line.prompt, line.chat)

    return read_each(path, read)


def _read_turns(given: dict, index: int) -> Question:
    name, turns = given.get("question_id", index), given["turns"]
    if isinstance(name, bool) or not isinstance(name, (str, int)):
        refuse("question_id", shown(name), "a string or an integer")
    if not isinstance(turns, list) or not turns:
        refuse("turns", shown(turns), "a list of texts, one at least")
    prompt = _text("turns", turns[0])
    if prompt.strip() == PLACEHOLDER:
        allowed = (
            "the text; SPEED-Bench's prepare_data.py puts it there (NVIDIA's Model-Optimizer, examples/specdec_bench)"
        )
        refuse("turns", "a placeholder", allowed)
    return Question(name, _text("category", given.get("category", NO_CATEGORY)), prompt)


def _text(name: str, value: object) -> str:
    if not isinstance(value, str) or not value:
        refuse(name, shown(value), "a text")
    try:
        value.encode()
    except UnicodeEncodeError:  # from a JSON escape; no tokenizer takes them
        refuse(name, shown(value), "text without lone surrogates")
    return value

"""Files of questions, each with a category: prompts as jobs read them, or questions of Spec-Bench and SPEED-Bench."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from transformers import PreTrainedTokenizerBase

from ..chat_template import chat_text
from ..checks import refuse, shown
from .input import read_each
from .lines import LineReader, LineSettings, Prompt, read_id, read_json, read_text

KEYS = ("id", "prompt", "messages", "category")
NO_CATEGORY = "other"
# What SPEED-Bench has instead of texts that it may not pass on; its own program fetches them.
PLACEHOLDER = "FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE USING SPECDEC_BENCH"


@dataclass(frozen=True)
class Question(Prompt):
    category: str = NO_CATEGORY

    def as_message(self, tokenizer: PreTrainedTokenizerBase) -> Question:
        """The same as a user's message, unless it is a chat already: its prompt is what the chat template makes of it.
        Raises ValueError naming ``messages`` where the tokenizer has no template."""
        if self.chat:
            return self
        text = chat_text(tokenizer, [{"role": "user", "content": self.prompt}])
        return replace(self, prompt=text, chat=True)


@dataclass(frozen=True)
class TurnsQuestion(Question):
    """All turns of a question; the prompt is the first."""

    turns: tuple[str, ...] = ()
    sub_category: str | None = None


def read_suite(path: Path) -> list[TurnsQuestion]:
    """All questions of a file of Spec-Bench or SPEED-Bench, with all of their turns: ``question_id``, ``category`` and
    ``turns``, and perhaps a ``sub_category``. Raises InputError as :func:`read_questions`, also for a line without
    turns."""

    def read(text: str, index: int) -> TurnsQuestion:
        given = read_json(text)
        turns = tuple(_turn(turn) for turn in _listed_turns(given.get("turns")))
        below = given.get("sub_category")
        return TurnsQuestion(
            read_id("question_id", given, index),
            index,
            turns[0],
            category=_category(given),
            turns=turns,
            sub_category=None if below is None else read_text("sub_category", below),
        )

    return read_each(path, read)


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
    reader = LineReader(path, LineSettings(), 0, tokenizer=tokenizer)

    def read(text: str, index: int) -> Question:
        given = read_json(text) if reader.is_json else {"prompt": text}
        if "turns" in given:
            return _read_turns(given, index)
        for key in given:
            if key not in KEYS:
                refuse("keys", shown(key), f"{', '.join(KEYS)}; or question_id, category and turns")
        return Question(**vars(reader.read_prompt(given, index)), category=_category(given))

    return read_each(path, read)


Q = TypeVar("Q", bound=Question)


def choose(questions: Sequence[Q], categories: Sequence[str] | None, most: int | None) -> list[Q]:
    """Those of the categories, and of each category the first ``most``. Raises ValueError naming ``category``."""
    there = dict.fromkeys(question.category for question in questions)
    for name in categories or ():
        if name not in there:
            refuse("category", repr(name), ", ".join(there))
    found: list[Q] = []
    for name in categories or there:
        found += [question for question in questions if question.category == name][:most]
    return found


def _read_turns(given: dict, index: int) -> Question:
    prompt = _turn(_listed_turns(given["turns"])[0])
    return Question(read_id("question_id", given, index), index, prompt, category=_category(given))


def _listed_turns(turns: object) -> list:
    if not isinstance(turns, list) or not turns:
        refuse("turns", shown(turns), "a list of texts, one at least")
    return turns


def _turn(value: object) -> str:
    text = _text("turns", value)
    if text.strip() == PLACEHOLDER:
        prepared = "SPEED-Bench's prepare_data.py puts it there (NVIDIA's Model-Optimizer, examples/specdec_bench)"
        refuse("turns", "a placeholder", f"the text; {prepared}")
    return text


def _category(given: dict) -> str:
    return _text("category", given.get("category", NO_CATEGORY))


def _text(key: str, value: object) -> str:
    return read_text(key, value) or refuse(key, "''", "a text")

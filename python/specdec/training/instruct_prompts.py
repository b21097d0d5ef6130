"""Prompts of the instruct kind, by the thousand: a small grammar, and chance that a seed decides.

The file ``instruct_prompts.txt`` has its rules: ``= name``, and below it what the name can stand for, one a line, or
several with " | " between them. In these, ``{name}`` stands for something that the rule of this name gives, the same
wherever it comes again in a prompt; ``{name2}`` for another one, ``{Name}`` for the same with a capital letter. ``\\n``
is the end of a line, ``{{`` a brace, and `` >>> `` is between the turns of a conversation, of which the user has the
first and the last.
"""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Iterator
from pathlib import Path

KINDS = (
    *("explain", "story", "code", "edit", "extract", "translate", "summarise", "turns"),
    *("question", "list", "advice", "poem", "letter", "reason", "play"),
)
BEGINNING = "beginning"
TURN = " >>> "
TRIES = 1000  # at a prompt of a kind that has not come before
_NAME = re.compile(r"\{\{|\}\}|\{([A-Za-z_]+)([0-9]*)\}")


def instruct_prompts(seed: int = 0, chat: bool = True) -> Iterator[tuple[str, list[dict[str, str]]]]:
    """Yields kinds, those of KINDS in turn, and conversations for :func:`~specdec.chat_prompt`, each one once and the
    same ones for a seed. It ends when there are hardly any others of a kind. Without ``chat`` they are beginnings of
    texts, for a model that continues them."""
    rules, chance, seen = _rules(), random.Random(seed), set[str]()
    for kind in itertools.cycle(KINDS if chat else (BEGINNING,)):
        drawn = (_Prompt(rules, chance).of(kind) for _ in range(TRIES))
        text = next((text for text in drawn if text not in seen), None)
        if text is None:
            return
        seen.add(text)
        turns = text.split(TURN)
        yield kind, [{"role": ("user", "assistant")[i % 2], "content": turn} for i, turn in enumerate(turns)]


def _rules() -> dict[str, list[str]]:
    rules: dict[str, list[str]] = {}
    for line in (Path(__file__).with_suffix(".txt")).read_text(encoding="utf-8").splitlines():
        if line.startswith("= "):
            rules[line[2:]] = found = []
        elif line:
            found += line.replace("\\n", "\n").split(" | ")
    return rules


class _Prompt:
    """What the names of one prompt stand for."""

    def __init__(self, rules: dict[str, list[str]], chance: random.Random):
        self._rules, self._chance = rules, chance
        self._chosen: dict[str, str] = {}

    def of(self, name: str, number: str = "") -> str:
        key = name + number
        if key not in self._chosen:
            others = {value for known, value in self._chosen.items() if known.rstrip("0123456789") == name}
            rule = self._chance.choice([one for one in self._rules[name] if one not in others])
            self._chosen[key] = rule
            self._chosen[key] = _NAME.sub(self._put, rule)
        return self._chosen[key]

    def _put(self, found: re.Match[str]) -> str:
        if found[1] is None:
            return found[0][0]
        text = self.of(found[1].lower(), found[2])
        return text[0].upper() + text[1:] if found[1][0].isupper() else text

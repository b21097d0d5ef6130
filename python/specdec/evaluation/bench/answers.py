"""Answer files of Spec-Bench (github.com/hemingkx/Spec-Bench, evaluation/eval.py): JSON lines, one for each question,
with what a method answered. Ours have a choice for each round.

Nothing here imports torch."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ...checks import refuse, shown
from .suites import SUITES

DEFAULT_SUITE = "spec-bench"  # of files that do not say it, as its own do not


@dataclass(frozen=True)
class Choice:
    """One time that a question was answered, turn by turn; ``accept_lengths`` are the tokens of every step. Where
    nobody tells those, as for a server's answer, there may still be ``decoding_steps``, by turn."""

    turns: tuple[str, ...]
    new_tokens: tuple[int, ...]
    wall_time: tuple[float, ...]  # seconds
    accept_lengths: tuple[int, ...]
    decoding_steps: tuple[int, ...] = ()

    @property
    def counted(self) -> tuple[int, int]:
        """Tokens and the steps that emitted them; (0, 0) where nobody tells steps."""
        if self.accept_lengths or not self.decoding_steps:
            return sum(self.accept_lengths), len(self.accept_lengths)
        return sum(self.new_tokens), sum(self.decoding_steps)

    @property
    def speed(self) -> float:
        """Tokens per second."""
        return sum(self.new_tokens) / sum(self.wall_time)


@dataclass(frozen=True)
class Answers:
    """What one method answered.

    Attributes:
        categories: of the questions, by their ids.
        choices: likewise; all questions have as many.
    """

    name: str
    suite: str
    categories: Mapping[str | int, str]
    choices: Mapping[str | int, tuple[Choice, ...]]

    @property
    def rounds(self) -> int:
        return len(next(iter(self.choices.values())))


def answer_lines(rounds: Sequence[Mapping], cell: str, suite: str, target: str) -> list[dict]:
    """The lines of a cell's answer file.

    Args:
        rounds: of one setting, as :class:`~specdec.evaluation.bench.suite_session.SuiteSession` returns them.
        target: the model's name.
    """
    lines: dict[str | int, dict] = {}
    for number, played in enumerate(sorted(rounds, key=lambda each: each["round"])):
        for talk in played["cells"][cell]["talks"]:
            said = dict(talk)
            named = {name: said.pop(name) for name in ("question_id", "category")}
            ended = said.pop("tstamp")
            start = {**named, "suite": suite, "model_id": f"{Path(target).name} {cell}", "choices": []}
            line = lines.setdefault(named["question_id"], start)
            line["choices"].append({"index": number, **said})
            line["tstamp"] = ended
    return list(lines.values())


def to_text(lines: Iterable[Mapping]) -> str:
    return "".join(json.dumps(line) + "\n" for line in lines)


def file_name(cell: str) -> str:
    """Of the answer file of a cell, by its id."""
    return re.sub(r"[^\w.=+-]+", "-", cell) + ".jsonl"


def load_answers(path: Path) -> Answers:
    """Reads an answer file, of ours or of Spec-Bench.

    Raises:
        ValueError: names ``results``: it cannot be read, or a line is not one of an answer file, which it names.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        refuse("results", f"{str(path)!r}, {error}", "an answer file that can be read")
    found = []
    for number, text in enumerate(lines, 1):
        if text.strip():
            try:
                found.append(json.loads(text))
            except (ValueError, RecursionError):
                refuse("results", f"{shown(text[:60])} in line {number} of {str(path)!r}", "JSON, one object")
            _check(found[-1], f"line {number} of {str(path)!r}")
    return read_answers(found, path.stem, repr(str(path)))


def named_apart(found: Sequence[Answers], paths: Sequence[Path]) -> list[Answers]:
    """The same, by the names of their files; where two of these are the same, by the whole paths."""
    alike = len({path.stem for path in paths}) < len(paths)
    return [replace(each, name=str(path) if alike else path.stem) for each, path in zip(found, paths, strict=True)]


def read_answers(lines: Sequence[Mapping[str, Any]], name: str, where: str) -> Answers:
    """
    Args:
        lines: of an answer file.
        name: of the method.
        where: they are from, for errors.

    Raises:
        ValueError: names ``results``: there is none, questions come twice, or have not as many choices each.
    """
    choices = {line["question_id"]: tuple(_choice(each) for each in line["choices"]) for line in lines}
    suites = {line.get("suite", DEFAULT_SUITE) for line in lines}
    if not lines or len(choices) < len(lines):
        refuse("results", f"{where}, {'with a question twice' if lines else 'without a line'}", "each question once")
    if len({len(each) for each in choices.values()}) > 1 or len(suites) > 1:
        refuse("results", f"{where}, of several suites or numbers of choices", "one suite, as many choices everywhere")
    return Answers(name, suites.pop(), {line["question_id"]: line["category"] for line in lines}, choices)


def _choice(given: Mapping[str, Any]) -> Choice:
    return Choice(*(tuple(given.get(name, ())) for name in (*_LISTS, _STEPS)))


_Kinds = tuple[type, ...]
_NAMES: dict[str, _Kinds] = {"question_id": (str, int), "category": (str,), "choices": (list,)}
_LISTS: dict[str, _Kinds] = {"turns": (str,), "new_tokens": (int,), "wall_time": (int, float), "accept_lengths": (int,)}
_STEPS = "decoding_steps"  # need not be there


def _check(line: Any, where: str) -> None:
    """Refuses what speeds and lengths cannot be read from; other keys may be there."""
    line = line if isinstance(line, Mapping) else {}
    suite, allowed = line.get("suite", DEFAULT_SUITE), "what Spec-Bench or specdec bench --suite wrote"
    for key, kind in _NAMES.items():
        if not isinstance(line.get(key), kind):
            refuse("results", f"{key} {shown(line.get(key))} in {where}", allowed)
    if not isinstance(suite, str) or suite not in SUITES:
        refuse("results", f"suite {shown(suite)} in {where}", ", ".join(SUITES))
    for choice in line["choices"] or [None]:
        given = choice if isinstance(choice, Mapping) else {}
        for key, kind in {**_LISTS, _STEPS: (int,)}.items():
            values = given.get(key, [] if key == _STEPS else None)
            if not isinstance(values, list) or not all(isinstance(value, kind) for value in values):
                refuse("results", f"{key} {shown(values)} of a choice in {where}", allowed)
        if not sum(given["wall_time"]) > 0:
            refuse("results", f"wall_time {given['wall_time']} of a choice in {where}", "seconds > 0 in all")

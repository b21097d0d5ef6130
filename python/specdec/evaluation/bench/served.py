"""The questions of a suite, asked of somebody's server by OpenAI's ``/v1/chat/completions``: conversations, one at a
time, in which every later prompt has the server's own answers.

Nothing here imports torch."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...checks import one_line
from ..server_connection import ServerConnection, ServerError
from ..work_counter import Tell, Work
from .answers import answer_lines, read_answers
from .served_drafts import DraftMeter, Drafts, drafts_of_answer
from .suite_table import table
from .suites import OVERALL, SUITES
from .verdicts import tail

SERVED = "served"  # the one method and setting of such a benchmark, in its files
FORMAT = "specdec bench served 1"
CHAT = "/chat/completions"


@dataclass(frozen=True)
class ServedQuestion:
    """A question: ``turns`` are what the user says, one at least."""

    key: str | int
    category: str
    turns: tuple[str, ...]


@dataclass(frozen=True)
class ServedSettings:
    """
    Attributes:
        max_new_tokens: of each answer.
        seed: of the first question; question i has seed + i, in all of its turns.
        repeats: rounds, in each of which every question is asked.
        warm_up: questions whose first turn is asked before, unmeasured.
    """

    max_new_tokens: int
    temperature: float = 0.0
    seed: int = 0
    repeats: int = 1
    warm_up: int = 1


@dataclass(frozen=True)
class ServedTurn:
    """One answer. ``first`` are the seconds until its first piece of text, ``seconds`` those until its last one."""

    answer: str
    tokens: int
    seconds: float
    first: float
    drafts: Drafts | None

    @property
    def steps(self) -> int | None:
        """Forwards that made it: each emits its accepted drafts and one token of the target. None: nobody tells.

        A server may count drafts that were accepted after the end of a text, which is why one is the least."""
        return None if self.drafts is None else max(self.tokens - self.drafts.accepted, 1)


class ServedSpeaker:
    """Asks the turns of a question, one after the other.

    Args:
        server: that answers.
        settings: of its answers.
    """

    def __init__(self, server: ServerConnection, settings: ServedSettings):
        self._server, self._settings = server, settings
        self._meter = DraftMeter(server)

    def run(self, question: ServedQuestion, seed: int, turns: int | None = None) -> dict:
        """For JSON, by the names of Spec-Bench's answer files; besides "first", seconds by turn, and "drafted" and
        "accepted". A server that refuses a later prompt, which is then too long for it, ends the conversation there.

        Args:
            turns: how many are asked; None: all.

        Raises:
            ServerError: the first prompt is refused, or an answer is not complete.
        """
        said: list[ServedTurn] = []
        messages: list[dict[str, str]] = []
        for turn in question.turns[:turns]:
            messages.append({"role": "user", "content": turn})
            try:
                said.append(self.answer(messages, seed))
            except ServerError as error:
                if not said or error.status != 400:
                    raise
                break
            messages.append({"role": "assistant", "content": said[-1].answer})
        steps, drafts = [turn.steps for turn in said], [turn.drafts for turn in said if turn.drafts is not None]
        return {
            "question_id": question.key,
            "category": question.category,
            "turns": [turn.answer for turn in said],
            "decoding_steps": [] if None in steps else steps,
            "new_tokens": [turn.tokens for turn in said],
            "wall_time": [turn.seconds for turn in said],
            "accept_lengths": [],  # of single steps nobody tells
            "first": [turn.first for turn in said],
            "drafted": sum(each.drafted for each in drafts),
            "accepted": sum(each.accepted for each in drafts),
            "tstamp": time.time(),
        }

    def answer(self, messages: Sequence[Mapping[str, str]], seed: int) -> ServedTurn:
        body = {
            "model": self._server.model,
            "messages": list(messages),
            "max_tokens": self._settings.max_new_tokens,
            "temperature": self._settings.temperature,
            "seed": seed,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        events, pieces, first = [], list[str](), None
        start = end = time.perf_counter()
        try:
            for event in self._server.stream(CHAT, body):
                events.append(event)
                content, other = _texts(event)
                if content or other:
                    end = time.perf_counter()
                    first = end if first is None else first
                    pieces.append(content)
            tokens = next((n for event in reversed(events) if (n := _tokens(event)) is not None), None)
            drafts = drafts_of_answer(events)
        except (AttributeError, IndexError, KeyError, TypeError) as error:
            what = f"streams what is no chat completion ({type(error).__name__}): {one_line(events[-1:], 100)}"
            raise ServerError(self._server.url, what) from None
        if not tokens:
            told = "no token" if tokens == 0 else "not how many tokens it has, by usage or by timings"
            raise ServerError(self._server.url, f"sends an answer and tells {told}")
        metered = self._meter.since()  # read in any case, so that the next answer begins with what this one left
        if first is None:  # tokens without a text, such as an end at once
            first = end = time.perf_counter()
        return ServedTurn("".join(pieces).strip(), tokens, end - start, first - start, drafts or metered)


def served_rounds(
    server: ServerConnection,
    questions: Sequence[ServedQuestion],
    settings: ServedSettings,
    done: Sequence[int] = (),
    tell: Tell = lambda done, total, what: None,
    on_talk: Callable[[int, dict], None] | None = None,
) -> Iterator[dict]:
    """Measures round after round, and yields each as it ends, for JSON and
    :class:`~specdec.evaluation.bench.folder.Folder`.

    Args:
        questions: at least one.
        done: numbers of rounds that were measured before.
        tell: how far it is.
        on_talk: called with the number of the round and each conversation.
    """
    speaker = ServedSpeaker(server, settings)
    left = [number for number in range(settings.repeats) if number not in done]
    work = Work(tell, len(left) * len(questions))
    for question in questions[: settings.warm_up] if left else ():
        speaker.run(question, settings.seed, turns=1)
    for number in left:
        work.begin(f"round {number + 1} of {settings.repeats}")
        talks = []
        for i, question in enumerate(questions):
            talks.append(speaker.run(question, settings.seed + i))
            if on_talk is not None:
                on_talk(number, talks[-1])
            work.did_one()
        yield {"setting": SERVED, "round": number, "cells": {SERVED: {"talks": talks}}, "differences": []}


def served_results(header: Mapping[str, Any], rounds: Sequence[Mapping]) -> tuple[dict, list[dict]]:
    """What results.json has, and the lines of the answer file.

    Its rows are those of :func:`~specdec.evaluation.bench.suite_table.table`, and have besides "time_to_first_token",
    with median and the 99th percentile of all turns, and "acceptance_rate", None where nothing was drafted."""
    suite = SUITES[header["suite"]["name"]]
    lines = answer_lines(rounds, SERVED, suite.name, header["models"]["target"]["name"])
    talks = [talk for played in rounds for talk in played["cells"][SERVED]["talks"]]
    rows = table([read_answers(lines, SERVED, SERVED)], {}, None)
    for row in rows:
        of_group = [talk for talk in talks if row["group"] in (OVERALL, suite.group(talk["category"]))]
        drafted, accepted = (sum(talk[name] for talk in of_group) for name in ("drafted", "accepted"))
        row["time_to_first_token"] = tail([seconds for talk in of_group for seconds in talk["first"]])
        row["acceptance_rate"] = accepted / drafted if drafted else None
    turns = {question["id"]: question["turns"] for question in header["suite"]["questions"]}
    unasked = sorted({str(t["question_id"]) for t in talks if len(t["turns"]) < turns[t["question_id"]]})
    whole = {**header, "format": FORMAT, "rounds": len(rounds), "rows": rows, "unasked": unasked}
    return whole, lines


def _texts(event: Mapping[str, Any]) -> tuple[str, str]:
    """The content of a chunk, and its reasoning, which is no part of the answer."""
    if not event.get("choices"):
        return "", ""
    delta = event["choices"][0].get("delta") or {}
    return delta.get("content") or "", delta.get("reasoning_content") or delta.get("reasoning") or ""


def _tokens(event: Mapping[str, Any]) -> int | None:
    """Of the whole answer, where an event tells it."""
    usage, timings = event.get("usage") or {}, event.get("timings") or {}
    return usage.get("completion_tokens", timings.get("predicted_n"))

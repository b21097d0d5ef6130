"""Measures the cells of a grid over the questions of a suite: conversations, one at a time."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from transformers import PreTrainedModel

from ...checks import refuse
from ..contenders import Contender, SpecdecMethod
from ..rounds import Player
from .grid import TRANSFORMERS, BenchCell, Grid
from .measure import BenchPrompt, measured
from .session import Batch, BenchSettings, Session
from .talks import Speaker, SuiteQuestion, Talk, TalkFormat


class SuiteSession(Session):
    """As :class:`~specdec.evaluation.bench.session.Session`. Rounds have in "talks" of each cell what was said, and
    "differences" are those of the first turn in which two texts differ: later prompts are not the same.

    Args:
        suite: its name.
        questions: at least one.
        form: makes prompts of turns and answers.
    """

    def __init__(
        self,
        target: PreTrainedModel,
        make: Callable[[BenchCell], Contender],
        grid: Grid,
        suite: str,
        questions: Sequence[SuiteQuestion],
        settings: BenchSettings,
        form: TalkFormat,
        done: Sequence[tuple[str, int]] = (),
    ):
        super().__init__(target, make, grid, questions, settings, done)
        self.questions, self._suite, self._form, self._cut = list(questions), suite, form, False

    @property
    def what(self) -> list | dict:
        said = [[question.key, question.turns] for question in self.questions]
        return {"prompts": super().what, "suite": self._suite, "turns": said, "cut": self._cut}

    def described(self) -> dict:
        """For results.json."""
        questions = [
            {"id": q.key, "category": q.category, "sub_category": q.sub_category, "turns": len(q.turns)}
            for q in self.questions
        ]
        return {"name": self._suite, "prompts": self._form.name, "questions": questions}

    def fit(self, cut: bool) -> None:
        """Refuses questions whose first prompt leaves no position for an answer. How long later prompts are depends on
        the answers: :class:`~specdec.evaluation.bench.talks.Speaker` says what becomes of them. With ``cut`` each
        prompt loses as much of its beginning as leaves room for a whole answer. Raises ValueError naming
        ``input_ids``."""
        self._cut = cut
        most, new = self.positions, self._settings.max_new_tokens
        least = new if cut else 0  # of the positions, those that no prompt has
        for question in self.questions:
            if most is not None and (least >= most if cut else len(question.tokens) >= most):
                given = f"question {question.id!r}, whose first prompt has {len(question.tokens)} tokens"
                if cut:
                    refuse("max_new_tokens", f"{new}, which leave no position for a prompt", f"at most {most - 1}")
                refuse("input_ids", given, f"at most {most - 1}; --cut-prompts cuts prompts at their beginning")

    def _player(self, method: Contender) -> Player[Batch, Any]:
        return Speaker(method, self._form, self._settings.max_new_tokens, self.positions, self._cut)

    def _settle(self, method: SpecdecMethod, batches: Sequence[list[list[int]]]) -> None:
        room = self._settings.max_new_tokens
        if self.positions is not None:
            kept = self.positions - room if self._cut else self.positions
            batches = [[prompt[-kept:] for prompt in batch] for batch in batches]
            room = min(room, self.positions - max(len(prompt) for batch in batches for prompt in batch))
        method.shortened(room).settle(batches, self._settings.seed)

    def _measured(self, runs: Sequence[Any], batches: Sequence[Batch], peak_memory: int) -> dict:
        talks: Sequence[Talk] = runs
        asked = [(turn.run, batch) for talk, batch in zip(talks, batches, strict=True) for turn in talk.turns]
        found = measured([run for run, _ in asked], [batch for _, batch in asked], peak_memory)
        said = [{**_named(batch[0]), **talk.to_dict()} for talk, batch in zip(talks, batches, strict=True)]
        return {**found, "talks": said}

    def _differences(
        self, cells: Sequence[BenchCell], batches: Sequence[Batch], played: Sequence[Sequence[Any]]
    ) -> list[dict]:
        at = next(i for i, cell in enumerate(cells) if cell.method == TRANSFORMERS)
        found = []
        for cell, talks in zip(cells, played, strict=True):
            names = (cells[at].id, cell.id)
            for place, (batch, plain, talk) in enumerate(zip(batches, played[at], talks, strict=True)):
                pairs = enumerate(zip(plain.turns, talk.turns, strict=False), 1)
                unlike = next(((i, a, b) for i, (a, b) in pairs if a.tokens != b.tokens), None)
                if unlike is None:
                    continue
                turn, first, second = unlike
                difference = self._judge.explain_once(first.prompt, first.tokens, second.tokens, names, place)
                if difference is not None:
                    found.append({**dataclasses.asdict(difference), "prompt_id": batch[0].id, "turn": turn})
        return found


def _named(question: BenchPrompt) -> dict:
    assert isinstance(question, SuiteQuestion)
    return {"question_id": question.key, "category": question.category}

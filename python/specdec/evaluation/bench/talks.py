"""A question of several turns, asked of one method: every later prompt has the answers that this method gave before."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import TYPE_CHECKING

from ...chat_template import chat_prompt
from ..contenders import Contender, Run
from .measure import BenchPrompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# The system message of FastChat's template vicuna_v1.1, which is that of Vicuna 1.3, and so of Spec-Bench.
VICUNA = (
    "A chat between a curious user and an artificial intelligence assistant. "
    "The assistant gives helpful, detailed, and polite answers to the user's questions."
)


@dataclass(frozen=True)
class SuiteQuestion(BenchPrompt):
    """``tokens`` are those of the first turn's prompt.

    Attributes:
        turns: what the user says, one at least.
        key: its id, as the file has it.
    """

    turns: tuple[str, ...]
    key: str | int
    sub_category: str | None = None


@dataclass(frozen=True)
class Turn:
    prompt: list[int]
    run: Run
    answer: str

    @property
    def tokens(self) -> list[int]:
        return self.run.texts[0]


@dataclass(frozen=True)
class Talk:
    """A question as one method answered it. It has fewer turns than the question where no position was left."""

    turns: list[Turn]
    ended: float  # seconds since 1970

    @property
    def seconds(self) -> float:
        return sum(turn.run.seconds for turn in self.turns)

    @property
    def emitted(self) -> int:
        return sum(turn.run.emitted for turn in self.turns)

    def to_dict(self) -> dict:
        """For JSON, by the names of Spec-Bench's answer files. ``accept_lengths`` has the tokens of every step of all
        turns: the pieces in which a text came."""
        runs = [turn.run for turn in self.turns]
        return {
            "turns": [turn.answer for turn in self.turns],
            "decoding_steps": [run.steps for run in runs],
            "new_tokens": [run.emitted for run in runs],
            "wall_time": [run.seconds for run in runs],
            "accept_lengths": [arrival.tokens for run in runs for arrival in run.arrivals[0]],
            "tstamp": self.ended,
        }


def vicuna_text(turns: Sequence[str], answers: Sequence[str]) -> str:
    """The text that the next answer continues, as FastChat's template vicuna_v1.1 writes it: after an answer comes no
    space but the end of its text, and an answer without a character has neither."""
    text = f"{VICUNA} "
    for turn, answer in zip_longest(turns, answers):
        text += f"USER: {turn} ASSISTANT:"
        text += f" {answer}</s>" if answer else ""
    return text


class TalkFormat:
    """How turns and answers become a prompt: by the tokenizer's chat template, or where it has none by Vicuna's."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase):
        self._tokenizer, self.by_template = tokenizer, bool(tokenizer.chat_template)

    @property
    def name(self) -> str:
        return "the tokenizer's chat template" if self.by_template else "Vicuna's conversation, as FastChat has it"

    def prompt(self, turns: Sequence[str], answers: Sequence[str]) -> list[int]:
        """The ids that the answer to the last turn continues. Raises ValueError as ``chat_prompt``.

        Args:
            answers: to all turns but the last.
        """
        if not self.by_template:
            return self._tokenizer(vicuna_text(turns, answers)).input_ids
        messages = [{"role": "user", "content": turns[0]}]
        for answer, turn in zip(answers, turns[1:], strict=True):
            messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": turn}]
        return chat_prompt(self._tokenizer, messages)

    def answer(self, tokens: list[int]) -> str:
        """As Spec-Bench reads it: without special tokens, and without spaces around it."""
        return str(self._tokenizer.decode(tokens, skip_special_tokens=True)).strip()


class Speaker:
    """Asks a method the turns of a question, one after the other.

    Args:
        max_new_tokens: of an answer. Where fewer positions are left, it has as many as these; where none is left, the
            conversation ends before this turn.
        positions: of the models; None: there is no limit.
        cut: take as many of the last tokens of each prompt as leave room for a whole answer.
    """

    def __init__(
        self, method: Contender, form: TalkFormat, max_new_tokens: int, positions: int | None, cut: bool = False
    ):
        self._method, self._form, self._new = method, form, max_new_tokens
        self._positions, self._cut = positions, cut

    def run(self, batch: Sequence[BenchPrompt], seed: int) -> Talk:
        """``batch`` is one question. All turns of it have the seed: noise differs by position."""
        (question,) = batch
        assert isinstance(question, SuiteQuestion)
        turns: list[Turn] = []
        for number in range(1, len(question.turns) + 1):
            answers = [turn.answer for turn in turns]
            prompt = self._form.prompt(question.turns[:number], answers)
            if self._cut and self._positions is not None:
                prompt = prompt[-(self._positions - self._new) :]
            room = self._new if self._positions is None else min(self._new, self._positions - len(prompt))
            if room < 1:
                break
            method = self._method if room == self._new else self._method.shortened(room)
            run = method.run([prompt], seed)
            turns.append(Turn(prompt, run, self._form.answer(run.texts[0])))
        return Talk(turns, time.time())

"""Drafts what is known of a text beforehand, beside another drafter or none: what its request predicts (OpenAI's
Predicted Outputs), and tokens that its grammar forces."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from .beside import BesideDrafter, BesideSession, replaced
from .copying import until_end
from .protocol import BatchState, Copies, Drafts, DraftSession, Step
from .suffix_automaton import Cursor, SuffixAutomaton

LEAST_MATCH = 2  # tokens of a match by which a place is found again; a single token occurs in too many places
CERTAIN = 1 << 20  # matching tokens, where none but these can follow
LEAST_FORCED = 2  # tokens in a row that are worth more than the drafts of another drafter, which finds single ones, too


class PredictedDrafter(BesideDrafter):
    """Proposes, for each sequence with a prediction (``Request.prediction``), the tokens that follow the place in it
    where the text continues; and for each sequence with a grammar, the tokens without which the text could not go on.
    The others get the drafts of another drafter.

    These tokens are functions of the text, so q is one-hot and the distribution is unchanged.

    Args:
        drafter: the other one; None: nothing else is drafted. Chains only.

    Example:
        >>> from specdec import Request, Scheduler, SpeculativeDecoder, load_embedded_pair
        >>> from specdec.drafters.predicted import PredictedDrafter
        >>> target, _, tokenizer = load_embedded_pair()
        >>> scheduler = Scheduler(SpeculativeDecoder(target, PredictedDrafter(), num_drafts=8), rows=1)
        >>> prompt = tokenizer("import os").input_ids
        >>> (plain,) = scheduler.run([Request(prompt, max_new_tokens=16)])
        >>> (again,) = scheduler.run([Request(prompt, max_new_tokens=16, prediction=plain.tokens)])
        >>> again.tokens == plain.tokens, plain.stats.steps, again.stats.steps
        (True, 16, 2)
    """

    @property
    def name(self) -> str:
        return super().name if self.drafter is None else self.drafter.name

    @property
    def copying(self) -> bool:  # type: ignore[override]  # it depends on the other one
        return self.drafter is None or self.drafter.copying

    @property
    def shares(self) -> bool:  # type: ignore[override]  # it depends on the other one
        return self.drafter is not None and self.drafter.shares

    def start(self, batch: BatchState) -> PredictedSession:
        return PredictedSession(None if self.drafter is None else self.drafter.start(batch), batch)


class PredictedSession(BesideSession):
    """The place of each sequence in its prediction, and its grammar, beside another drafter's session or none."""

    def __init__(self, other: DraftSession | None, batch: BatchState):
        super().__init__(other, batch)
        self.places: dict[int, Place] = {}  # of the rows with a prediction

    @property
    def needs_host(self) -> bool:  # type: ignore[override]  # it changes with the rows
        return bool(self.places or self.behind) or (self.other is not None and self.other.needs_host)

    def begin(self, prompts: Mapping[int, list[int]]) -> None:
        for row, prompt in prompts.items():
            self.places.pop(row, None)
            if prediction := self.batch.predictions[row]:
                self.places[row] = Place(prediction, len(prompt))
        self.batch.timer.lap("prefill")
        super().begin(prompts)

    def propose(self, step: Step) -> Drafts | Copies:
        rows = {*self.places, *self.batch.grammars.rows} & {row for row, most in enumerate(step.allowed) if most}
        known = {row: self._known(row, step.texts[row], step.allowed[row]) for row in sorted(rows)}
        proposals = {row: until_end(tokens, self.batch.ends[row]) for row, (tokens, _) in known.items() if tokens}
        drafts = self.of_other(step, proposals)
        if drafts is None:
            drafts = Copies.none(len(step.allowed))
        if not proposals:
            return drafts
        copies = drafts if isinstance(drafts, Copies) else drafts.copies or Copies.none(len(step.allowed))
        for row, proposal in proposals.items():
            copies.put(row, proposal, known[row][1])
        return copies if isinstance(drafts, Copies) else replaced(drafts, proposals)._replace(copies=copies)

    def _known(self, row: int, text: list[int], most: int) -> tuple[list[int], int]:
        """Returns up to ``most`` tokens with which a row's text is known to go on, and how many before them match."""
        predicted = self.places[row].propose(text, most) if row in self.places else []
        forced = self.batch.grammars.forced(row)[:most]
        if predicted and predicted[: len(forced)] == forced:
            return predicted, self.places[row].matched
        return (forced if predicted or self.other is None or len(forced) >= LEAST_FORCED else []), CERTAIN

    def end(self, row: int, output: list[int]) -> None:
        self.places.pop(row, None)
        super().end(row, output)


class Place:
    """Where a growing text is in its prediction. At first the text is expected to begin as the prediction does. It is
    followed as long as it is as predicted. After a difference, the place is found again by the longest suffix of the
    output that is in the prediction: where that occurs more than once, at its next occurrence.

    Args:
        known: tokens of the text that are before the predicted ones.

    Attributes:
        matched: how many tokens before the place are as predicted.
    """

    def __init__(self, prediction: Sequence[int], known: int):
        self.prediction, self._known = list(prediction), known
        self._cursor = Cursor(SuffixAutomaton(self.prediction))
        self._next: int | None = 0  # the predicted token that is expected next; None: the text is nowhere
        self._last = 0  # where the text was last as predicted
        self.matched = 0

    def propose(self, text: list[int], most: int) -> list[int]:
        """Returns up to ``most`` tokens that are expected after ``text``, which must begin with the text of the
        previous call."""
        if new := text[self._known :]:
            self._cursor.follow(new)
            self._known = len(text)
            self._next = self._after(text, new)
        return [] if self._next is None else self.prediction[self._next : self._next + most]

    def _after(self, text: list[int], new: list[int]) -> int | None:
        """Returns the place after ``text``, whose last tokens are ``new``."""
        if self._next is not None:
            expected = self.prediction[self._next : self._next + len(new)]
            same = next(
                (i for i, pair in enumerate(zip(expected, new, strict=False)) if pair[0] != pair[1]), len(expected)
            )
            self._last = self._next + same
            if same == len(new):
                self.matched += same
                return self._last
        length, end = self._cursor.longest_suffix()
        if length < LEAST_MATCH:
            return None
        self.matched, suffix = length, text[-length:]
        places = range(max(self._last + 1, end), len(self.prediction) + 1)
        following = (i for i in places if self.prediction[i - length : i] == suffix)
        self._last = next(following, end)
        return self._last

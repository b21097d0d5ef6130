"""Drafts what a request predicts of its own text (OpenAI's Predicted Outputs), beside another drafter or none."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from itertools import takewhile

import torch

from specdec_kernels import SamplingParams

from .copying import until_end
from .protocol import Drafter, Drafts, DraftSession, Generation, Step
from .suffix_automaton import Cursor, SuffixAutomaton

_PADDING = SamplingParams.TABLE_PADDING
SURE = 2  # tokens of a match by which a place is found again; a single token occurs in too many places


class PredictedDrafter:
    """Proposes, for each sequence with a prediction (``Generation.predictions``), the tokens that follow the place in
    it where the text continues. Sequences without one, and those whose text is nowhere in it, get the drafts of
    ``drafter``, which is not called where there are none of these.

    Where a text is in its prediction is a function of both, so q is one-hot and the distribution is unchanged.

    Args:
        drafter: None: nothing else is drafted. Chains only.
    """

    def __init__(self, drafter: Drafter | None):
        self.drafter = drafter

    def start(self, generation: Generation) -> PredictedSession:
        return PredictedSession(None if self.drafter is None else self.drafter.start(generation), generation)


class PredictedSession:
    """The place of each sequence in its prediction, beside another drafter's session or none."""

    def __init__(self, other: DraftSession | None, generation: Generation):
        self.other, self.generation = other, generation
        self.places: dict[int, Place] = {}  # of the rows with a prediction
        self._behind: dict[int, int] = {}  # rows of which the other session missed tokens -> how many it has seen

    @property
    def reads_texts(self) -> bool:
        other = self.other is not None and getattr(self.other, "reads_texts", True)
        return bool(self.places or self._behind) or other

    @property
    def takes_fewer_rows(self) -> bool:
        return self.other is None or getattr(self.other, "takes_fewer_rows", False)

    def admit(self, prompts: Mapping[int, list[int]]) -> None:
        for row, prompt in prompts.items():
            self._forget(row)
            if prediction := self.generation.predictions[row]:
                self.places[row] = Place(prediction, len(prompt))
        self.generation.stopwatch.lap("prefill")
        if self.other is not None:
            self.other.admit(prompts)

    def show(self, texts: Mapping[int, list[int]], starts: Mapping[int, int]) -> None:
        show = getattr(self.other, "show", None)
        if show is not None and texts:
            show(texts, {row: min(start, self._behind.get(row, start)) for row, start in starts.items()})
        for row in texts:
            self._behind.pop(row, None)

    def draft(self, step: Step) -> Drafts:
        proposals = {
            row: until_end(proposal, self.generation.ends[row])
            for row, place in self.places.items()
            if (most := step.allowed[row]) and (proposal := place.propose(step.texts[row], most))
        }
        drafts = self._of_other(step, proposals)
        return _replaced(drafts, proposals) if proposals else drafts

    def _of_other(self, step: Step, proposals: Mapping[int, list[int]]) -> Drafts:
        """Returns the other session's drafts for the rows without proposals."""
        none = Drafts(step.last_two[:, :0])
        if self.other is None:
            return none
        if self._behind:
            missed = {row: n for row, n in self._behind.items() if step.allowed[row] and row not in proposals}
            self.show({row: step.texts[row] for row in missed}, missed)
        if not proposals:
            return self.other.draft(step)
        allowed = [0 if row in proposals else most for row, most in enumerate(step.allowed)]
        # It sees no other drafts than its own, and needs the last two tokens of a text in its next drafts only.
        for row in proposals if any(allowed) else [row for row, text in enumerate(step.texts) if text]:
            self._behind.setdefault(row, max(len(step.texts[row]) - 2, 0))
        return self.other.draft(dataclasses.replace(step, allowed=allowed)) if any(allowed) else none

    def release(self, row: int, output: list[int]) -> None:
        self._forget(row)
        if self.other is not None:
            self.other.release(row, output)

    def _forget(self, row: int) -> None:
        self.places.pop(row, None)
        self._behind.pop(row, None)


class Place:
    """Where a growing text is in its prediction. At first the text is expected to begin as the prediction does. It is
    followed as long as it is as predicted. After a difference, the place is found again by the longest suffix of the
    output that is in the prediction: where that occurs more than once, at its next occurrence.

    Args:
        known: tokens of the text that are before the predicted ones.
    """

    def __init__(self, prediction: Sequence[int], known: int):
        self.prediction, self._known = list(prediction), known
        self._cursor = Cursor(SuffixAutomaton(self.prediction))
        self._next: int | None = 0  # the predicted token that is expected next; None: the text is nowhere
        self._last = 0  # where the text was last as predicted

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
                return self._last
        length, end = self._cursor.longest_suffix()
        if length < SURE:
            return None
        suffix = text[-length:]
        places = range(max(self._last + 1, end), len(self.prediction) + 1)
        following = (i for i in places if self.prediction[i - length : i] == suffix)
        self._last = next(following, end)
        return self._last


def _replaced(drafts: Drafts, proposals: Mapping[int, list[int]]) -> Drafts:
    """Returns the drafts with these rows replaced by ``proposals``, whose q is one-hot."""
    d2t, device = drafts.d2t, drafts.tokens.device
    if d2t is not None:  # q has no column for other tokens
        known = {*d2t.tolist()}
        proposals = {row: [*takewhile(known.__contains__, own)] for row, own in proposals.items()}
    columns = max(drafts.tokens.shape[1], *map(len, proposals.values()))
    drafts, rows = drafts.widened(columns), torch.tensor([*proposals], device=device)
    padded = [[*own, *[-1] * (columns - len(own))] for own in proposals.values()]
    own = torch.tensor(padded, dtype=torch.int64, device=device)
    tokens, status, ids = drafts.tokens.index_copy(0, rows, own), drafts.status, own.clamp(min=0)
    drafts = drafts._replace(tokens=tokens, status=None if status is None else status.index_fill(0, rows, 0))
    each = rows[:, None], torch.arange(columns, device=device)
    if drafts.compact is not None:
        kept, log_q = drafts.compact[0].index_fill(0, rows, _PADDING), drafts.compact[1].index_fill(0, rows, -torch.inf)
        kept[(*each, 0)], log_q[(*each, 0)] = ids, 0.0
        return drafts._replace(compact=(kept, log_q))
    if drafts.logits is not None:
        logits = drafts.logits.index_fill(0, rows, -torch.inf)
        logits[(*each, ids if d2t is None else torch.searchsorted(d2t, ids))] = 0.0
        # Verification computes the statistics again, since those of one-hot rows depend on all settings.
        return drafts._replace(logits=logits, stats=None)
    return drafts

"""How likely the drafts of a batch are accepted, learned from recent steps."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .draft_length import RowResult

# The first guess is optimistic, since only drafting shows acceptance.
FIRST_GUESS = 0.8
GUESS_WEIGHT = 2.0  # tests that the guess counts for
BATCH_MEMORY = 0.99  # weight of older steps with drafts, for each one since, in what is common to the rows
ROW_MEMORY = 0.9  # the same in what is a row's own: about the last ten steps count, because texts change
ROW_WEIGHT = 30.0  # tests that the common estimate counts for in a row's own, and
UNLIKE_WEIGHT = 2.0  # where the row's own recent tests contradict it
UNLIKE = 2.5  # standard deviations that are a contradiction


class Acceptance:
    """The probability that a draft is accepted if those before it in its step were, by its position.

    By position, because the chance is not the same everywhere: prompt lookup often has nothing to propose, but what it
    proposes is often right to the end. A position that was never tested is expected to be like the one before. Each row
    has an estimate of its own, which begins with that of all rows.
    """

    def __init__(self, most_drafts: int):
        self._tested, self._accepted = np.zeros(most_drafts), np.zeros(most_drafts)

    def forget(self) -> None:
        """Keeps what was learned as a faint memory, so that a new trial counts."""
        faint = 1 / max(float(self._tested[0]), 1.0)
        self._tested, self._accepted = faint * self._tested, faint * self._accepted

    def record(self, tested: np.ndarray, accepted: np.ndarray) -> None:
        """Records a step, by position."""
        self._tested = BATCH_MEMORY * self._tested + tested
        self._accepted = BATCH_MEMORY * self._accepted + accepted

    def replace(self, tested: np.ndarray, accepted: np.ndarray) -> None:
        """Forgets all but these recent tests."""
        self._tested, self._accepted = tested, accepted

    def by_position(self) -> np.ndarray:
        guess, found = FIRST_GUESS, []
        for tested, accepted in zip(self._tested.tolist(), self._accepted.tolist(), strict=True):
            guess = (accepted + GUESS_WEIGHT * guess) / (tested + GUESS_WEIGHT)
            found.append(guess)
        return np.array(found)


class RowAcceptance:
    """The acceptance of a batch's rows.

    Args:
        common: of all rows, which may have been learned in other batches.
    """

    def __init__(self, common: Acceptance, most_drafts: int, size: int):
        self.common, self._positions = common, np.arange(most_drafts)
        self._tested, self._accepted = np.zeros((size, most_drafts)), np.zeros((size, most_drafts))

    def begin(self, row: int) -> None:
        self._tested[row] = self._accepted[row] = 0

    def forget(self) -> None:
        self.common.forget()
        self._tested[:] = self._accepted[:] = 0

    def record(self, results: Sequence[RowResult]) -> None:
        """Records a step of rows that were to draft."""
        rows = [r.row for r in results]
        accepted = np.array([r.accepted for r in results])
        decisive = np.array([min(r.accepted + 1, r.asked) for r in results])
        # A draft that the drafter did not find counts as rejected: asking for it was in vain.
        tested = self._positions < decisive[:, None]
        passed = self._positions < accepted[:, None]
        self.common.record(tested.sum(0), passed.sum(0))
        self._tested[rows] = ROW_MEMORY * self._tested[rows] + tested
        self._accepted[rows] = ROW_MEMORY * self._accepted[rows] + passed
        recent = self._tested.sum(0), self._accepted.sum(0)
        if _unlike(*recent, self.common.by_position()):
            self.common.replace(*recent)

    def emitted(self, rows: Sequence[int]) -> np.ndarray:
        """Returns how many tokens these rows are expected to emit together, for each K from 0 to the most drafts."""
        index = list(rows)
        common = self.common.by_position()
        tested, accepted = self._tested[index], self._accepted[index]
        weight = np.where(_unlike(tested, accepted, common), UNLIKE_WEIGHT, ROW_WEIGHT)[:, None]
        own = (accepted + weight * common) / (tested + weight)
        return len(index) + np.concatenate(([0.0], own.cumprod(1).sum(0).cumsum()))


def _unlike(tested: np.ndarray, accepted: np.ndarray, expected: np.ndarray) -> np.ndarray:
    """Returns whether tests [..., K], of which some were accepted, contradict the expected acceptance [K]."""
    variance = tested @ (expected * (1 - expected)) + 0.25
    return (accepted.sum(-1) - tested @ expected) ** 2 > UNLIKE**2 * variance

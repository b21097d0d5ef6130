"""How likely the drafts of a batch are accepted, learned from recent steps."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .draft_length import RowResult

# The first guess is optimistic, since only drafting shows acceptance.
FIRST_GUESS = 0.8
GUESS_WEIGHT = 2.0  # tests that the guess counts for, and
POSITION_WEIGHT = 8.0  # those that the position before counts for
BATCH_MEMORY = 0.99  # weight of older steps with drafts, for each one since, in what is common to the rows
ROW_MEMORY = 0.9  # the same in what is a row's own: about the last ten steps count, because texts change
ROW_WEIGHT = 10.0  # tests that the common estimate counts for in a row's own,
ALONE_WEIGHT = 30.0  # where there is no other row, and
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

    def record(self, steps: int, tested: np.ndarray, accepted: np.ndarray) -> None:
        """Records what was tested and accepted in some steps, by position."""
        self._tested = BATCH_MEMORY**steps * self._tested + tested
        self._accepted = BATCH_MEMORY**steps * self._accepted + accepted

    def replace(self, tested: np.ndarray, accepted: np.ndarray) -> None:
        """Forgets all but these recent tests."""
        self._tested, self._accepted = tested, accepted

    def by_position(self) -> np.ndarray:
        guess, weight, found = FIRST_GUESS, GUESS_WEIGHT, []
        for tested, accepted in zip(self._tested.tolist(), self._accepted.tolist(), strict=True):
            guess = (accepted + weight * guess) / (tested + weight)
            weight = POSITION_WEIGHT
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

    def record(self, steps: int, results: Sequence[RowResult]) -> None:
        """Records the results that rows with drafts had in some steps."""
        rows = [r.row for r in results]
        accepted = np.array([r.accepted for r in results])
        decisive = np.array([min(r.accepted + 1, r.asked) for r in results])
        # A draft that the drafter did not find counts as rejected: asking for it was in vain.
        tested = self._positions < decisive[:, None]
        passed = self._positions < accepted[:, None]
        self.common.record(steps, tested.sum(0), passed.sum(0))
        for own, new in ((self._tested, tested), (self._accepted, passed)):
            own[[*{*rows}]] *= ROW_MEMORY**steps
            np.add.at(own, rows, new)
        recent = self._tested.sum(0), self._accepted.sum(0)
        if _unlike(*recent, self.common.by_position()):
            self.common.replace(*recent)

    def reached(self, rows: Sequence[int]) -> np.ndarray:
        """Returns the probability [n, K] that draft 1, 2, ... of each of these rows is accepted, with all before it."""
        index = list(rows)
        common = self.common.by_position()
        tested, accepted = self._tested[index], self._accepted[index]
        usual = ALONE_WEIGHT if len(self._tested) == 1 else ROW_WEIGHT
        weight = np.where(_unlike(tested, accepted, common), UNLIKE_WEIGHT, usual)[:, None]
        return ((accepted + weight * common) / (tested + weight)).cumprod(1)


def _unlike(tested: np.ndarray, accepted: np.ndarray, expected: np.ndarray) -> np.ndarray:
    """Returns whether tests [..., K], of which some were accepted, contradict the expected acceptance [K]."""
    variance = tested @ (expected * (1 - expected)) + 0.25
    return (accepted.sum(-1) - tested @ expected) ** 2 > UNLIKE**2 * variance

"""transformers' stopping criteria in the form in which the loop asks for ends, and several of these at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from transformers import StoppingCriteria

from ..checks import refuse
from ..stopping import StoppingCriteria as TextCriteria


class TransformersCriteria:
    """transformers' ``StoppingCriteria``, asked about every prefix that ends in a new token.

    Each is shown one sequence's ids as all B rows of a batch and judges by the answer for its row, so one that looks
    at the row does what it does in ``generate``. ``scores`` is None, as there without ``output_scores``.

    Args:
        criteria: callables of (input_ids [B, n] int64, scores) that return [B] bool, or one bool.
        batch_size: B.
        before: for each sequence the ids that stand before its text: the padding, which transformers shows as well.
        device: where the ids are made.
    """

    def __init__(
        self,
        criteria: Sequence[StoppingCriteria | Callable],
        batch_size: int = 1,
        before: Sequence[Sequence[int]] | None = None,
        device: torch.device | str = "cpu",
    ):
        if not isinstance(criteria, Sequence) or not all(callable(c) for c in criteria):
            refuse("stopping_criteria", repr(criteria), "a StoppingCriteriaList, or a list of StoppingCriteria")
        self._criteria, self._batch_size, self._before, self._device = list(criteria), batch_size, before, device

    def first_end(self, sequence: int, text: list[int], new: int) -> int | None:
        before = [] if self._before is None else self._before[sequence]
        ids = torch.tensor([[*before, *text]], device=self._device).expand(self._batch_size, -1)
        for kept in range(1, new + 1):
            shown = ids[:, : ids.shape[1] - new + kept]
            if any(_answer(criterion(shown, None), sequence) for criterion in self._criteria):
                return kept
        return None


def _answer(done: torch.Tensor | bool, sequence: int) -> bool:
    if isinstance(done, torch.Tensor) and done.numel() > 1:
        return bool(done.flatten()[sequence])
    return bool(done)


class AnyOf:
    """The earliest end of several."""

    def __init__(self, parts: Sequence[TextCriteria]):
        self._parts = list(parts)

    def first_end(self, sequence: int, text: list[int], new: int) -> int | None:
        ends = [part.first_end(sequence, text, new) for part in self._parts]
        return min((end for end in ends if end is not None), default=None)

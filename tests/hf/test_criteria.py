"""transformers' stopping criteria as the loop asks about them."""

from __future__ import annotations

import pytest
import torch
from specdec.hf.criteria import AnyOf, TransformersCriteria
from transformers.generation import MaxLengthCriteria


def test_criteria_see_every_new_prefix_of_their_own_row():
    seen = []

    def third_row_ends_at_nine(ids, scores):
        seen.append((tuple(ids.shape), ids[2].tolist(), scores))
        return torch.tensor([False, False, bool(ids[2, -1] == 9), False])

    stop = TransformersCriteria([third_row_ends_at_nine], 4, before=[[], [], [0, 0], []])
    text = [5, 6, 7, 9, 8]
    assert stop.first_end(2, text, 4) == 3
    assert seen == [((4, n), [0, 0, *text][:n], None) for n in (4, 5, 6)]
    assert stop.first_end(1, text, 4) is None  # not this criterion's row


def test_criteria_of_transformers_and_plain_booleans():
    assert TransformersCriteria([MaxLengthCriteria(4)]).first_end(0, [1, 2, 3, 4, 5], 3) == 2
    assert TransformersCriteria([MaxLengthCriteria(4)], 2, [[0], []]).first_end(0, [1, 2, 3, 4, 5], 3) == 1
    assert TransformersCriteria([lambda ids, scores: ids.shape[1] > 4]).first_end(0, [1, 2, 3, 4, 5], 3) == 3
    both = AnyOf([TransformersCriteria([MaxLengthCriteria(4)]), TransformersCriteria([MaxLengthCriteria(3)])])
    assert both.first_end(0, [1, 2, 3, 4, 5], 3) == 1 and both.first_end(0, [1], 1) is None
    with pytest.raises(ValueError, match="stopping_criteria: got"):
        TransformersCriteria([3])

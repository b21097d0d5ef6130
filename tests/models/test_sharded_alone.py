"""Divided models, each test in a group of processes of its own."""

from __future__ import annotations

import pytest
import torch
from specdec import SpeculativeDecoder, load_embedded_pair
from specdec.models.ranks.channel import RanksParted
from support.ranks import group
from support.sharded import check_divided

pytestmark = pytest.mark.nightly


def test_four_processes(tmp_path):
    with group(4):
        for case in ("gemma2", "llama", "qwen3"):
            check_divided(case, 4, tmp_path / case)


def test_memory_that_runs_out_on_one_rank_ends_all():
    """No rank tries again alone, with fewer tokens."""
    with group(2) as followers:
        target, draft, _ = load_embedded_pair(tp=2)
        decoder = SpeculativeDecoder(target, draft, num_drafts=2)
        assert decoder.generate([[1, 2, 3]], max_new_tokens=4).tokens

        def full(*_):
            raise torch.OutOfMemoryError("out of memory")

        target.model.layers[1].self_attn.o_proj.forward = full  # where the other one waits for a sum
        with pytest.raises(RanksParted, match="rank 0 failed: OutOfMemoryError: out of memory"):
            decoder.generate([[1, 2, 3]], max_new_tokens=4)
        assert followers[0].wait(15) == 1

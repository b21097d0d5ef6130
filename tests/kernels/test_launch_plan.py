"""The launch plans of the CUDA kernels (csrc/cuda/plan.h) for GPUs that the test machine does not have."""

from __future__ import annotations

import ctypes
import itertools

import pytest
from simt import kernels
from simt.plans import MACHINES, plan, step


@pytest.mark.parametrize("measured", [False, True])
@pytest.mark.parametrize("on", [name for name in MACHINES if name != "A100"])
def test_a_launch_fits_its_machine(on, measured):
    """Shared memory, the size of clusters and each warp's share are within the limits, whatever the step."""
    its, without = MACHINES[on], 0
    options = [{}, {"filters": 1}, {"table": 1}, {"weighed": 1}, {"filters": 1, "weighed": 1, "log_probs": 1}]
    shapes = itertools.product((1, 3, 8, 32, 100, 256, 1000), (0, 1, 5, 8, 16), (1, 1000, 32001, 128256, 262144))
    for (batch, k, vocabulary), dtype, rule, chosen in itertools.product(
        shapes, ("bfloat16", "float32"), (0, 1, 2), options
    ):
        made = plan(on, batch, k, vocabulary, dtype, rule, measured=measured, **chosen)
        if made.blocks == 0:
            without += 1
            continue
        many = batch > its.multiprocessors
        assert made.shared <= (its.half_of_it if many else its.shared_memory), (batch, k, vocabulary, dtype, chosen)
        assert made.threads == (192 if many else 384) and (made.blocks == 1 or not many)
        assert its.places[made.blocks] > 0
        rows = k + 1 + (k if chosen.get("weighed") and rule != 2 else 0)
        if measured:
            rows = k + 1 if rule == 2 else min(k, 1) * 2 if rule == 0 else 2 * k
        items = rows * -(-vocabulary // 1024)
        assert (made.blocks - 1) * made.threads // 32 < max(items, 1)  # no block without work
        assert made.stay == (not measured and items <= made.num_slots * made.blocks * made.threads // 32)
    assert without < 700  # of 5250; long vocabularies on GPUs with little memory


def test_all_of_a_small_batch_stays():
    """K = 5 drafts over 128256 tokens fit on an H200 in one launch, so every logit is read from memory once. So do
    those over 50257, of which most rows are not aligned."""
    for vocabulary in (50257, 128256):
        made = plan("H200", 1, 5, vocabulary)
        assert made.blocks == 16 and made.stay, made


@pytest.mark.parametrize("measured", [False, True])
def test_all_sequences_are_decided_at_once(measured):
    """A second wave of clusters costs as much as reading many rows: an H200 has room for 7 clusters of 16, for 9 of 9,
    and for 30 of 4, which 32 sequences would take two waves of."""
    for batch, blocks in ((1, 16), (7, 16), (9, 9), (15, 8), (32, 3), (64, 2), (132, 1)):
        assert plan("H200", batch, 8, 128256, measured=measured).blocks == blocks, batch


def test_a_large_batch_runs_at_once():
    """Two sequences share a multiprocessor, each with copies ahead: 6 warps x 4 slots x 2 KB."""
    made = plan("H200", 256, 4, 151936)
    assert (made.blocks, made.threads, made.num_slots, made.stay) == (1, 192, 4, 0)


def test_a_residual_comes_in_pairs():
    """If the rows are measured before, a warp has slots for its blocks of the target's row and the draft's."""
    assert plan("H200", 1, 5, 128256, measured=True).num_slots == 2
    assert plan("H200", 32, 8, 128256, measured=True).num_slots == 7


def test_what_a_sequence_needs_with_a_table_is_counted():
    """Each of 12 warps needs a float32 copy of a block."""
    assert plan("H200", 1, 0, 1024, table=1).shared == plan("H200", 1, 0, 1024).shared + 12 * 4096


def test_machines_without_clusters_split():
    assert plan("A100", 8, 5, 128256).blocks == 0


@pytest.mark.parametrize("on", MACHINES)
def test_a_split_launch_has_a_block_for_every_multiprocessor(on):
    its = MACHINES[on].multiprocessors
    for batch in (1, 4, 7, 60, 1000):
        params = step(batch, 5, 151936)
        most = -(-6 * 149 // 8)  # blocks of 8 warps that have work
        found = kernels.library().measuring_blocks(ctypes.byref(params), ctypes.byref(MACHINES[on]))
        assert found == min(-(-its // batch), most)

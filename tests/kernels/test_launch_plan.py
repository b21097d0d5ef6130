"""The launch plans of the CUDA kernels (csrc/cuda/plan.h) for GPUs that the test machine does not have."""

from __future__ import annotations

import ctypes
import itertools

import pytest
from simt import kernels
from simt.plans import MACHINES, plan, step


@pytest.mark.parametrize("on", [name for name in MACHINES if name != "A100"])
def test_a_launch_fits_its_machine(on):
    """Shared memory, the size of clusters and each warp's share are within the limits, whatever the step."""
    its, split, by_rows = MACHINES[on], 0, 0
    options = [{}, {"filters": 1}, {"table": 1}, {"weighed": 1}, {"filters": 1, "weighed": 1, "log_probs": 1}]
    shapes = itertools.product((1, 3, 8, 32, 100, 256, 1000), (0, 1, 5, 8, 16), (1, 1000, 32001, 128256, 262144))
    for (batch, k, vocabulary), dtype, rule, chosen in itertools.product(
        shapes, ("bfloat16", "float32"), (0, 1, 2), options
    ):
        made = plan(on, batch, k, vocabulary, dtype, rule, **chosen)
        if made.blocks == 0:
            split += 1
            continue
        many = batch > its.multiprocessors
        assert made.shared <= (its.half_of_it if many else its.shared_memory), (batch, k, vocabulary, dtype, chosen)
        assert made.threads == (192 if many else 384) and (made.blocks == 1 or not many)
        assert its.places[made.blocks] > 0
        rows = k + 1 + (k if chosen.get("weighed") and rule != 2 else 0)
        items = rows * -(-vocabulary // 1024)
        assert (made.blocks - 1) * made.threads // 32 < items  # no block without work
        assert made.stay == (0 < items <= made.num_slots * made.blocks * made.threads // 32)
        if made.by_rows:
            by_rows += 1
            pair = 2 if rule == 1 or chosen.get("weighed") else 1
            blocks, warps = -(-vocabulary // 1024), made.blocks * made.threads // 32
            assert rule != 2 and k > 0 and not many and not chosen.get("filters")
            assert pair * -(-blocks // warps) <= made.num_slots  # what a decision needs is near
            assert pair * blocks + warps <= made.num_slots * warps < items  # with what follows, but not with all
            assert blocks * 1024 * (4 if dtype == "float32" else 2) >= 24 * 1024 * made.blocks
    assert split < 700  # of 5250; long vocabularies on GPUs with little memory
    assert by_rows > (5 if on == "sm_120" else 100)


def test_all_of_a_small_batch_stays():
    """K = 5 drafts over 128256 or 151936 tokens fit on an H200, so every logit is read from memory once. So do those
    over 50257, of which most rows are not aligned."""
    for batch, vocabulary in itertools.product((1, 8), (50257, 128256, 151936)):
        made = plan("H200", batch, 5, vocabulary)
        assert made.blocks == 16 and made.stay, made


def test_a_large_batch_runs_at_once():
    """Two sequences share a multiprocessor, each with copies ahead: 6 warps x 4 slots x 2 KB."""
    made = plan("H200", 256, 4, 151936)
    assert (made.blocks, made.threads, made.num_slots, made.stay) == (1, 192, 4, 0)
    assert plan("H200", 32, 8, 128256).blocks == 4


def test_rows_that_do_not_all_stay_are_decided_one_by_one():
    """A row, or a pair of them, and more, are near: 4 multiprocessors have 9 or 8 slots for each of 48 warps, and a row
    has 126 blocks. Not if all rows stay, if a block holds less than a row, and with filters or the rule `coupled`."""
    for rule, more, slots in ((0, {}, 9), (1, {}, 8), (0, {"weighed": 1}, 8), (1, {"weighed": 1}, 8)):
        made = plan("H200", 32, 8, 128256, rule=rule, **more)
        assert (made.blocks, made.num_slots, made.by_rows, made.stay) == (4, slots, 1, 0)
    for batch, rule, more in ((8, 0, {}), (8, 1, {}), (132, 0, {}), (256, 0, {}), (32, 2, {}), (32, 0, {"filters": 1})):
        assert not plan("H200", batch, 8, 128256, rule=rule, **more).by_rows
    assert plan("H200", 32, 8, 128255).by_rows  # whose blocks begin anywhere


def test_what_a_sequence_needs_with_a_table_is_counted():
    """Each of 12 warps needs a float32 copy of a block."""
    assert plan("H200", 1, 0, 1024, table=1).shared == plan("H200", 1, 0, 1024).shared + 12 * 4096


def test_machines_without_clusters_split():
    assert plan("A100", 8, 5, 128256).blocks == 0


@pytest.mark.parametrize("on", MACHINES)
def test_a_split_launch_has_a_block_for_every_multiprocessor(on):
    """In two launches that overlap, each sequence's deciding block has a multiprocessor of its own."""
    its = MACHINES[on].multiprocessors
    for batch in (1, 4, 7, 60, 1000):
        params = step(batch, 5, 151936)
        most = -(-6 * 149 // 8)  # blocks of 8 warps that have work

        def blocks(dependent: bool, params=params) -> int:
            return kernels.library().measuring_blocks(ctypes.byref(params), ctypes.byref(MACHINES[on]), dependent)

        assert blocks(False) == min(-(-its // batch), most)
        assert blocks(True) == min(max((its - batch) // batch, 1), most)

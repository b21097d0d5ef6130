"""How large the caches are: the arithmetic, the refusals with their numbers, and the ledger of promised tokens."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from specdec.models.cache_plan import UNCHECKED, CacheBudget, plan_caches

COST = {"target": 16384, "draft": 2048}
EACH = 18432


def plan(rows=8, max_length=None, cache_tokens=None, cache_bytes=None, positions=4096, free=None, step=1, nodes=0):
    limits = {"target": positions, "draft": None if positions is None else positions + 1}
    how = {"slot_bytes": COST, "positions": limits, "free_memory": lambda: free, "step": step, "nodes": nodes}
    return plan_caches(rows, max_length, cache_tokens, cache_bytes, **how)


def test_a_row_has_a_trash_slot_and_a_slot_is_paid_in_all_caches():
    budget = plan(8, 2048)
    assert budget == CacheBudget(8, 2048, EACH)
    assert (budget.capacity, budget.slots, budget.tokens) == (2049, 8 * 2049, 8 * 2048)
    assert budget.bytes == 8 * 2049 * EACH


def test_exact_limits_are_enough_and_one_less_is_not():
    slots = 8 * 2049
    assert plan(8, 2048, cache_tokens=slots) == plan(8, 2048, cache_bytes=slots * EACH) == plan(8, 2048)
    assert plan(8, 2048, slots, slots * EACH, free=slots * EACH) == plan(8, 2048)
    shape = r"for 8 rows of 2049 slots \(max_length=2048 and the trash slot\)"
    with pytest.raises(ValueError, match=f"^cache_tokens: got {slots - 1}, allowed: >= {slots} {shape}$"):
        plan(8, 2048, cache_tokens=slots - 1)
    with pytest.raises(ValueError, match=f"^cache_bytes: got .*, allowed: >= {slots * EACH} .* {shape}"):
        plan(8, 2048, cache_bytes=slots * EACH - 1)
    with pytest.raises(ValueError, match="^cache: got 288.14 MiB .*, allowed: <= 288.14 MiB, what is free now"):
        plan(8, 2048, free=slots * EACH - 1)


def test_what_forwards_take_beside_caches_has_to_be_free():
    """And is asked for what was planned."""

    def planned(free):
        def beside(rows, slots):
            return 1000 * rows + slots

        given = {"slot_bytes": COST, "positions": {}, "free_memory": lambda: free, "beside": beside}
        return plan_caches(8, 2048, cache_bytes=8 * 2049 * EACH, **given)

    least = 8 * 2049 * EACH + 8000 + 2049
    assert planned(least) == planned(None) == plan(8, 2048)
    with pytest.raises(ValueError, match=r"^cache: got 288.14 MiB \(.*\) and 9.81 KiB beside them, allowed: <= 288.15"):
        planned(least - 1)


def test_refusals_have_the_numbers():
    with pytest.raises(ValueError) as refused:
        plan(8, 2048, cache_bytes=1000000)
    assert str(refused.value) == (
        "cache_bytes: got 1000000 (976.56 KiB), allowed: >= 302137344 (288.14 MiB) for 8 rows of 2049 slots "
        "(max_length=2048 and the trash slot) at 18432 bytes a token (target 16384 + draft 2048)"
    )
    with pytest.raises(ValueError) as refused:
        plan(8, 2048, free=100 * 2**20)
    assert str(refused.value) == (
        "cache: got 288.14 MiB (8 rows of 2049 slots at 18432 bytes a token (target 16384 + draft 2048)), "
        "allowed: <= 100.00 MiB, what is free now"
    )
    with pytest.raises(ValueError, match="^max_length: got 4097, allowed: <= 4096, the positions of the target$"):
        plan(8, 4097)


def test_what_is_not_given_is_as_large_as_it_can_be():
    assert plan().max_length == 4096  # the positions
    assert plan(cache_tokens=8 * 100).max_length == 99
    assert plan(cache_tokens=8 * 100 + 7).max_length == 99
    assert plan(cache_tokens=8 * 100, nodes=6).max_length == 93
    assert plan(cache_bytes=8 * 100 * EACH + 1).max_length == 99
    assert plan(cache_tokens=8 * 200, cache_bytes=8 * 100 * EACH).max_length == 99  # the tighter one
    assert plan(cache_tokens=8 * 100, cache_bytes=8 * 200 * EACH).max_length == 99
    assert plan(cache_tokens=10**9).max_length == 4096
    assert plan(positions=None, cache_tokens=80).max_length == 9
    assert plan(None, 99, cache_tokens=799).rows == 7
    assert plan(None, 99, cache_bytes=800 * EACH).rows == 8
    for refused, told in (
        (lambda: plan(positions=None), "max_length: got None"),
        (lambda: plan(None, 99), "rows: got None"),
        (lambda: plan(None, cache_tokens=100), "rows: got None"),
        (lambda: plan(None, 99, cache_tokens=99), "cache_tokens: got 99, allowed: >= 100 for 1 rows"),
        (lambda: plan(8, cache_tokens=15), "cache_tokens: got 15, allowed: >= 16 for 8 rows of 2 slots"),
        (lambda: plan(0), "rows: got 0"),
        (lambda: plan(8, 0), "max_length: got 0"),
        (lambda: plan(8, 2.5), "max_length: got 2.5"),
        (lambda: plan(8, 5, cache_tokens=True), "cache_tokens: got True"),
        (lambda: plan(8, 5, cache_bytes=0), "cache_bytes: got 0"),
    ):
        with pytest.raises(ValueError, match=told):
            refused()


def test_rows_in_steps_of_slots():
    assert [plan(2, n, step=256).capacity for n in (1, 255, 256, 511, 512)] == [256, 256, 512, 512, 768]
    assert plan(2, cache_tokens=2 * 600, step=256).max_length == 511
    assert plan(None, 300, cache_tokens=2000, step=256).rows == 3
    with pytest.raises(ValueError) as refused:
        plan(2, cache_tokens=400, step=256)
    assert str(refused.value) == (
        "cache_tokens: got 400, allowed: >= 512 for 2 rows of 256 slots "
        "(max_length=1 and the trash slot, in steps of 256)"
    )


@given(
    st.one_of(st.none(), st.integers(1, 40)),
    st.one_of(st.none(), st.integers(1, 500)),
    st.one_of(st.none(), st.integers(2, 20_000)),
    st.one_of(st.none(), st.integers(1, 20_000 * EACH)),
    st.integers(0, 20_000 * EACH),
    st.sampled_from((1, 1, 8)),
)
@settings(max_examples=120, deadline=None)
def test_whatever_is_planned_is_within_every_limit_and_cannot_be_larger(rows, max_length, tokens, size, free, step):
    try:
        budget = plan(rows, max_length, tokens, size, 400, free, step)
    except ValueError:
        return
    larger = CacheBudget(budget.rows + (rows is None), budget.max_length + (max_length is None), EACH, step)
    slots = [budget.slots, larger.slots]
    limits = [n for n in (tokens, None if size is None else size // EACH) if n is not None]
    assert all(slots[0] <= n for n in limits) and budget.max_length <= 400
    assert slots[0] * EACH <= max(free, UNCHECKED)
    if rows is None or max_length is None and budget.max_length < 400:
        assert any(slots[1] > n for n in limits)

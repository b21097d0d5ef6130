"""The host's token table: in order and right after every token, however long the text."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from specdec.sampling.token_table import HostTable

from specdec_kernels import SamplingParams

CPU = torch.device("cpu")
OFF = {name: SamplingParams.neutral(name) for name in SamplingParams.PENALTIES}


def entries(table, sequence: int) -> dict[int, tuple[float, bool, int]]:
    """What one row says, and that its ids are in order."""
    ids = table.ids[sequence].tolist()
    size = sum(token < SamplingParams.TABLE_PADDING for token in ids)
    assert ids[:size] == sorted({*ids[:size]}) and {*ids[size:]} <= {SamplingParams.TABLE_PADDING}
    for column in (table.bias, table.in_prompt, table.count):
        assert not column[sequence, size:].any()
    columns = (t[sequence, :size].tolist() for t in (table.bias, table.in_prompt, table.count))
    return dict(zip(ids[:size], zip(*columns, strict=True), strict=True))


def table_of(prompts, params, bias, eos=((), (), ()), shortest=(0, 0, 0)) -> HostTable:
    table = HostTable(len(prompts), max(map(len, eos)), CPU)
    for row, (prompt, own) in enumerate(zip(prompts, bias, strict=True)):
        table.begin(row, OFF | params, own, prompt, len(prompt), eos[row], shortest[row])
    return table


@pytest.mark.parametrize("repetition", (False, True))
def test_table_follows_the_text(repetition):
    generator = torch.Generator().manual_seed(0)
    prompts = [[5, 3, 5], [9], list(range(40))]
    bias = [{3: 1.5, 70: -2.0}, {}, {1000: float("-inf")}]
    params = {"frequency_penalty": 1.0} | ({"repetition_penalty": 1.5} if repetition else {})
    table = table_of(prompts, params, bias)
    counts = [Counter() for _ in prompts]
    for _ in range(60):
        for b, count in enumerate(counts):
            tokens = torch.randint(0, 90, (b + 1,), generator=generator).tolist()
            table.add(b, tokens)
            count.update(tokens)
        current = table.on_device()
        assert current is table.on_device() and current.ends is None and current.first_end is None
        assert [t.dtype for t in current[:4]] == [torch.int64, torch.float32, torch.bool, torch.int32]
        for b, count in enumerate(counts):
            known = {*prompts[b]} if repetition else set()
            expected = {t: (bias[b].get(t, 0.0), t in known, count[t]) for t in {*count, *bias[b], *known}}
            assert entries(current, b) == expected


def test_only_what_is_asked_for():

    def needed(bias=({}, {}), eos=((9,), (7, 2)), shortest=(0, 0)):
        return table_of([[1], [1, 2]], {}, bias, eos, shortest)

    assert needed().on_device() is None and needed(eos=((3, 4), ()), shortest=(0, 4)).on_device() is None
    ends = needed(shortest=(0, 4)).on_device()
    assert (ends.ends.tolist(), ends.first_end.tolist()) == ([[-1, -1], [2, 7]], [0, 6])
    ends = needed(shortest=(3, 4)).on_device()
    assert (ends.ends.tolist(), ends.first_end.tolist()) == ([[9, -1], [2, 7]], [4, 6])
    assert entries(ends, 0) == entries(ends, 1) == {}
    banned = needed(bias=[{}, {4: float("-inf")}])
    banned.add(1, [6, 6])  # nothing counts
    assert entries(banned.on_device(), 1) == {4: (float("-inf"), False, 0)} and banned.on_device().ends is None


def test_a_row_forgets_its_sequence():
    params = {"frequency_penalty": 1.0, "repetition_penalty": 1.5}
    table = table_of([[5, 3], [9, 9]], params, [{3: 1.5}, {}], ((), (4, 2)), (0, 3))
    table.add(0, [7, 7])
    assert table.counts and table.on_device().first_end.tolist() == [0, 5]
    assert table.on_device().ends.tolist() == [[-1, -1], [2, 4]]
    table.begin(0, OFF, {4: -1.0}, [8], 1, (), 0)
    assert entries(table.on_device(), 0) == {4: (-1.0, False, 0)}
    assert entries(table.on_device(), 1) == {9: (0.0, True, 0)}
    table.end(1)
    table.add(1, [6])
    assert not table.counts and table.on_device().first_end is None and entries(table.on_device(), 1) == {}
    table.end(0)
    assert table.on_device() is None
    table.begin(1, OFF, {}, [8], 1, (7,), 2)
    assert (table.on_device().ends.tolist(), table.on_device().first_end.tolist()) == ([[-1, -1], [7, -1]], [0, 3])

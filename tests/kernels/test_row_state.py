"""``place_rows`` and ``advance_rows``: every backend does what follows from a list of tokens in plain Python."""

from __future__ import annotations

import random

import pytest
import torch

from specdec_kernels import Status, advance_rows, place_rows
from specdec_kernels.backends import operation
from specdec_kernels.testing import device_of

TRASH = 99


@pytest.fixture
def its_backend(backend):
    if backend == "cuda":
        pytest.skip("an NVIDIA GPU has these of Triton")
    return backend


@pytest.mark.parametrize("num_drafts", (0, 1, 5))
def test_places(its_backend, num_drafts):
    cases = [(known, room, wanted) for known in (0, 1, 2, 9) for room in (0, 1, 3, 20) for wanted in (0, 2, 7)]
    given = torch.tensor(cases, device=device_of(its_backend)).T
    out = place_rows(*given, num_drafts=num_drafts, trash=TRASH, backend=its_backend)
    rows = zip(*(part.tolist() for part in out), strict=True)
    for (known, room, wanted), (length, positions, slots, allowed, live) in zip(cases, rows, strict=True):
        assert live == (room > 0) and length == max(known - 1, 0)
        assert allowed == max(min(wanted, room - 1, num_drafts), 0)
        first = known - 2
        counting = [first + i for i in range(num_drafts + 2) if live and i < allowed + 2 and first + i >= 0]
        begin = max(-first, 0) if live else 0
        rest = num_drafts + 2 - len(counting) - begin
        assert positions == [0] * begin + counting + [0] * rest
        assert slots == [TRASH] * begin + counting + [TRASH] * rest


def advanced(known: int, room: int, last_two: list[int], ends: list[int], emitted: list[int], failed: bool):
    """(emitted tokens, known, room, the last two) of a row."""
    if room == 0:
        emitted = []
    at = next((i for i, token in enumerate(emitted) if token in ends), None)
    kept = emitted if at is None else emitted[: at + 1]
    room = 0 if at is not None or failed else room - len(kept)
    return len(kept), known + len(kept), room, [*last_two, *kept][-2:]


@pytest.mark.parametrize("columns", (1, 2, 6))
def test_rows_advance(its_backend, columns):
    """To the first token that ends the sequence, wherever it is, but not by one in a slot that is not the row's. The
    rows of the state belong to a larger batch, whose other rows stay."""
    drawn, ends = random.Random(columns), 2
    size, count = 70, 64
    state = torch.full((5 + ends, size), 7, dtype=torch.int64)
    tokens, emitted, statuses, expected = [], [], [], []
    for b in range(count):
        room, known = drawn.choice((0, *range(columns, columns + 3))), drawn.randrange(1, 9)
        last_two, its_ends = [drawn.randrange(6) for _ in range(2)], [drawn.choice((-1, 0, 1)) for _ in range(ends)]
        number, row = drawn.randrange(columns + 1), [drawn.randrange(6) for _ in range(columns)]
        failed = number == 0 or drawn.random() < 0.1
        row[number:] = [drawn.choice((-1, its_ends[0])) for _ in row[number:]]
        state[:, b] = torch.tensor([known, room, 1234, *last_two, *its_ends])
        tokens.append(row)
        emitted.append(number)
        statuses.append(int(Status.TARGET_FAULTS) & -int(Status.TARGET_FAULTS) if failed else 0)
        expected.append(advanced(known, room, last_two, [e for e in its_ends if e >= 0], row[:number], failed))
    device = device_of(its_backend)
    state, before = state.to(device), state.clone()
    counts = advance_rows(
        state[:, :count],
        torch.tensor(tokens, device=device),
        torch.tensor(emitted, dtype=torch.int32, device=device),
        torch.tensor(statuses, dtype=torch.int32, device=device),
        backend=its_backend,
    )
    state = state.cpu()
    got = zip(counts.tolist(), *state[:2, :count].tolist(), state[3:5, :count].T.tolist(), strict=True)
    for b, row in enumerate(got):
        live = before[1, b] > 0
        assert row == expected[b] if live else row == (0, before[0, b], 0, before[3:5, b].tolist())
    assert torch.equal(state[2], before[2]) and torch.equal(state[5:], before[5:])
    assert torch.equal(state[:, count:], before[:, count:])


def test_a_row_that_does_not_fit_is_refused(its_backend):
    if its_backend != "cpu":
        pytest.skip("direct calls of native code check what they are given")
    state = torch.zeros(6, 2, dtype=torch.int64)
    ones = torch.ones(2, dtype=torch.int32)
    with pytest.raises(RuntimeError, match="tokens has a wrong shape or dtype"):
        advance_rows(state, torch.zeros(3, 1, dtype=torch.int64), ones, ones, backend=its_backend)
    with pytest.raises(RuntimeError, match="known, room or wanted has a wrong shape or dtype"):
        place_rows(state[0], state[1, :1], state[2], num_drafts=1, trash=TRASH, backend=its_backend)


def test_operations_are_what_they_say(its_backend):
    """Which of their tensors they write, and what they return on tensors without numbers."""
    device = device_of(its_backend)
    state, ones = torch.ones(6, 2, dtype=torch.int64, device=device), torch.ones(2, dtype=torch.int32, device=device)
    checks = ("test_schema", "test_faketensor")
    place = operation("place_rows", its_backend, device.type)
    torch.library.opcheck(place, (state[0], state[1], state[2], 2, TRASH), test_utils=checks)
    advance, tokens = (
        operation("advance_rows", its_backend, device.type),
        torch.ones(2, 3, dtype=torch.int64).to(device),
    )
    torch.library.opcheck(advance, (state, tokens, ones, ones * 0, 1), test_utils=checks)

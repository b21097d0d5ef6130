"""Chi-square tests of the emitted law, with drafts drawn by ``draft_step`` itself, as in decoding.

Everyday size: 200,000 draws a cell, fixed seeds (consecutive ones: the hardest for a counter-based
generator), and a Latin square of temperature and dtype over kind x K; ``-m nightly`` runs every combination,
and 10 million draws. All tests together raise a false alarm with probability <= 1e-6 (Bonferroni). With power
0.999 a test of token pairs (272 outcomes) finds probabilities off by a factor 1 +- 0.040, of the number
accepted (K = 3) 1 +- 0.022, of texts of five tokens (243 outcomes) 1 +- 0.040; with 10 million draws 1 +-
0.006 and 1 +- 0.0031. ``test_power`` computes these figures, and the tests named ``..._is_found`` show that
bugs of real systems are.

The reference is slow, so it runs fewer cells, with its race's block cut from 1024 to 16 entries: for V <= 16
that is the same draw, token for token (``test_small_blocks_draw_the_same``). Triton's interpreter is slower
still. Given the same seeds a backend's tokens equal the reference's, so its evidence is
``test_triton_draws_what_the_reference_draws`` (with tests/test_parity.py) together with the reference's
chi-square; on a GPU it runs all cells, like ``cpu``."""

from __future__ import annotations

import itertools
from collections import Counter

import numpy as np
import pytest
import torch

from specdec_kernels import SamplingParams, draft_step, speculative_step
from specdec_kernels.backends import reference
from specdec_kernels.testing import (
    KINDS,
    chi_square,
    detectable_bias,
    device_of,
    leviathan_law,
    pair_of_rows,
    probabilities,
    text_law,
)

FAMILY = 1e-6  # false-alarm probability of the whole file
TESTS = 400  # at least the number of chi-square tests in this file; counted by test_family
LEVEL = FAMILY / TESTS
DRAWS, NIGHTLY = 200_000, 10_000_000
CHUNK = 8192  # sequences per call of the reference, so that its tables stay in the cache

V = 16
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
TEMPERATURES = (0.5, 1.0, 1.7)
ALL_CELLS = tuple(itertools.product(KINDS, (1, 3), TEMPERATURES, DTYPES))
EVERYDAY_CELLS = tuple(
    c for c in ALL_CELLS
    if (KINDS.index(c[0]) + c[1] // 2 + TEMPERATURES.index(c[2]) + DTYPES.index(c[3])) % 3 == 0
)  # fmt: skip
REFERENCE_CELLS = tuple(itertools.product(KINDS, (1, 3), (1.0,), (torch.float32,)))
BIG_BACKENDS = ("cpu", "triton") if torch.cuda.is_available() else ("cpu",)


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "BLOCK", 16)


def draw(cell, backend: str, draws: int, first_seed: int = 0, vocabulary: int = V):
    """(emitted [draws, K+1], num_accepted [draws]) of one step at fixed logits, a sequence for each seed."""
    kind, num_drafts, temperature, dtype = cell
    device, params = device_of(backend), SamplingParams(temperature=temperature)
    target, draft = (None if t is None else t.to(device, dtype) for t in pair_of_rows(kind, num_drafts, vocabulary))
    chunk, parts = CHUNK if backend == "reference" else 1 << 20, []
    for start in range(0, draws, chunk):
        n = min(chunk, draws - start)
        common = {
            "params": params,
            "seed": torch.arange(start, start + n, device=device) + first_seed,
            "position": 11,
            "backend": backend,
        }
        if draft is None:
            tokens = favourites(target).expand(n, -1)
            out = speculative_step(target.expand(n, -1, -1), tokens, None, **common)
        else:
            d = [draft_step(draft[i].expand(n, -1), offset=i, **common) for i in range(num_drafts)]
            tokens, _, cutoff, lse = (torch.stack(c, 1) for c in list(zip(*d, strict=True))[:4])
            out = speculative_step(
                target.expand(n, -1, -1), tokens, draft.expand(n, -1, -1), draft_stats=(cutoff, lse), **common
            )
        assert not out.status.any()
        parts.append((out.tokens.cpu(), out.num_accepted.cpu()))
    return tuple(torch.cat(column) for column in zip(*parts, strict=True))


def favourites(target: torch.Tensor) -> torch.Tensor:
    """One-hot drafts [K]: likely tokens, so that acceptances and rejections both occur."""
    return target[:-1].topk(3, dim=-1).indices[:, 1]


def laws(cell, vocabulary: int = V) -> tuple[dict, dict]:
    """The laws of (first, second emitted or -1) and of the number accepted, from Leviathan's Algorithm 1."""
    kind, num_drafts, temperature, dtype = cell
    target, draft = pair_of_rows(kind, num_drafts, vocabulary)
    p = [probabilities(row, temperature) for row in target.to(dtype).double().tolist()]
    if draft is None:
        q = [row.numpy() for row in torch.nn.functional.one_hot(favourites(target.to(dtype)), vocabulary).double()]
    else:
        q = [probabilities(row, temperature) for row in draft.to(dtype).double().tolist()]
    # Only the first two emitted matter, and rows do not depend on the text: two drafted tokens give the pairs' law.
    pairs: dict = {}
    for text, mass in leviathan_law(lambda t: p[len(t)], lambda t: q[len(t)], min(num_drafts, 2)).items():
        key = (text[0], text[1] if len(text) > 1 else -1)
        pairs[key] = pairs.get(key, 0.0) + float(mass)
    alpha = [float(torch.minimum(torch.tensor(a), torch.tensor(b)).sum()) for a, b in zip(p, q, strict=False)]
    accepted, reached = {}, 1.0
    for n in range(num_drafts + 1):
        stop = 1 - alpha[n] if n < num_drafts else 1.0
        accepted[n], reached = reached * stop, reached * (1 - stop)
    return pairs, accepted


def check(cell, backend: str, draws: int, vocabulary: int = V) -> None:
    emitted, num_accepted = draw(cell, backend, draws, vocabulary=vocabulary)
    pairs, accepted = laws(cell, vocabulary)
    codes, counts = (emitted[:, 0] * (vocabulary + 1) + emitted[:, 1] + 1).unique(return_counts=True)
    seen = {
        (code // (vocabulary + 1), code % (vocabulary + 1) - 1): n
        for code, n in zip(codes.tolist(), counts.tolist(), strict=True)
    }
    for counted, law in ((seen, pairs), (Counter(num_accepted.tolist()), accepted)):
        result = chi_square(counted, law, LEVEL)
        assert result.p_value > LEVEL, (cell, result)


def cell_name(cell) -> str:
    return f"{cell[0]}-K{cell[1]}-T{cell[2]}-{str(cell[3]).removeprefix('torch.')}"


@pytest.mark.parametrize("cell", EVERYDAY_CELLS, ids=cell_name)
@pytest.mark.parametrize("backend", BIG_BACKENDS)
def test_emitted_law(cell, backend):
    check(cell, backend, DRAWS)


@pytest.mark.nightly
@pytest.mark.parametrize("cell", sorted({*ALL_CELLS} - {*EVERYDAY_CELLS}, key=str), ids=cell_name)
@pytest.mark.parametrize("backend", BIG_BACKENDS)
def test_emitted_law_of_all_cells(cell, backend):
    check(cell, backend, DRAWS)


@pytest.mark.parametrize("cell", REFERENCE_CELLS, ids=cell_name)
def test_emitted_law_of_the_reference(cell, small_blocks):
    check(cell, "reference", DRAWS)


@pytest.mark.nightly
@pytest.mark.parametrize("cell", REFERENCE_CELLS, ids=cell_name)
@pytest.mark.parametrize("backend", BIG_BACKENDS)
def test_emitted_law_nightly(cell, backend):
    check(cell, backend, NIGHTLY)


def test_small_blocks_draw_the_same(monkeypatch):
    cell = ("opposite", 3, 1.0, torch.float32)
    whole = draw(cell, "reference", 2000)
    monkeypatch.setattr(reference, "BLOCK", 16)
    assert all(torch.equal(a, b) for a, b in zip(whole, draw(cell, "reference", 2000), strict=True))


def test_law_of_the_two_level_race(monkeypatch):
    """Sixteen tokens in four blocks of four: the same law, by other numbers."""
    monkeypatch.setattr(reference, "BLOCK", 4)
    check(("opposite", 1, 1.0, torch.float32), "reference", DRAWS)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("backend", BIG_BACKENDS)
def test_law_of_many_blocks(kind, backend):
    """V = 2500, three blocks of which the last is partial: the laws of num_accepted and of the first emitted
    token, by hundreds of the vocabulary and by its remainder."""
    cell, vocabulary = (kind, 1, 1.0, torch.float32), 2500
    emitted, num_accepted = draw(cell, backend, 20_000, vocabulary=vocabulary)
    target, draft = pair_of_rows(kind, 1, vocabulary)
    p = probabilities(target[0].tolist(), 1.0)
    one_hot = torch.nn.functional.one_hot(favourites(target)[0], vocabulary).double().numpy()
    q = one_hot if draft is None else probabilities(draft[0].tolist(), 1.0)
    alpha, first = float(np.minimum(p, q).sum()), emitted[:, 0]
    for counted, law in (
        (num_accepted, [1 - alpha, alpha]),
        (first // 100, p.reshape(-1, 100).sum(1)),
        (first % 50, p.reshape(-1, 50).sum(0)),
    ):
        result = chi_square(Counter(counted.tolist()), dict(enumerate(map(float, law))), LEVEL)
        assert result.p_value > LEVEL, (cell, result)


@pytest.mark.parametrize("draws", [8, pytest.param(200, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("cell", EVERYDAY_CELLS, ids=cell_name)
def test_triton_draws_what_the_reference_draws(cell, draws, small_blocks):
    """Only near-ties may differ, which are fewer than one in a thousand; with these seeds none does."""
    ours, theirs = (draw(cell, backend, draws, first_seed=draws) for backend in ("triton", "reference"))
    differing = ((ours[0] != theirs[0]).any(1) | (ours[1] != theirs[1])).sum()
    assert differing == 0, (cell, int(differing))


# ---- Whole texts -------------------------------------------------------------------------------------------

LENGTH, TOY = 5, 3  # tokens of a text; vocabulary
TOY_TARGET = torch.tensor([[0.0, 1.2, -0.4], [0.9, -0.7, 0.3], [-0.5, 0.2, 1.0], [0.4, 0.0, -0.3]])  # by the last token
TOY_DRAFT = torch.tensor([[0.8, -0.3, 0.2], [-0.6, 0.9, 0.0], [0.7, 0.1, -0.9], [-0.4, 0.6, 0.1]])


def decode(backend: str, draws: int, num_drafts: int, reuse_positions: bool = False) -> Counter:
    """Texts of LENGTH tokens, decoded step by step as the loop does: positions advance by what was emitted."""
    counts: Counter = Counter()
    device, params = device_of(backend), SamplingParams()
    chunk = CHUNK if backend == "reference" else 1 << 18
    target, draft = TOY_TARGET.to(device), TOY_DRAFT.to(device)
    for start in range(0, draws, chunk):
        n = min(chunk, draws - start)
        seed = torch.arange(start, start + n, device=device)
        text = torch.full((n, LENGTH + num_drafts + 1), -1, device=device)
        length, last = torch.zeros_like(seed), torch.full_like(seed, TOY)
        while (active := (length < LENGTH).nonzero().flatten()).numel():
            position = length[active] * 0 if reuse_positions else length[active]
            common = {"params": params, "seed": seed[active], "position": position, "backend": backend}
            before = [last[active]]
            for i in range(num_drafts):
                before.append(draft_step(draft[before[-1]], offset=i, **common).tokens)
            context = torch.stack(before, 1)
            out = speculative_step(target[context], context[:, 1:], draft[context[:, :-1]], **common)
            columns = torch.arange(num_drafts + 1, device=device)
            rows, slots = active[:, None].expand_as(out.tokens), length[active][:, None] + columns
            kept = out.tokens >= 0
            text[rows[kept], slots[kept]] = out.tokens[kept]
            length[active] += out.num_accepted + 1
            last[active] = text[active, length[active] - 1]
        codes = text[:, :LENGTH] @ (TOY ** torch.arange(LENGTH - 1, -1, -1, device=device))
        for code, number in zip(*(t.tolist() for t in codes.unique(return_counts=True)), strict=True):
            counts[code] += number
    return counts


def check_texts(counts: Counter):
    def target(prefix):
        return probabilities(TOY_TARGET[prefix[-1] if prefix else TOY].tolist(), 1.0)

    def code(text):
        return sum(t * TOY ** (LENGTH - 1 - i) for i, t in enumerate(text))

    return chi_square(counts, {code(text): mass for text, mass in text_law(target, LENGTH).items()}, LEVEL)


@pytest.mark.parametrize("num_drafts", [1, 3])
@pytest.mark.parametrize("backend", BIG_BACKENDS)
def test_whole_texts(backend, num_drafts):
    """Catches noise that serves in two steps, which a test of one step cannot see."""
    result = check_texts(decode(backend, DRAWS, num_drafts))
    assert result.p_value > LEVEL, result


def test_whole_texts_of_the_reference(small_blocks):
    result = check_texts(decode("reference", DRAWS // 2, 3))
    assert result.p_value > LEVEL, result


@pytest.mark.nightly
@pytest.mark.parametrize("backend", BIG_BACKENDS)
def test_whole_texts_nightly(backend):
    result = check_texts(decode(backend, NIGHTLY, 3))
    assert result.p_value > LEVEL, result


def test_noise_reused_between_steps_is_found():
    """The same test with a loop that forgets to advance positions, so that every step draws the same numbers."""
    assert check_texts(decode("cpu", DRAWS // 4, 3, reuse_positions=True)).p_value < 1e-30


# ---- The numbers themselves --------------------------------------------------------------------------------


def test_philox_known_answers():
    """The vectors published with Random123 (kat_vectors, philox4x32 10 rounds)."""
    ones = 0xFFFFFFFF
    pi = (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344, 0xA4093822, 0x299F31D0)
    for counter, key, words in (
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((ones,) * 4, (ones,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (pi[:4], pi[4:], (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)),
    ):
        seed = torch.tensor([key[1] << 32 | key[0]], dtype=torch.uint64).view(torch.int64)
        index = 4 * counter[0] + torch.arange(4)[None]
        got = reference.philox(seed, index, torch.tensor([counter[1]]), counter[2], counter[3])
        assert got.tolist() == [list(words)]


def test_uniform_is_uniform_and_neighbours_are_independent():
    """64 bins, and the 16 x 16 joint bins of neighbouring words, seeds, positions, offsets and streams."""
    seed, position = torch.arange(50_000), torch.full((50_000,), 9)

    def words(seed=seed, position=position, offset=0, stream=0):
        return reference.uniform(
            reference.philox(seed, torch.arange(8).expand(len(seed), -1), position, offset, stream)
        )

    u = words()
    neighbours = {
        "word": (u[:, :-1], u[:, 1:]),
        "seed": (u, words(seed=seed + 1)),
        "position": (u, words(position=position + 1)),
        "offset": (u, words(offset=1)),
        "stream": (u, words(stream=1)),
    }
    counts = Counter((u * 64).long().flatten().tolist())
    assert chi_square(counts, {k: 1 / 64 for k in range(64)}, LEVEL).p_value > LEVEL
    for name, (a, b) in neighbours.items():
        joint = Counter(((a * 16).long() * 16 + (b * 16).long()).flatten().tolist())
        result = chi_square(joint, {k: 1 / 256 for k in range(256)}, LEVEL)
        assert result.p_value > LEVEL, (name, result)


def test_uniform_is_open_and_keeps_small_numbers():
    u = reference.uniform(torch.tensor([0, 1, 2**31, 2**32 - 1]))
    assert u.tolist() == [2.0**-33, 1.5 * 2.0**-32, 0.5, 1 - 2.0**-24]


# ---- What these tests can see ------------------------------------------------------------------------------


def test_power():
    """The figures of the docstring, and that no cell of the file is weaker."""
    assert detectable_bias(DRAWS, V * (V + 1) - 1, LEVEL) < 0.040
    assert detectable_bias(DRAWS, 3, LEVEL) < 0.022
    assert detectable_bias(DRAWS, TOY**LENGTH - 1, LEVEL) < 0.040
    assert detectable_bias(NIGHTLY, V * (V + 1) - 1, LEVEL) < 0.006
    assert detectable_bias(NIGHTLY, 3, LEVEL) < 0.0031


def test_family():
    """LEVEL is small enough: two tests a cell, three for each kind of many blocks, the texts, and ten single ones."""
    backends = 2  # at most: cpu and a GPU
    cells = backends * (len(ALL_CELLS) + len(REFERENCE_CELLS)) + len(REFERENCE_CELLS) + 1
    assert 2 * cells + backends * (3 * len(KINDS) + 3) + 10 <= TESTS


def test_shared_noise_of_draft_and_recovery_is_found(monkeypatch):
    """vllm#54282: with one stream for both, the recovered token favours what the draft favoured."""
    monkeypatch.setattr(reference, "BLOCK", 16)
    monkeypatch.setattr(reference, "RECOVER_BLOCK", reference.DRAFT_BLOCK)
    monkeypatch.setattr(reference, "RECOVER_TOKEN", reference.DRAFT_TOKEN)
    with pytest.raises(AssertionError):
        check(("opposite", 1, 1.0, torch.float32), "reference", DRAWS)

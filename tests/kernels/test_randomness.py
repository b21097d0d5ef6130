"""The random numbers themselves: published answers, uniformity, independence of neighbours."""

from __future__ import annotations

from collections import Counter

import torch
from specdec.evaluation.verify.chi_square import chi_square
from support.cells import LEVEL

from specdec_kernels.backends import reference


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
    """Chi-square over 64 bins, and over 16 x 16 joint bins of neighbouring words, seeds, positions, offsets and
    streams."""
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

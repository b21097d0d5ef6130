"""The noise of rule ``coupled``, computed from docs/numerics.md ("Randomness") alone.

It shares no code with the kernels, so that a mistake in their noise cannot hide here as well.
"""

from __future__ import annotations

import numpy as np
import torch

_RACE = 5  # the stream of rule ``coupled``
_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_WEYL = (0x9E3779B9, 0xBB67AE85)
_LOW = np.uint64(0xFFFFFFFF)


def philox(counter: np.ndarray, key: int) -> np.ndarray:
    """Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011).

    Args:
        counter: [4, n] uint64, each below 2^32.
        key: 64 bits.

    Returns:
        [4, n] uint64, each below 2^32.
    """
    c0, c1, c2, c3 = counter
    keys = [key & 0xFFFFFFFF, key >> 32 & 0xFFFFFFFF]
    for _ in range(10):
        product0, product1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0 = product1 >> np.uint64(32) ^ c1 ^ np.uint64(keys[0])
        c2 = product0 >> np.uint64(32) ^ c3 ^ np.uint64(keys[1])
        c1, c3 = product1 & _LOW, product0 & _LOW
        keys = [(k + step) & 0xFFFFFFFF for k, step in zip(keys, _WEYL, strict=True)]
    return np.stack((c0, c1, c2, c3))


class RaceNoise:
    """-log E of rule ``coupled`` for one sequence, as :data:`~specdec.evaluation.near_ties.Noise`.

    Args:
        seed: of the sequence, a signed 64-bit integer.
        vocabulary: V.
    """

    def __init__(self, seed: int, vocabulary: int):
        self._seed, self._vocabulary = seed, vocabulary

    def __call__(self, position: int) -> torch.Tensor:
        """[V] float64, what is added to logits / temperature at an absolute position."""
        counter = np.zeros((4, -(-self._vocabulary // 4)), np.uint64)  # token v uses word v % 4 of counter v // 4
        counter[0] = np.arange(counter.shape[1], dtype=np.uint64)
        counter[1], counter[3] = position & 0xFFFFFFFF, _RACE
        bits = philox(counter, self._seed).T.reshape(-1)[: self._vocabulary]
        u = (bits.astype(np.float32) + np.float32(0.5)) * np.float32(2.0**-32)
        u = np.minimum(u, np.float32(1 - 2.0**-24)).astype(np.float64)
        return -torch.log(-torch.log1p(-torch.from_numpy(u)))

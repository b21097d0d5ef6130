"""What stands between the products of a decoder layer, of float32 on a CPU. A token's result does not depend, to the
last bit, on how many others there are."""

from __future__ import annotations

import torch

from .backends import operation
from .types import Backend


def rms_norm(x: torch.Tensor, weight: torch.Tensor | None, epsilon: float, *, offset: float = 0.0) -> torch.Tensor:
    """Returns ``x / sqrt(mean(x^2) + epsilon) * (weight + offset)`` (Zhang and Sennrich, arXiv 1910.07467, section 3).

    Args:
        x: [..., size] float32 on a CPU; the mean is that of the last dimension.
        weight: [size] float32; None: 1.
        epsilon: > 0.
        offset: 1.0 where weights are stored around 0, as in Gemma.

    Returns:
        As ``x``.

    Raises:
        RuntimeError: a tensor has another shape or dtype, or is on another device; or there is no native code.
    """
    return operation("rms_norm", Backend.CPU, x.device.type)(x, weight, epsilon, offset)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Turns the pairs (i, i + D / 2) of each head's numbers by the angles of its position (RoPE, arXiv 2104.09864,
    section 3.2.2, in the order of pairs of GPT-NeoX).

    Args:
        x: [n, H, T, D] float32 on a CPU, D even.
        cos, sin: [n or 1, T, D] float32.

    Returns:
        [n, H, T, D].

    Raises:
        RuntimeError: as of :func:`rms_norm`.
    """
    return operation("rotate", Backend.CPU, x.device.type)(x, cos, sin)

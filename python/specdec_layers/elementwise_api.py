"""What stands between the products of a decoder layer: of float32 on a CPU, and on a GPU by Triton. A token's result
does not depend, to the last bit, on how many others there are."""

from __future__ import annotations

from typing import Literal

import torch

from .backends import Backend, operation


def _called(stem: str, x: torch.Tensor, *others: object, of_triton: tuple[object, ...] = ()) -> torch.Tensor:
    if x.device.type == "cpu":
        return operation(stem, Backend.CPU, "cpu")(x, *others)
    return operation(stem, Backend.TRITON, x.device.type)(x, *others, *of_triton)


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    epsilon: float,
    *,
    offset: float = 0.0,
    round_first: bool = False,
) -> torch.Tensor:
    """Returns ``x / sqrt(mean(x^2) + epsilon) * (weight + offset)`` (Zhang and Sennrich, arXiv 1910.07467, section 3).

    Args:
        x: [..., size] float32, or on a GPU bfloat16 or float16; the mean is that of the last dimension.
        weight: [size] as x; None: 1.
        epsilon: > 0.
        offset: 1.0 where weights are stored around 0, as in Gemma.
        round_first: numbers are rounded to the dtype of x before they are multiplied by the weights, too, as Llama's.

    Returns:
        As ``x``.

    Raises:
        RuntimeError: a tensor has another shape or dtype, or is on another device; or there is no native code, or no
            Triton.
    """
    return _called("rms_norm", x, weight, epsilon, offset, of_triton=(round_first,))


def add_rms_norm(
    x: torch.Tensor,
    delta: torch.Tensor,
    weight: torch.Tensor | None,
    epsilon: float,
    *,
    offset: float = 0.0,
    round_first: bool = False,
    delta_weight: torch.Tensor | None = None,
    delta_epsilon: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns ``x + delta`` and :func:`rms_norm` of that sum, rounded to the dtype of x, with the same bits as by an
    addition and :func:`rms_norm`; on a GPU in one launch.

    Args:
        x: [..., size] float32, or on a GPU bfloat16 or float16.
        delta: of the shape and dtype of x.
        weight, epsilon, offset, round_first: as of :func:`rms_norm`.
        delta_weight: [size] as x; then ``rms_norm(delta, delta_weight, delta_epsilon)`` is added, with the same offset
            and round_first, as where the result of a branch has a norm of its own (Gemma 2, arXiv 2408.00118,
            section 2). None: delta is added as it is.
        delta_epsilon: > 0 where there is a delta_weight.

    Returns:
        The sum and its norm, each as ``x``.

    Raises:
        RuntimeError: as of :func:`rms_norm`.

    Example:
        >>> import torch
        >>> from specdec_layers import add_rms_norm
        >>> add_rms_norm(torch.tensor([[1.0, 5.0]]), torch.tensor([[2.0, -1.0]]), None, 12.5)
        (tensor([[3., 4.]]), tensor([[0.6000, 0.8000]]))
    """
    if x.device.type != "cpu":
        given = (x, delta, weight, epsilon, offset, round_first, delta_weight, delta_epsilon)
        return operation("add_rms_norm", Backend.TRITON, x.device.type)(*given)
    if (delta.shape, delta.dtype, delta.device) != (x.shape, x.dtype, x.device):
        raise RuntimeError("specdec_layers: delta has another shape, dtype or device than x")
    if delta_weight is not None:
        delta = rms_norm(delta, delta_weight, delta_epsilon, offset=offset)
    total = operation("add", Backend.CPU, "cpu")(x, delta)
    return total, rms_norm(total, weight, epsilon, offset=offset)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Turns the pairs (i, i + D / 2) of each head's numbers by the angles of its position (RoPE, arXiv 2104.09864,
    section 3.2.2, in the order of pairs of GPT-NeoX).

    Args:
        x: [n, H, T, D] float32, or on a GPU bfloat16 or float16, D even.
        cos, sin: [n or 1, T, D] as x.

    Returns:
        [n, H, T, D].

    Raises:
        RuntimeError: as of :func:`rms_norm`.
    """
    return _called("rotate", x, cos, sin)


def rope_angles(
    positions: torch.Tensor, frequencies: torch.Tensor, *, scale: float = 1.0, dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns what :func:`rotate` takes: cos and sin of ``position * frequency``, a product of float32, times
    ``scale`` (YaRN's factor of attention, arXiv 2309.00071, section 3.4), twice beside each other.

    Args:
        positions: [n, T] int64.
        frequencies: [D / 2] float32, where the positions are.
        dtype: to which they are rounded: float32, or on a GPU bfloat16 or float16.

    Returns:
        [n, T, D] of ``dtype`` each.

    Raises:
        ValueError: names ``dtype``.
        RuntimeError: as of :func:`rms_norm`.
    """
    kind = positions.device.type
    dtypes = (torch.float32,) if kind == "cpu" else (torch.float32, torch.bfloat16, torch.float16)
    if dtype not in dtypes:
        raise ValueError(f"dtype: got {dtype}, allowed: {' or '.join(map(str, dtypes))} on {kind!r}")
    if kind == "cpu":
        return operation("rope_angles", Backend.CPU, kind)(positions, frequencies, scale)
    return operation("rope_angles", Backend.TRITON, kind)(positions, frequencies, scale, dtype)


def gated(gate: torch.Tensor, up: torch.Tensor, activation: Literal["silu", "gelu_tanh"]) -> torch.Tensor:
    """Returns ``activation(gate) * up``, of a gated layer (Shazeer, arXiv 2002.05202, section 2).

    Args:
        gate, up: [n, T, size] float32, or on a GPU bfloat16 or float16.
        activation: x / (1 + exp(-x)), or GELU by its formula with tanh (arXiv 1606.08415, section 2).

    Returns:
        As ``gate``.

    Raises:
        ValueError: names ``activation``.
        RuntimeError: as of :func:`rms_norm`.
    """
    if activation not in ("silu", "gelu_tanh"):
        raise ValueError(f"activation: got {activation!r}, allowed: 'silu', 'gelu_tanh'")
    return _called("gated", gate, up, activation == "gelu_tanh")

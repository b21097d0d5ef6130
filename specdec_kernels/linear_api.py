"""A linear layer for the few tokens of a step of decoding, on a CPU."""

from __future__ import annotations

import torch

from .ops import handle

_linear = handle("linear")


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Returns ``x weight^T + bias``, as ``torch.nn.functional.linear``, without gradients.

    Made for few rows: up to about 12 of them, it is faster than a library of matrix products. Every number is summed in
    one order on one machine, so a row's result does not depend, to the last bit, on the number of rows or of threads.

    Args:
        x: [B, q, inputs] float32 on a CPU; B q is the number of rows.
        weight: [outputs, inputs] float32.
        bias: [outputs] float32, or None.

    Returns:
        [B, q, outputs] float32.

    Raises:
        RuntimeError: a tensor has another shape or dtype.
        NotImplementedError: on another device, or where ``build_info()["native"]`` says what is missing.
    """
    return _linear(x, weight, bias)

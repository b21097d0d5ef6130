"""A linear layer for the few tokens of a step of decoding, on a CPU."""

from __future__ import annotations

import torch

from .backends import operation
from .types import Backend


def linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, *, most_rows: int | None = None
) -> torch.Tensor:
    """Returns ``x weight^T + bias``, as ``torch.nn.functional.linear``, without gradients.

    Made for few rows: up to about 12 of them, it is faster than a library of matrix products. Every number is summed in
    one order on one machine, so a row's result does not depend, to the last bit, on the number of rows or of threads.

    Args:
        x: [B, q, inputs] float32 on a CPU; B q is the number of rows.
        weight: [outputs, inputs] float32.
        bias: [outputs] float32, or None.
        most_rows: beyond so many rows, the result is that of ``torch.nn.functional.linear``, whose rows may depend on
            their number. The operation decides it when it runs, so a compiled graph serves all numbers of rows. None:
            never.

    Returns:
        [B, q, outputs] float32.

    Raises:
        RuntimeError: a tensor has another shape or dtype, or is on another device; or there is no native code, with
            what is missing.
    """
    return operation("linear", Backend.CPU, x.device.type)(x, weight, bias, most_rows)

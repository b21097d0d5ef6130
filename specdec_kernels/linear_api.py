"""A linear layer for few rows, on a CPU and on a GPU."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .backends import operation
from .types import Backend, Packing


def linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, packing: Packing = Packing.NONE
) -> torch.Tensor:
    """Returns ``x weight^T + bias``, as ``torch.nn.functional.linear``, without gradients.

    Made for the few rows of a step of decoding, of which up to about eight cost little more than one: every weight is
    read once. Every number is summed in one order on one machine, so a row's result does not depend, to the last bit,
    on the number of rows or of threads. Weights of bfloat16 or float16 give, on a CPU, the bits that their float32
    numbers give. On a GPU all is bfloat16 or float16, summed in float32 and rounded once.

    With a packing, each 32 inputs of a row of ``x`` are rounded to integers of 16 bits times a power of two: the
    smallest with which the largest of them is less than 2^15, of which what is rounded up to it becomes 32767. Their
    products with the integers of a block are added up exactly, and then blocks one after the other in float32.

    Args:
        x: [B, q, inputs] float32 on a CPU, or bfloat16 or float16 on an NVIDIA GPU, there with a multiple of 32 inputs;
            B q is the number of rows.
        weight: [outputs, inputs] float32, bfloat16 or float16; on a GPU as x. With a packing, on a CPU, [outputs, bytes
            of a row] uint8, GGUF's blocks, interleaved (:func:`interleave`).
        bias: [outputs] as x, or None.
        packing: how a row of ``weight`` stores its inputs, of which it then has a multiple of the packing's block.

    Returns:
        [B, q, outputs] as x.

    Raises:
        RuntimeError: a tensor has another shape or dtype, or is on another device; or there is no native code, with
            what is missing.
    """
    return linears(x, [weight], [bias], [packing])[0]


def linears(
    x: torch.Tensor,
    weights: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor | None],
    packings: Sequence[Packing] | None = None,
) -> list[torch.Tensor]:
    """Returns what :func:`linear` does, of several layers of the same ``x``, for whom the threads of a CPU start
    once. Without ``packings``, none of them is packed."""
    # The dispatcher resolves views that negate, but not in a list of optional tensors.
    if not torch.compiler.is_compiling() and any(bias is not None and bias.is_neg() for bias in biases):
        biases = [bias if bias is None else bias.resolve_neg() for bias in biases]
    given = [0] * len(weights) if packings is None else [int(packing) for packing in packings]
    backend = Backend.CUDA if x.device.type == "cuda" else Backend.CPU
    return operation("linear", backend, x.device.type)(x, weights, biases, given)

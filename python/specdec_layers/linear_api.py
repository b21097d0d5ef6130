"""A linear layer for few rows, on a CPU and on a GPU, and there with what a decoder layer has around it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch

from .backends import Backend, operation, runs
from .packing import Packing


def linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, packing: Packing = Packing.NONE
) -> torch.Tensor:
    """Returns ``x weight^T + bias``, as ``torch.nn.functional.linear``, without gradients.

    Made for the few rows of a step of decoding, of which up to about eight cost little more than one: every weight is
    read once. Every number is summed in one order on one machine, so a row's result does not depend, to the last bit,
    on the number of rows or of threads. Weights of bfloat16 or float16 give, on a CPU, the bits that their float32
    numbers give. On a GPU all is bfloat16 or float16, summed in float32 and rounded once.

    With a packing of GGUF, each 32 inputs of a row of ``x`` are rounded to integers of 16 bits times a power of two:
    the smallest with which the largest of them is less than 2^15, of which what is rounded up to it becomes 32767.
    Their products with the integers of a block are added up exactly, and then blocks one after the other in float32.

    Args:
        x: [B, q, inputs] float32 on a CPU, or bfloat16 or float16 on an NVIDIA GPU, there with a multiple of 32 inputs;
            B q is the number of rows.
        weight: [outputs, inputs] float32, bfloat16 or float16; on a GPU as x. With a packing [outputs, bytes of a row]
            uint8: on a CPU GGUF's blocks, interleaved (:func:`interleave`), on a GPU what :func:`pack_int8` returns.
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


def stored_rows(weight: torch.Tensor, rows: torch.Tensor, packing: Packing = Packing.NONE) -> torch.Tensor:
    """Returns some rows of the numbers that a layer's weights stand for, as an embedding does. Of packed weights they
    are those of :func:`dequantise`, to the last bit.

    Args:
        weight: [R, inputs] float32, bfloat16 or float16 on a CPU. With a packing [R, bytes of a row] uint8: GGUF's
            blocks, interleaved (:func:`interleave`).
        rows: [...] int64 in [0, R).
        packing: how a row of ``weight`` stores its inputs: in blocks, or ``Packing.NONE``.

    Returns:
        [..., inputs] float32.

    Raises:
        RuntimeError: a tensor has another shape or dtype, or is on another device; a row is none of the weights'; or
            there is no native code, with what is missing.
    """
    return operation("stored_rows", Backend.CPU, weight.device.type)(weight, rows, int(packing))


def norm_linear(
    x: torch.Tensor,
    norm_weight: torch.Tensor,
    epsilon: float,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    offset: float = 0.0,
    round_first: bool = False,
    activation: Literal["silu", "gelu_tanh"] | None = None,
    backend: str = Backend.AUTO,
) -> torch.Tensor:
    """Returns ``y = linear(rms_norm(x), weight, bias)``, or with an activation ``gated`` of the two halves of y, in one
    launch on a GPU.

    It rounds where :func:`rms_norm`, :func:`linear` and :func:`gated` do, and as of these a row's result does not
    depend, to the last bit, on the number of rows. But the squares of a row are added up in another order than by
    :func:`rms_norm`.

    Args:
        x: [B, q, inputs] as of :func:`linear` on a GPU; of any floats by "reference".
        norm_weight: [inputs] as x.
        epsilon, offset, round_first: as of :func:`rms_norm`.
        weight: [outputs, inputs] as x, or packed as of :func:`linear` on a GPU; with an activation [2 outputs, inputs],
            of which the first half gates the other.
        bias: [outputs] or [2 outputs] as x, or None.
        activation: as of :func:`gated`; None: no gate.
        backend: "cuda" or "reference"; "auto" takes CUDA where it runs.

    Returns:
        [B, q, outputs] as x.

    Raises:
        ValueError: names ``activation``, ``weight`` or ``backend``, what was given and what is allowed.
        RuntimeError: as of :func:`linear`, of ``backend``.
    """
    if activation not in _GATES:
        raise ValueError(f"activation: got {activation!r}, allowed: {', '.join(map(repr, _GATES))}")
    if activation is not None and weight.shape[0] % 2:
        raise ValueError(f"weight: got {weight.shape[0]} outputs, allowed: an even number, as half of them gate others")
    run = operation("norm_linear", _backend(backend, x), x.device.type)
    return run(x, norm_weight, epsilon, offset, round_first, weight, bias, _GATES.index(activation))


def add_linear(
    base: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    backend: str = Backend.AUTO,
) -> torch.Tensor:
    """Returns ``base + linear(x, weight, bias)``, in one launch on a GPU, where both are rounded.

    Args:
        base: [B, q, outputs] as x.
        x, weight, bias: as of :func:`linear` on a GPU; of any floats by "reference".
        backend: "cuda" or "reference"; "auto" takes CUDA where it runs.

    Returns:
        [B, q, outputs] as x.

    Raises:
        ValueError: names ``backend``, what was given and what is allowed.
        RuntimeError: as of :func:`linear`, of ``backend``.
    """
    return operation("add_linear", _backend(backend, x), x.device.type)(base, x, weight, bias)


_GATES = (None, "silu", "gelu_tanh")  # operations take an activation as its index here


def _backend(asked: str, x: torch.Tensor) -> str:
    if asked not in (allowed := (Backend.AUTO, Backend.CUDA, Backend.REFERENCE)):
        raise ValueError(f"backend: got {asked!r}, allowed: {', '.join(repr(str(b)) for b in allowed)}")
    if asked != Backend.AUTO:
        return asked
    return Backend.CUDA if runs(Backend.CUDA, x.device.type) else Backend.REFERENCE

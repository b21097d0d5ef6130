"""Schemas and fakes of every operation: the contract that native code and backends implement. Imports torch only.

Each operation exists once for native code (``draft_step``: the dispatcher picks CPU or CUDA by the tensors' device) and
once for every Python backend (``draft_step_reference``). All are pure functions of their tensors.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

NAMESPACE = "specdec_kernels"
VARIANTS = ("", "_reference", "_triton")

SCHEMAS = {
    "draft_step": (
        "(Tensor logits, Tensor temperature, Tensor seed, Tensor position, int offset)"
        " -> (Tensor tokens, Tensor log_q, Tensor cutoff, Tensor lse, Tensor status)"
    ),
    "speculative_step": (
        "(Tensor target_logits, Tensor draft_tokens, Tensor? draft_logits, Tensor? draft_lse, Tensor? num_drafts,"
        " Tensor temperature, Tensor seed, Tensor position) -> (Tensor tokens, Tensor num_accepted, Tensor status)"
    ),
}


def statistics_dtype(logits: torch.Tensor) -> torch.dtype:
    """dtype of log_q, cutoff and lse: float64 for float64 logits (``reference`` only), float32 for all others."""
    return torch.float64 if logits.dtype == torch.float64 else torch.float32


def _draft_step_fake(logits, temperature, seed, position, offset):
    (batch, _), dtype = logits.shape, statistics_dtype(logits)
    statistic = [logits.new_empty((batch,), dtype=dtype) for _ in range(3)]
    return (
        logits.new_empty((batch,), dtype=torch.int64),
        *statistic,
        logits.new_empty((batch,), dtype=torch.int32),
    )


def _speculative_step_fake(
    target_logits, draft_tokens, draft_logits, draft_lse, num_drafts, temperature, seed, position
):
    batch, rows, _ = target_logits.shape
    return (
        target_logits.new_empty((batch, rows), dtype=torch.int64),
        target_logits.new_empty((batch,), dtype=torch.int32),
        target_logits.new_empty((batch,), dtype=torch.int32),
    )


_FAKES = {"draft_step": _draft_step_fake, "speculative_step": _speculative_step_fake}
_library = torch.library.Library(NAMESPACE, "DEF")

for _stem, _schema in SCHEMAS.items():
    for _variant in VARIANTS:
        _library.define(f"{_stem}{_variant}{_schema}", tags=(torch.Tag.pt2_compliant_tag,))
        torch.library.register_fake(f"{NAMESPACE}::{_stem}{_variant}", _FAKES[_stem], lib=_library)


def implement(name: str, function: Callable) -> None:
    """Registers a Python backend's implementation of the operation ``name``, for every device."""
    _library.impl(name, function, "CompositeExplicitAutograd")


def handle(name: str) -> torch._ops.OpOverload:
    """The callable of one operation, e.g. ``handle("draft_step_reference")``."""
    return getattr(getattr(torch.ops, NAMESPACE), name).default

"""Checks of everything that callers pass, once, for all backends. Every error names the argument, what was given and
what is allowed. Values that live on a GPU are not read (that would wait for it): kernels define what they do with them.
"""

from __future__ import annotations

from typing import NoReturn

import torch

from .types import Rule, SamplingParams

LOGIT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
INTEGER_DTYPES = (torch.int64, torch.int32)


def refuse(name: str, given: object, allowed: str) -> NoReturn:
    raise ValueError(f"{name}: got {given}, allowed: {allowed}")


def check_logits(name: str, logits: torch.Tensor, shape: str, *, reference: bool) -> None:
    if not isinstance(logits, torch.Tensor):
        refuse(name, type(logits).__name__, f"a tensor {shape}")
    if logits.dim() != shape.count(",") + 1:
        refuse(name, f"shape {list(logits.shape)}", shape)
    if logits.dtype not in LOGIT_DTYPES and not (reference and logits.dtype == torch.float64):
        refuse(name, logits.dtype, "float32, bfloat16, float16 (and float64 with backend='reference')")
    if logits.shape[-1] < 1:
        refuse(name, f"shape {list(logits.shape)}", f"{shape} with V >= 1")


def check_like(name: str, tensor: torch.Tensor, shape: tuple[int, ...], dtypes: tuple, device: torch.device) -> None:
    if not isinstance(tensor, torch.Tensor):
        refuse(name, type(tensor).__name__, f"a tensor of shape {list(shape)}")
    if tuple(tensor.shape) != shape:
        refuse(name, f"shape {list(tensor.shape)}", f"shape {list(shape)}")
    if tensor.dtype not in dtypes:
        refuse(name, tensor.dtype, " or ".join(str(d).removeprefix("torch.") for d in dtypes))
    if tensor.device != device:
        refuse(name, f"a tensor on {tensor.device}", f"{device}, where the logits are")


def check_rule(rule: str) -> None:
    if rule not in Rule._value2member_map_:
        refuse("rule", repr(rule), ", ".join(repr(str(r)) for r in Rule))


def temperature_of(params: SamplingParams, batch: int, device: torch.device) -> torch.Tensor:
    """[B] float32 on ``device``; the values were checked when ``params`` was made."""
    if not isinstance(params, SamplingParams):
        refuse("params", type(params).__name__, "a SamplingParams")
    t = params.temperature
    if not isinstance(t, torch.Tensor):
        return torch.full((batch,), float(t), dtype=torch.float32, device=device)
    if t.dtype == torch.float32 and t.shape == (batch,) and t.device == device:
        return t  # as in a decoding loop, where every no-op that is left out counts
    if t.dim() == 1 and t.shape[0] != batch:
        refuse("params.temperature", f"shape {list(t.shape)}", f"a number or shape [{batch}]")
    return t.to(device=device, dtype=torch.float32).expand(batch)


def per_sequence(name: str, value: int | torch.Tensor, batch: int, device: torch.device, lowest: int) -> torch.Tensor:
    """[B] int64 on ``device`` from a number (the same for every sequence) or a [B] tensor."""
    if isinstance(value, torch.Tensor):
        check_like(name, value, (batch,), INTEGER_DTYPES, device)
        return value.to(torch.int64)
    if isinstance(value, bool) or not isinstance(value, int) or not lowest <= value < 2**63:
        refuse(name, repr(value), f"an integer from {lowest} to 2**63 - 1, or an int64 tensor of shape [{batch}]")
    return torch.full((batch,), value, dtype=torch.int64, device=device)


def check_num_drafts(num_drafts: torch.Tensor, num_rows: int) -> None:
    """Values are read on a CPU only, and not while torch.compile traces; kernels clamp to [0, K]."""
    if num_drafts.device.type == "cpu" and not torch.compiler.is_compiling() and num_drafts.numel():
        low, high = (int(v) for v in torch.aminmax(num_drafts))
        if low < 0 or high >= num_rows:
            refuse("num_drafts", f"values from {low} to {high}", f"0 to K = {num_rows - 1}")


def check_cutoff(cutoff: torch.Tensor) -> None:
    """Without filters every cutoff is -inf. Another one belongs to a q that this version does not draw from."""
    if cutoff.device.type == "cpu" and not torch.compiler.is_compiling() and not torch.isneginf(cutoff).all():
        refuse("draft_stats", "a cutoff other than -inf", "-inf: this version has no filters")

"""Attention over a static cache in plain PyTorch, a mask of all slots at a time: what the kernels are compared with."""

from __future__ import annotations

import torch

from ..ops import implement


def mask_of(seen: torch.Tensor, slots: int) -> torch.Tensor:
    """Returns which of so many slots each query sees, [n, T, slots] bool."""
    slot = torch.arange(slots, device=seen.device)
    mask = (slot >= seen[..., :1]) & (slot < seen[..., 1:2])
    return mask | (slot == seen[..., 2:, None]).any(-2)


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    seen: torch.Tensor,
    scale: float,
    cap: float,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    mask = mask_of(seen, k.shape[2])[:, None]
    group = q.shape[1] // k.shape[1]
    k, v = (x.to(q.dtype).repeat_interleave(group, 1) for x in (k, v))
    scores = q @ k.transpose(2, 3) * scale
    if cap > 0:
        scores = cap * torch.tanh(scores / cap)
    scores = scores.masked_fill(~mask, float("-inf"))
    if sinks is not None:
        scores = torch.cat((scores, sinks.view(-1, 1, 1).expand(len(q), -1, q.shape[2], 1)), -1)
    out = scores.softmax(-1)[..., : k.shape[2]] @ v
    return torch.where(mask.any(-1, keepdim=True), out, 0).transpose(1, 2).contiguous()


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """As :func:`specdec_layers.rotate`, of any dtype; cos and sin have D or D / 2 numbers."""
    a, b = x.chunk(2, -1)
    (cos_a, cos_b), (sin_a, sin_b) = (
        (angles[:, None, :, : x.shape[-1] // 2], angles[:, None, :, -(x.shape[-1] // 2) :]) for angles in (cos, sin)
    )
    return torch.cat((a * cos_a - b * sin_a, b * cos_b + a * sin_b), -1)


def store_and_attend(
    q: torch.Tensor,
    k: torch.Tensor | None,
    v: torch.Tensor | None,
    keys: torch.Tensor,
    values: torch.Tensor,
    slots: torch.Tensor | None,
    seen: torch.Tensor,
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
    sinks: torch.Tensor | None,
    counter: torch.Tensor | None,
    scale: float,
    cap: float,
) -> torch.Tensor:
    if cos is not None and sin is not None:
        q, k = rotate(q, cos, sin), None if k is None else rotate(k, cos, sin)
    if k is not None and v is not None and slots is not None:
        row = torch.arange(len(slots), device=slots.device)[:, None]
        for stored, new in ((keys, k), (values, v)):
            stored[row, :, slots] = new.transpose(1, 2).to(stored.dtype)
    wide = (q.float(), keys.float(), values.float()) if q.itemsize < 4 else (q, keys, values)
    return attend(*wide, seen, scale, cap, None if sinks is None else sinks.to(wide[0].dtype)).to(q.dtype)


implement("attend_reference", attend)
implement("store_and_attend_reference", store_and_attend)

"""Attention of few queries over a static cache on a CPU."""

from __future__ import annotations

import torch

from .backends import operation, unavailable
from .types import Backend


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    seen: torch.Tensor,
    *,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Computes softmax(scale q k^T) v over the slots that each query sees (Vaswani et al., arXiv 1706.03762, section
    3.2.1), H / H_kv query heads to a key head.

    In float32 on a CPU with native code, every query is computed by itself and over its slots in their order. So its
    result does not depend, to the last bit, on how many others there are, on S, or on whether its last slots are a
    range or a path through a tree. Elsewhere it is PyTorch's, over a mask of all slots.

    Args:
        q: [n, H, T, D].
        k, v: [n, H_kv, S, D] and [n, H_kv, S, D_v], of the dtype of ``q``, or bfloat16 if that is float32.
        seen: [n, T, 2 + P] int64: the first slot and the end of the range that a query sees, then P more slots in
            their order, or -1. A query that sees none gives 0.
        scale: None: D ** -0.5.
        softcap: c > 0 replaces each score by c tanh(score / c) (Gemma 2, arXiv 2408.00118, section 2); None: no cap.
        sinks: [H] of the dtype of ``q``, the score of a slot whose value is 0, which every query of a head sees beside
            its own (gpt-oss, arXiv 2508.10925, section 2.2); None: none.

    Returns:
        [n, T, H, D_v] of the dtype of ``q``.

    Raises:
        ValueError: names ``softcap``, which is not above 0, or a tensor of another dtype or device.
        RuntimeError: a tensor has another shape or dtype.
    """
    if softcap is not None and not softcap > 0:
        raise ValueError(f"softcap: got {softcap}, allowed: > 0, or None")
    floats = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
    for name, other, dtypes in (("k", k, floats), ("v", v, floats), ("seen", seen, (torch.int64,))):
        if other.device != q.device or other.dtype not in dtypes:
            allowed = f"{' or '.join(str(d).removeprefix('torch.') for d in dtypes)} on {q.device}, where q is"
            raise ValueError(f"{name}: got {other.dtype} on {other.device}, allowed: {allowed}")
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    native = q.dtype == torch.float32 and k.dtype == v.dtype and k.dtype in (torch.float32, torch.bfloat16)
    if native and _runs_on(q.device.type):
        return operation("attend", Backend.CPU, q.device.type)(q, k, v, seen, scale, softcap or 0.0, sinks)
    mask = mask_of(seen, k.shape[2])[:, None]
    group = q.shape[1] // k.shape[1]
    k, v = (x.to(q.dtype).repeat_interleave(group, 1) for x in (k, v))
    scores = q @ k.transpose(2, 3) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~mask, float("-inf"))
    if sinks is not None:
        scores = torch.cat((scores, sinks.view(-1, 1, 1).expand(len(q), -1, q.shape[2], 1)), -1)
    out = scores.softmax(-1)[..., : k.shape[2]] @ v
    return torch.where(mask.any(-1, keepdim=True), out, 0).transpose(1, 2).contiguous()


def _runs_on(device_type: str) -> bool:
    return unavailable(Backend.CPU, device_type) is None


vars(_runs_on)["_dynamo_marked_constant"] = True  # as backends._suffix


def mask_of(seen: torch.Tensor, slots: int) -> torch.Tensor:
    """Returns which of so many slots each query sees, [n, T, slots] bool."""
    slot = torch.arange(slots, device=seen.device)
    mask = (slot >= seen[..., :1]) & (slot < seen[..., 1:2])
    return mask | (slot == seen[..., 2:, None]).any(-2)

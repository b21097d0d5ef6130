"""Attention of few queries over a static cache: on a CPU, and of a step on a GPU together with what is stored."""

from __future__ import annotations

import importlib.util

import torch

from .backends import Backend, operation, runs
from .ops import MOST_ATTENDING


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
        seen: [n, T, 2 + P] int64: the first slot, or a number below 0 for slot 0, and the end of the range that a query
            sees, then P more slots in their order, with -1 for none between or after them. A query that sees none gives
            0.
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
    if native and runs(Backend.CPU, q.device.type):
        return operation("attend", Backend.CPU, q.device.type)(q, k, v, seen, scale, softcap or 0.0, sinks)
    return operation("attend", Backend.REFERENCE, q.device.type)(q, k, v, seen, scale, softcap or 0.0, sinks)


def store_and_attend(
    q: torch.Tensor,
    k: torch.Tensor | None,
    v: torch.Tensor | None,
    keys: torch.Tensor,
    values: torch.Tensor,
    slots: torch.Tensor | None,
    seen: torch.Tensor,
    *,
    angles: tuple[torch.Tensor, torch.Tensor] | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    counter: torch.Tensor | None = None,
    backend: str = "auto",
) -> torch.Tensor:
    """Turns q and k by the angles of their positions, stores k and v, and then computes what :func:`attend` does, by
    Triton in one launch. Nothing waits for the device.

    By Triton, a query's result does not depend, to the last bit, on how many others there are, on S, or on the row that
    it is in; it may depend on which numbers the slots have.

    Args:
        q: [n, H, T, D] float32, bfloat16 or float16, T <= 8.
        k, v: [n, H_kv, T, D] and [n, H_kv, T, D_v] as ``q``, the new tokens'; None, both, and
            ``slots``: they are stored already.
        keys, values: [n, H_kv, S, D] and [n, H_kv, S, D_v], contiguous, of floats as wide as those of ``q`` or
            narrower; they are written.
        slots: [n, T] int64 in [0, S), to which the new tokens go.
        seen: [n, T, 2 + P] int64, as :func:`attend` takes it. The P more slots of a row are among the 64 that begin at
            the largest end of its queries' ranges, or -1. What a row's queries see lies in slots that hold numbers,
            from the first to the last one of all.
        angles: cos and sin, [n or 1, T, D or D / 2] each as ``q``, which has an even D: pairs (i, i + D / 2) are turned
            as by :func:`rotate`; None: nothing is turned.
        scale, softcap, sinks: as of :func:`attend`.
        counter: [H n or more] int32 of zeros, which are zeros again afterwards; calls that may run at the same time
            have one each. None: a new one.
        backend: "triton" or "reference"; "auto" takes Triton where it runs.

    Returns:
        [n, T, H, D_v] as ``q``.

    Raises:
        ValueError: names the argument, what was given and what is allowed.
        RuntimeError: ``backend`` cannot run here; says what is missing.

    Example:
        >>> import torch
        >>> from specdec_layers import store_and_attend
        >>> keys, values = torch.zeros(1, 1, 16, 4), torch.zeros(1, 1, 16, 4)
        >>> q, k, v = torch.zeros(1, 2, 1, 4), torch.ones(1, 1, 1, 4), torch.full((1, 1, 1, 4), 3.0)
        >>> slots, seen = torch.tensor([[5]]), torch.tensor([[[4, 6]]])
        >>> store_and_attend(q, k, v, keys, values, slots, seen, backend="reference")[0, 0, 0]
        tensor([1.5000, 1.5000, 1.5000, 1.5000])
    """
    if softcap is not None and not softcap > 0:
        raise ValueError(f"softcap: got {softcap}, allowed: > 0, or None")
    if backend == Backend.AUTO:
        backend = Backend.TRITON if runs(Backend.TRITON, q.device.type) else Backend.REFERENCE
    _check(q, k, v, keys, values, slots, seen, angles, sinks, counter)
    if q.shape[2] > MOST_ATTENDING and backend == Backend.TRITON:
        raise ValueError(f"q: got {q.shape[2]} tokens of a row, allowed: up to {MOST_ATTENDING}")
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    run = operation("store_and_attend", backend, q.device.type)
    return run(q, k, v, keys, values, slots, seen, *(angles or (None, None)), sinks, counter, scale, softcap or 0.0)


def bytes_beside_caches(
    rows: int, tokens: int, key_heads: int, group: int, slots: int, value_size: int, dtype: torch.dtype
) -> int:
    """Returns how many bytes of the device's memory one call of :func:`store_and_attend` by Triton takes until it ends,
    for the parts of its sums; 0 where there is no Triton.

    Args:
        rows, tokens, slots: n, T and S of that call, each >= 1.
        key_heads, group: H_kv and H / H_kv.
        value_size: D_v.
        dtype: of q, float32, bfloat16 or float16.

    Example:
        >>> import torch
        >>> from specdec_layers import bytes_beside_caches
        >>> bytes_beside_caches(32, 5, 8, 4, 8192, 128, torch.bfloat16) >> 20  # Llama-3.1-8B, MiB
        81
    """
    if importlib.util.find_spec("triton") is None:
        return 0
    from .backends.triton.attend import bytes_beside

    return bytes_beside(rows, tokens, key_heads, group, slots, value_size, dtype.itemsize)


def _check(q, k, v, keys, values, slots, seen, angles, sinks, counter) -> None:
    if q.dim() != 4 or q.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ValueError(f"q: got {_told(q)}, allowed: [n, H, T, D] of float32, bfloat16 or float16")
    (rows, heads, tokens, size), dtype = q.shape, (q.dtype,)
    if keys.dim() != 4 or values.dim() != 4:
        raise ValueError(f"keys: got {_told(keys)} and values {_told(values)}, allowed: [n, H_kv, S, D] each")
    key_heads, slots_of_row, value_size = keys.shape[1], keys.shape[2], values.shape[3]
    if key_heads == 0 or heads % key_heads:
        raise ValueError(f"keys: got {key_heads} heads, allowed: a divisor of the {heads} of q")
    for name, given in (("v", v), ("slots", slots)):
        if (k is None) != (given is None):
            shown = "None" if given is None else "a tensor"
            raise ValueError(f"{name}: got {shown}, allowed: None where k is, and only there")
    narrower = (q.dtype, *(d for d in (torch.float32, torch.bfloat16, torch.float16) if d.itemsize < q.itemsize))
    expected: list[tuple[str, torch.Tensor | None, tuple[tuple[int, ...], ...], tuple[torch.dtype, ...]]] = [
        ("keys", keys, ((rows, key_heads, slots_of_row, size),), narrower),
        ("values", values, ((rows, key_heads, slots_of_row, value_size),), narrower),
        ("k", k, ((rows, key_heads, tokens, size),), dtype),
        ("v", v, ((rows, key_heads, tokens, value_size),), dtype),
        ("slots", slots, ((rows, tokens),), (torch.int64,)),
        ("seen", seen, ((rows, tokens, max(seen.shape[-1], 2)),), (torch.int64,)),
        ("sinks", sinks, ((heads,),), dtype),
    ]
    for part, name in zip(angles or (), ("cos", "sin"), strict=False):
        width = angles[0].shape[-1] if angles[0].shape[-1] in (size, size / 2) else size
        allowed = ((rows, tokens, width), (1, tokens, width))[: 1 if len(angles[0]) == rows else 2]
        expected.append((f"angles, {name}", part, allowed if size % 2 == 0 else (), dtype))
    for name, given, shapes, dtypes in expected:
        if given is None:
            continue
        if tuple(given.shape) not in shapes or given.dtype not in dtypes or given.device != q.device:
            shown = " or ".join(map(str, map(list, shapes))) or "none, as D is odd"
            kinds = " or ".join(str(d).removeprefix("torch.") for d in dtypes)
            raise ValueError(f"{name}: got {_told(given)}, allowed: {shown} of {kinds} on {q.device}")
    for name, stored in (("keys", keys), ("values", values)):
        if not stored.is_contiguous():
            raise ValueError(f"{name}: got strides {stored.stride()}, allowed: contiguous")
    if counter is not None and (
        counter.dtype != torch.int32 or counter.numel() < rows * heads or counter.device != q.device
    ):
        raise ValueError(f"counter: got {_told(counter)}, allowed: at least {rows * heads} of int32 on {q.device}")


def _told(given: torch.Tensor) -> str:
    return f"{[*given.shape]} of {str(given.dtype).removeprefix('torch.')} on {given.device}"


def has_fused_attention(device_type: str) -> bool:
    """Whether ``store_and_attend`` has a kernel for tensors of a device type, which it has where Triton runs: on a GPU,
    and for tests in Triton's interpreter on a CPU.

    Args:
        device_type: as ``torch.device.type``, such as "cuda".

    Example:
        >>> from specdec_layers import has_fused_attention
        >>> has_fused_attention("meta")
        False
    """
    return runs(Backend.TRITON, device_type)

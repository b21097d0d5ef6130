"""Schemas and fakes of every operation: the contract that native code and backends implement. Imports torch only.

An operation exists once for native code (``linear``: the dispatcher picks CPU or CUDA by the tensors' device) and once
for each Python backend that has it (``attend_reference``, ``rms_norm_triton``). All are pure functions of their
tensors, but for those whose schemas say what they write.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from .packing import Packing

NAMESPACE = "specdec_layers"
MOST_ATTENDING = 8  # new tokens of a row that ``store_and_attend`` takes in one launch
_ALL = ("", "_reference", "_triton")  # native code, and the Python backends

_library = torch.library.Library(NAMESPACE, "DEF")


def _tensors(given: object) -> Iterator[torch.Tensor]:
    if isinstance(given, torch.Tensor):
        yield given
    elif isinstance(given, list | tuple):
        for part in given:
            yield from _tensors(part)


def _define(stem: str, arguments: str, fake: Callable, variants: tuple[str, ...] = ("",)) -> None:
    """Defines an operation in its variants, and what stands in for it where no numbers are. One tensor on meta is
    enough to have that called, so it refuses those beside others, whose results would have no numbers either."""

    def on_one_device(*given: object) -> object:
        devices = sorted({str(tensor.device) for tensor in _tensors(given)})
        if len(devices) > 1:
            raise RuntimeError(f"{stem}: got tensors on {' and '.join(devices)}, allowed: one device")
        return fake(*given)

    for variant in variants:
        _library.define(f"{stem}{variant}{arguments}", tags=(torch.Tag.pt2_compliant_tag,))
        torch.library.register_fake(f"{NAMESPACE}::{stem}{variant}", on_one_device, lib=_library)


# ---- Products


def _outputs(x: torch.Tensor, count: int) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], count))


def _stored_rows(weight: torch.Tensor, rows: torch.Tensor, packing: int) -> torch.Tensor:
    inputs, size = Packing(packing).block
    width = weight.shape[1] // size * inputs if size else weight.shape[1]
    return rows.new_empty((*rows.shape, width), dtype=torch.float32)


# x [B, q, inputs], weights [outputs, inputs] each -> [B, q, outputs] each: native code's, on a CPU and a GPU.
# Or, with a Packing that is not NONE, uint8 [outputs, bytes of a row].
_define(
    "linear",
    "(Tensor x, Tensor[] weights, Tensor?[] biases, int[] packings) -> Tensor[]",
    lambda x, weights, *rest: [_outputs(x, weight.shape[0]) for weight in weights],
)
# weight [R, inputs] or, packed, [R, bytes of a row], rows [...] int64 -> [..., inputs].
_define("stored_rows", "(Tensor weight, Tensor rows, int packing) -> Tensor", _stored_rows)
# x [B, q, inputs], norm_weight [inputs], weight [outputs, inputs] -> [B, q, outputs]. With a gate, 1 (SiLU) or 2 (GELU
# by tanh) instead of 0, weight [2 outputs, inputs].
_define(
    "norm_linear",
    "(Tensor x, Tensor norm_weight, float epsilon, float offset, bool round_first, Tensor weight, Tensor? bias,"
    " int gate) -> Tensor",
    lambda x, norm_weight, epsilon, offset, round_first, weight, bias, gate: _outputs(
        x, weight.shape[0] // (2 if gate else 1)
    ),
    ("", "_reference"),
)
# base [B, q, outputs].
_define(
    "add_linear",
    "(Tensor base, Tensor x, Tensor weight, Tensor? bias) -> Tensor",
    lambda base, x, weight, bias: _outputs(x, weight.shape[0]),
    ("", "_reference"),
)

# ---- Attention

# q [n, H, T, D], k [n, H_kv, S, D], v [n, H_kv, S, D_v], seen [n, T, 2 + P] -> [n, T, H, D_v].
_define(
    "attend",
    "(Tensor q, Tensor k, Tensor v, Tensor seen, float scale, float cap, Tensor? sinks) -> Tensor",
    lambda q, k, v, *rest: q.new_empty((q.shape[0], q.shape[2], q.shape[1], v.shape[3])),
    ("", "_reference"),
)
# The same over keys and values [n, H_kv, S, ...] to which k [n, H_kv, T, D] and v [n, H_kv, T, D_v] are written first.
_define(
    "store_and_attend",
    "(Tensor q, Tensor? k, Tensor? v, Tensor(a!) keys, Tensor(b!) values, Tensor? slots, Tensor seen, Tensor? cos,"
    " Tensor? sin, Tensor? sinks, Tensor(c!)? counter, float scale, float cap) -> Tensor",
    lambda q, k, v, keys, values, *rest: q.new_empty((q.shape[0], q.shape[2], q.shape[1], values.shape[3])),
    ("_reference", "_triton"),
)

# ---- What stands between products: of float32 on a CPU by native code, by Triton also of bfloat16 and float16


def _as_first(x: torch.Tensor, *others: object) -> torch.Tensor:
    """The result of an operation that gives as many numbers as its first tensor has."""
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _angles(
    positions: torch.Tensor, frequencies: torch.Tensor, scale: float, dtype: torch.dtype | None = None
) -> tuple[torch.Tensor, ...]:
    shape = (*positions.shape, 2 * frequencies.shape[0])
    return tuple(frequencies.new_empty(shape, dtype=dtype) for _ in range(2))


# x [..., size], weight [size].
_define("rms_norm", "(Tensor x, Tensor? weight, float epsilon, float offset) -> Tensor", _as_first)
_define(
    "rms_norm", "(Tensor x, Tensor? weight, float epsilon, float offset, bool round_first) -> Tensor", _as_first,
    ("_triton",),
)  # fmt: skip
# x and delta [..., size], weights [size].
_define(
    "add_rms_norm",
    "(Tensor x, Tensor delta, Tensor? weight, float epsilon, float offset, bool round_first, Tensor? delta_weight,"
    " float delta_epsilon) -> (Tensor, Tensor)",
    lambda x, *others: (_as_first(x), _as_first(x)),
    ("_triton",),
)
# x [n, H, T, D], cos and sin [n or 1, T, D].
_define("rotate", "(Tensor x, Tensor cos, Tensor sin) -> Tensor", _as_first, ("", "_triton"))
# positions [n, T] int64, frequencies [D / 2].
_define("rope_angles", "(Tensor positions, Tensor frequencies, float scale) -> (Tensor, Tensor)", _angles)
_define(
    "rope_angles", "(Tensor positions, Tensor frequencies, float scale, ScalarType dtype) -> (Tensor, Tensor)",
    _angles, ("_triton",),
)  # fmt: skip
# gate and up [n, T, size].
_define("gated", "(Tensor gate, Tensor up, bool gelu) -> Tensor", _as_first, ("", "_triton"))

# ---- What a forward has besides, for programs (program_api.py)

# x and y float32 of one shape.
_define("add", "(Tensor x, Tensor y) -> Tensor", _as_first)
# target [N, size], rows [n] int64, source [n, size] of any dtype.
_define("write_rows", "(Tensor(a!) target, Tensor rows, Tensor source) -> ()", lambda *_: None)
# x of any dtype and strides; a dense copy in this shape.
_define("reshaped", "(Tensor x, SymInt[] shape) -> Tensor", lambda x, shape: x.new_empty(shape))
# Those of the call that a program keeps next.
_library.define("keep_results(Tensor[] results) -> ()")

# ---- Recurrent layers: the fields of DeltaState or SsdState, then the token's inputs, then those of Feed

_define(
    "conv_window",
    "(Tensor(a!) window, Tensor x, Tensor weight, Tensor? bias, bool silu, Tensor start, Tensor valid,"
    " Tensor? parents, int first_row) -> Tensor",
    lambda window, x, *rest: _as_first(x),
    _ALL,
)
# Results are of the state's dtype: float32, or float64 for float64 inputs (``reference`` only).
_define(
    "delta_step",
    "(Tensor(a!) state, Tensor(b!) base, Tensor(c!) window_k, Tensor(d!) window_v, Tensor(e!) window_g,"
    " Tensor(f!) window_beta, Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor start, Tensor commit,"
    " Tensor valid, Tensor? parents, int first_row, bool keep, bool normalize) -> Tensor",
    lambda state, base, k, v, g, beta, q, *rest: state.new_empty((*q.shape[:2], *v.shape[2:])),
    _ALL,
)
_define(
    "ssd_step",
    "(Tensor(a!) state, Tensor(b!) base, Tensor(c!) window_x, Tensor(d!) window_dt, Tensor(e!) window_B, Tensor x,"
    " Tensor dt, Tensor B, Tensor C, Tensor A, Tensor? D, Tensor start, Tensor commit, Tensor valid,"
    " Tensor? parents, int first_row, bool keep) -> Tensor",
    lambda state, base, wx, dt, B, x, *rest: state.new_empty(x.shape),
    _ALL,
)


def implement(name: str, function: Callable) -> None:
    """Registers a Python backend's implementation of the operation ``name``, for every device."""
    _library.impl(name, function, "CompositeExplicitAutograd")


def handle(name: str) -> torch._ops.OpOverload:
    """The callable of one operation, e.g. ``handle("attend_reference")``."""
    return getattr(getattr(torch.ops, NAMESPACE), name).default

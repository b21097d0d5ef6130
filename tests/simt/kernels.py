"""The CUDA kernels on a CPU: compiled by g++ with the host's implementation of csrc/common/simt.h, called by ctypes.

The functions in OPERATIONS have the operations' signatures (specdec_kernels/ops.py). Their launches take turns over the
numbers of threads in THREADS. ``linear`` is one layer.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import itertools
import os
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch

from specdec_kernels import api
from specdec_kernels.ops import RULES, SamplingTensors

HERE = Path(__file__).parent
CSRC = HERE.parents[1] / "csrc"
SOURCES = (HERE, *(CSRC / folder for folder in ("core", "common", "cuda", "layers/cuda")))
THREADS = (64, 128, 32, 96, 256)  # of a block, at most
DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
FLAGS = ("-std=c++20", "-shared", "-fPIC", "-Wall", "-Wextra", "-Wno-unknown-pragmas", "-Werror")
_seeds = itertools.count()
_threads = itertools.cycle(THREADS)

pointer, int64, int32, boolean = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32, ctypes.c_bool
float32 = ctypes.c_float


class LogitRows(ctypes.Structure):
    _fields_ = [
        ("data", pointer), ("dtype", int32), ("sequence_stride", int64), ("row_stride", int64), ("vocabulary", int64),
    ]  # fmt: skip


class SamplingArguments(ctypes.Structure):
    _fields_ = [
        ("has_table", boolean), ("temperature", pointer), ("filters", pointer), ("penalties", pointer),
        ("table_ids", pointer), ("table_bias", pointer), ("table_in_prompt", pointer), ("table_count", pointer),
        ("ends", pointer), ("first_end", pointer), ("table_size", int64), ("num_ends", int64),
    ]  # fmt: skip


class AllowedRows(ctypes.Structure):
    _fields_ = [("words", pointer), ("num_words", int64)]


class DraftStepParams(ctypes.Structure):
    _fields_ = [
        ("logits", pointer), ("dtype", int32), ("row_stride", int64), ("batch", int64), ("vocabulary", int64),
        ("sampling", SamplingArguments), ("drafts", pointer), ("d2t", pointer), ("allowed", AllowedRows),
        ("seed", pointer), ("position", pointer), ("offset", int64), ("coupled", boolean), ("tokens", pointer),
        ("log_q", pointer), ("cutoff", pointer), ("lse", pointer), ("status", pointer),
    ]  # fmt: skip


class SpeculativeStepParams(ctypes.Structure):
    _fields_ = [
        ("target", LogitRows), ("draft_tokens", pointer), ("draft", LogitRows), ("draft_cutoff", pointer),
        ("draft_lse", pointer), ("d2t", pointer), ("num_drafts", pointer), ("sampling", SamplingArguments),
        ("allowed", AllowedRows), ("masked_drafts", int64), ("seed", pointer), ("position", pointer), ("batch", int64),
        ("num_drafts_max", int64), ("vocabulary", int64), ("rule", int64), ("tokens", pointer),
        ("num_accepted", pointer), ("status", pointer), ("num_emitted", pointer), ("log_probs", pointer),
        ("raw_log_probs", pointer),
    ]  # fmt: skip


class LinearParams(ctypes.Structure):
    _fields_ = [
        ("x", pointer), ("weight", pointer), ("bias", pointer), ("y", pointer), ("dtype", int32), ("rows", int32),
        ("inputs", int32), ("outputs", int32), ("x_stride", int64), ("norm", pointer), ("epsilon", float32),
        ("offset", float32), ("round_first", boolean), ("gated", boolean), ("gelu", boolean), ("base", pointer),
        ("int8", boolean),
    ]  # fmt: skip


@functools.cache
def library() -> ctypes.CDLL:
    """The compiled kernels, built once for all test processes, and again if a source has changed. SPECDEC_SIMT_FLAGS:
    further flags for the compiler, such as those of sanitizers."""
    flags = [*FLAGS, *os.environ.get("SPECDEC_SIMT_FLAGS", "-O1").split()]
    sources = sorted(file for folder in SOURCES for file in folder.glob("*") if file.suffix in (".h", ".cpp"))
    digest = hashlib.sha256(repr((flags, [file.read_bytes() for file in sources])).encode()).hexdigest()[:16]
    built = Path(tempfile.gettempdir()) / f"specdec-simt-{os.getuid()}-{digest}.so"
    if not built.exists():
        mine = built.with_suffix(f".{os.getpid()}")
        units = [HERE / f"{name}.cpp" for name in ("simt", "machine")]
        subprocess.run(["g++", *flags, *units, "-o", mine], check=True)
        mine.replace(built)
    loaded = ctypes.CDLL(str(built))
    for name in (*OPERATIONS, "linear"):
        getattr(loaded, name).restype = ctypes.c_char_p
    return loaded


class Counts(ctypes.Structure):
    """What kernels have done: loads of 16 bytes of logits or weights, atomic additions and how many were to one word,
    launches and their blocks."""

    _fields_ = [(name, int64) for name in ("loads", "additions", "most", "launches", "blocks")]


def take_counts() -> Counts:
    """Since the last call."""
    found = Counts()
    library().take_counts(ctypes.byref(found))
    return found


def sampling_arguments(tensors: list[torch.Tensor | None], keep: list) -> SamplingArguments:
    sampling = SamplingTensors(*tensors)

    def at(t: torch.Tensor | None) -> int | None:
        return address(t, keep)

    return SamplingArguments(
        sampling.table_ids is not None, at(sampling.temperature), at(sampling.filters), at(sampling.penalties),
        at(sampling.table_ids), at(sampling.table_bias), at(sampling.table_in_prompt), at(sampling.table_count),
        at(sampling.ends), at(sampling.first_end), 0 if sampling.table_ids is None else sampling.table_ids.shape[1],
        0 if sampling.ends is None else sampling.ends.shape[1],
    )  # fmt: skip


def address(t: torch.Tensor | None, keep: list) -> int | None:
    """The address of a dense copy, which ``keep`` keeps alive."""
    if t is None:
        return None
    keep.append(t.contiguous())
    return keep[-1].data_ptr()


def allowed_rows(allowed: torch.Tensor | None, keep: list) -> AllowedRows:
    return AllowedRows(address(allowed, keep), 0 if allowed is None else allowed.shape[-1])


def call(name: str, params: ctypes.Structure, threads: int) -> None:
    fault = getattr(library(), name)(ctypes.byref(params), threads, ctypes.c_uint64(next(_seeds)))
    assert fault == b"", fault.decode()


def serve() -> None:
    """Makes ``backend="cuda"`` run these kernels on CPU tensors."""
    real = api.operation

    def operation(stem: str, backend: str, device_type: str) -> Callable:
        if backend != "cuda" or device_type != "cpu":
            return real(stem, backend, device_type)
        return functools.partial(OPERATIONS[stem], threads=next(_threads))

    api.operation = operation


def dense_rows(logits: torch.Tensor | None) -> torch.Tensor | None:
    dense = logits is None or logits.shape[-1] == 1 or logits.stride(-1) == 1
    return logits if dense else logits.contiguous()


def draft_step(
    logits, sampling, drafts, d2t, allowed, seed, position, offset, rule, threads: int = 64,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    logits = dense_rows(logits)
    (batch, vocabulary), keep = logits.shape, []
    statistic = [torch.full((batch,), float("nan")) for _ in range(3)]
    out = torch.full((batch,), -7), *statistic, torch.full((batch,), -7, dtype=torch.int32)
    params = DraftStepParams(
        logits.data_ptr(), DTYPES[logits.dtype], logits.stride(0) * logits.element_size(), batch, vocabulary,
        sampling_arguments(sampling, keep), address(drafts, keep), address(d2t, keep), allowed_rows(allowed, keep),
        address(seed, keep), address(position, keep), offset, RULES[rule] == "coupled",
        *(t.data_ptr() for t in out),
    )  # fmt: skip
    call("draft_step", params, threads)
    return out


def logit_rows(logits: torch.Tensor | None) -> LogitRows:
    if logits is None:
        return LogitRows()
    strides = (logits.stride(i) * logits.element_size() for i in range(2))
    return LogitRows(logits.data_ptr(), DTYPES[logits.dtype], *strides, logits.shape[2])


def speculative_step(
    target_logits, draft_tokens, draft_logits, draft_cutoff, draft_lse, d2t, num_drafts, sampling, allowed,
    masked_drafts, seed, position, rule, log_probs, threads: int = 64,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    target_logits, draft_logits = dense_rows(target_logits), dense_rows(draft_logits)
    (batch, rows, vocabulary), keep = target_logits.shape, []
    logs = [torch.full((batch, rows if log_probs else 0), 7.0) for _ in range(2)]
    tokens = torch.full((batch, rows), -7)
    num_accepted, status, num_emitted = (torch.full((batch,), -7, dtype=torch.int32) for _ in range(3))

    def at(t: torch.Tensor | None) -> int | None:
        return address(t, keep)

    if rows == 1:
        draft_logits = draft_cutoff = draft_lse = d2t = None
    params = SpeculativeStepParams(
        logit_rows(target_logits), at(draft_tokens), logit_rows(draft_logits), at(draft_cutoff), at(draft_lse), at(d2t),
        at(num_drafts), sampling_arguments(sampling, keep), allowed_rows(allowed, keep), masked_drafts, at(seed),
        at(position), batch, rows - 1, vocabulary, rule, tokens.data_ptr(), num_accepted.data_ptr(), status.data_ptr(),
        num_emitted.data_ptr(),
        *(t.data_ptr() if log_probs else None for t in logs),
    )  # fmt: skip
    call("speculative_step", params, threads)
    return tokens, num_accepted, status, num_emitted, *logs


def linear(
    x, weight, bias=None, *, norm=None, epsilon=0.0, offset=0.0, round_first=False, activation=None, base=None
) -> torch.Tensor:
    """x [rows, inputs], whose rows may lie apart, by the kernel of ``linear``, or of ``norm_linear`` and
    ``add_linear``."""
    (rows, inputs), outputs, keep = x.shape, len(weight) // (1 if activation is None else 2), []
    y = torch.full((rows, outputs), float("nan"), dtype=x.dtype)
    params = LinearParams(
        x.data_ptr(), address(weight, keep), address(bias, keep), y.data_ptr(), DTYPES[x.dtype], rows, inputs, outputs,
        x.stride(0) * x.element_size(), address(norm, keep), epsilon, offset, round_first, activation is not None,
        activation == "gelu_tanh", address(base, keep), weight.dtype == torch.uint8,
    )  # fmt: skip
    fault = library().linear(ctypes.byref(params), ctypes.c_uint64(next(_seeds)))
    assert fault == b"", fault.decode()
    return y


OPERATIONS = {f.__name__: f for f in (draft_step, speculative_step)}

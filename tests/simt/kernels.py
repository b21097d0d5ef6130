"""The CUDA kernels on a CPU: compiled by g++ with the host's implementation of csrc/cuda/simt.h, called through ctypes.

The functions in OPERATIONS have the operations' signatures (specdec_kernels/ops.py). The launches take
turns over the shapes in GRIDS.
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

from specdec_kernels import api, recurrent_api, tree_api
from specdec_kernels.ops import RULES, SamplingTensors

HERE = Path(__file__).parent
SOURCES = (HERE, HERE.parents[1] / "csrc" / "core", HERE.parents[1] / "csrc" / "cuda")
# Launches, used in turn: blocks in a cluster, threads in a block, slots of a warp, and whether a launch before them
# measures. Negative blocks: a split launch in which this many blocks measure a sequence. Negative slots: one for each
# block of logits.
GRIDS = [
    {"blocks": blocks, "threads": threads, "slots": slots, "measured": measured}
    for blocks, threads, slots, measured in (
        (2, 64, -1, False), (-3, 64, 0, False), (1, 32, 2, True), (4, 32, 1, False), (2, 96, 0, True),
        (-1, 128, 0, False), (3, 32, -1, True), (2, 64, 3, False), (1, 32, 2, False), (2, 64, 4, True),
        (2, 96, 0, False), (3, 32, -1, False),
    )
]  # fmt: skip
RECURRENT = ("conv_window", "delta_step", "ssd_step")  # whose functions are in recurrent_kernels.py
DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
FLAGS = ("-std=c++20", "-shared", "-fPIC", "-Wall", "-Wextra", "-Wno-unknown-pragmas", "-Werror")
_seeds = itertools.count()
_grids = itertools.cycle(GRIDS)

pointer, int64, int32, boolean = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32, ctypes.c_bool


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


class VerifyTreeParams(ctypes.Structure):
    _fields_ = [
        ("target", LogitRows), ("node_tokens", pointer), ("parents", pointer), ("draft", LogitRows), ("d2t", pointer),
        ("num_nodes", pointer), ("sampling", SamplingArguments), ("seed", pointer), ("position", pointer),
        ("batch", int64), ("nodes", int64), ("vocabulary", int64), ("depth", int64), ("rule", int64), ("path", pointer),
        ("tokens", pointer), ("num_accepted", pointer), ("num_emitted", pointer), ("status", pointer),
    ]  # fmt: skip


class DraftChildrenParams(ctypes.Structure):
    _fields_ = [
        ("logits", pointer), ("dtype", int32), ("row_stride", int64), ("batch", int64), ("vocabulary", int64),
        ("sampling", SamplingArguments), ("drafts", pointer), ("depth", int64), ("d2t", pointer), ("seed", pointer),
        ("position", pointer), ("offset", pointer), ("width", int64), ("sampled", boolean), ("tokens", pointer),
        ("log_q", pointer), ("cutoff", pointer), ("lse", pointer), ("status", pointer),
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
        units = [HERE / f"{name}.cpp" for name in ("simt", "recurrent", "machine")]
        subprocess.run(["g++", *flags, *units, "-o", mine], check=True)
        mine.replace(built)
    loaded = ctypes.CDLL(str(built))
    for name in (*OPERATIONS, *RECURRENT):
        getattr(loaded, name).restype = ctypes.c_char_p
    return loaded


class Counts(ctypes.Structure):
    """What kernels have done: bulk copies and their bytes, loads of 16 bytes of logits and where these were, atomic
    additions and how many were to one word, and the barriers that a thread of the last cluster passed."""

    _fields_ = [
        (name, int64)
        for name in (
            "copies", "copied", "loads", "from_device", "from_shared", "additions", "most", "block_barriers",
            "cluster_barriers",
        )
    ]  # fmt: skip


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


def call(name: str, params: ctypes.Structure, *grid: int) -> None:
    fault = getattr(library(), name)(ctypes.byref(params), *grid, ctypes.c_uint64(next(_seeds)))
    assert fault == b"", fault.decode()


def serve() -> None:
    """Makes ``backend="cuda"`` run these kernels on CPU tensors."""
    real = api.operation

    def operation(stem: str, backend: str, device_type: str) -> Callable:
        if backend != "cuda" or device_type != "cpu":
            return real(stem, backend, device_type)
        grid = next(_grids)
        if stem in RECURRENT:
            from . import recurrent_kernels

            return functools.partial(getattr(recurrent_kernels, stem), threads=grid["threads"])
        return functools.partial(OPERATIONS[stem], **grid)

    api.operation = tree_api.operation = recurrent_api.operation = operation


def dense_rows(logits: torch.Tensor | None) -> torch.Tensor | None:
    dense = logits is None or logits.shape[-1] == 1 or logits.stride(-1) == 1
    return logits if dense else logits.contiguous()


def draft_step(
    logits, sampling, drafts, d2t, allowed, seed, position, offset, rule, blocks: int = 2, threads: int = 64,
    slots: int = 0, measured: bool = False,
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
    call("draft_step", params, blocks, threads, slots, measured)
    return out


def logit_rows(logits: torch.Tensor | None) -> LogitRows:
    if logits is None:
        return LogitRows()
    strides = (logits.stride(i) * logits.element_size() for i in range(2))
    return LogitRows(logits.data_ptr(), DTYPES[logits.dtype], *strides, logits.shape[2])


def speculative_step(
    target_logits, draft_tokens, draft_logits, draft_cutoff, draft_lse, d2t, num_drafts, sampling, allowed,
    masked_drafts, seed, position, rule, log_probs, blocks: int = 2, threads: int = 64, slots: int = 0,
    measured: bool = False,
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
    call("speculative_step", params, blocks, threads, slots, measured)
    return tokens, num_accepted, status, num_emitted, *logs


def draft_children(
    logits, sampling, drafts, d2t, seed, position, offset, width, sampled, blocks: int = 2, threads: int = 64,
    slots: int = 0, measured: bool = False,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    logits = dense_rows(logits)
    (batch, vocabulary), keep = logits.shape, []
    out = (
        torch.full((batch, width), -7), torch.full((batch, width), float("nan")),
        *(torch.full((batch,), float("nan")) for _ in range(2)), torch.full((batch,), -7, dtype=torch.int32),
    )  # fmt: skip
    params = DraftChildrenParams(
        logits.data_ptr(), DTYPES[logits.dtype], logits.stride(0) * logits.element_size(), batch, vocabulary,
        sampling_arguments(sampling, keep), address(drafts, keep),
        0 if drafts is None else drafts.shape[1], address(d2t, keep), address(seed, keep), address(position, keep),
        address(offset, keep), width, sampled, *(t.data_ptr() for t in out),
    )  # fmt: skip
    call("draft_children", params, blocks, threads, slots)
    return out


def verify_tree(
    target_logits, node_tokens, parents, draft_logits, d2t, num_nodes, sampling, seed, position, rule, depth,
    blocks: int = 2, threads: int = 64, slots: int = 0, measured: bool = False,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    target_logits, draft_logits = dense_rows(target_logits), dense_rows(draft_logits)
    (batch, rows, vocabulary), keep = target_logits.shape, []
    path, tokens = (torch.full((batch, depth + 1), -7) for _ in range(2))
    counts = [torch.full((batch,), -7, dtype=torch.int32) for _ in range(3)]
    params = VerifyTreeParams(
        logit_rows(target_logits), address(node_tokens, keep), address(parents, keep), logit_rows(draft_logits),
        address(d2t, keep), address(num_nodes, keep), sampling_arguments(sampling, keep),
        address(seed, keep), address(position, keep), batch, rows - 1, vocabulary, depth, rule, path.data_ptr(),
        tokens.data_ptr(), *(t.data_ptr() for t in counts),
    )  # fmt: skip
    call("verify_tree", params, blocks, threads, slots)
    return path, tokens, *counts


OPERATIONS = {f.__name__: f for f in (draft_step, speculative_step, draft_children, verify_tree)}

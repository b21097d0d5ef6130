"""The host's side of a launch: tensors become the tuples of pointers that kernels take."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton

from ... import ops
from ...types import TABLE_PADDING
from .core import BLOCK
from .rows import PARTS_OF_A_BLOCK, Rows, Sampling
from .shortlist import LIST


def dense_rows(logits: torch.Tensor) -> torch.Tensor:
    """``logits``, copied only if the last dimension is not dense, which kernels require."""
    return logits if logits.stride(-1) == 1 or logits.shape[-1] == 1 else logits.contiguous()


def contiguous(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return None if tensor is None else tensor.contiguous()


def number_of_blocks(vocabulary: int) -> int:
    return triton.cdiv(vocabulary, BLOCK.value)


def padded_blocks(num_blocks: int) -> int:
    """The vector size for the blocks of a row: a power of 2, and at least 4 (the words of one Philox call)."""
    return max(4, triton.next_power_of_2(num_blocks))


def sampling_on_device(
    sampling: ops.SamplingTensors,
    seed: torch.Tensor,
    position: torch.Tensor,
    drafts: torch.Tensor,
    parents: torch.Tensor | None = None,
) -> Sampling:
    """``drafts``: [B, any], the step's drafts; row j counts the first j of them as generated. With ``parents`` [B, any]
    they are the nodes of trees; row j counts node j - 1 and its ancestors."""
    columns: list[torch.Tensor | None] = [None] * 4
    num_entries = 0
    if (table := sampling.table()) is not None:
        ids, bias, in_prompt, count = table
        if ids.shape[1] == 0:  # the kernels' search needs at least one entry
            ids, bias, in_prompt, count = (torch.nn.functional.pad(t, (0, 1)) for t in table)
            ids = ids + TABLE_PADDING
        num_entries = ids.shape[1]
        columns = [ids.contiguous(), bias.contiguous(), in_prompt.contiguous().view(torch.uint8), count.contiguous()]
    ids_column, bias_column, in_prompt_column, count_column = columns
    return Sampling(
        sampling.temperature.contiguous(), contiguous(sampling.filters), contiguous(sampling.penalties),
        ids_column, bias_column, in_prompt_column, count_column, num_entries,
        contiguous(sampling.ends), 0 if sampling.ends is None else sampling.ends.shape[1],
        contiguous(sampling.first_end), seed.contiguous(), position.contiguous(), drafts.contiguous(), drafts.shape[1],
        contiguous(parents),
    )  # fmt: skip


class Filtered(NamedTuple):
    """Of rows with filters: their cutoffs, and scratch of ``select``."""

    cutoff: torch.Tensor | None
    part_max: torch.Tensor | None
    scratch: torch.Tensor | None

    @classmethod
    def empty(cls, rows: int, num_blocks: int, device: torch.device) -> Filtered:
        parts = num_blocks * PARTS_OF_A_BLOCK.value
        scratch = torch.empty((rows, parts + LIST.value), dtype=torch.int64, device=device)
        return cls(torch.empty(rows, device=device), torch.empty((rows, parts), device=device), scratch)

    def of_rows(self, rows: slice) -> Filtered:
        return self if self.cutoff is None else Filtered(*(t[rows] for t in self))  # type: ignore[index]


NOT_FILTERED = Filtered(None, None, None)


def rows_on_device(
    logits: torch.Tensor,
    strides: tuple[int, int],
    vocabulary: int,
    d2t: torch.Tensor | None,
    sampling: Sampling,
    stats_strides: tuple[int, int],
    block_stats: tuple[torch.Tensor | None, torch.Tensor | None],
    raw_stats: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None),
    filtered: Filtered = NOT_FILTERED,
    allowed: torch.Tensor | None = None,
) -> Rows:
    """``strides``: of ``logits``' leading dimensions, the last being dense; ``vocabulary``: the target's V;
    ``allowed``: [B, number of masked rows, W]."""
    masks: tuple = (None,) * 5
    if allowed is not None:
        allowed = dense_rows(allowed)
        masks = (allowed, allowed.stride(0), allowed.stride(1), allowed.shape[1], allowed.shape[2])
    return Rows(
        sampling, logits, *strides, logits.shape[-1], number_of_blocks(vocabulary), d2t, *block_stats,
        filtered.part_max, filtered.scratch, *raw_stats, filtered.cutoff, *stats_strides, *masks,
    )  # fmt: skip


def device_guard(tensor: torch.Tensor):
    """A context in which kernels run on the tensor's device; it does nothing for a CPU tensor (the interpreter's)."""
    return torch.cuda.device_of(tensor)

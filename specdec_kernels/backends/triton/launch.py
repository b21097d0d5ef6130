"""What every launch needs on the host."""

from __future__ import annotations

import torch
import triton

from ... import ops
from ...types import TokenTable
from .core import BLOCK
from .rows import Rows, Sampling


def dense_rows(logits: torch.Tensor) -> torch.Tensor:
    """The same logits with a last dimension that kernels can read; only others are copied."""
    return logits if logits.stride(-1) == 1 or logits.shape[-1] == 1 else logits.contiguous()


def contiguous(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return None if tensor is None else tensor.contiguous()


def number_of_blocks(vocabulary: int) -> int:
    return triton.cdiv(vocabulary, BLOCK.value)


def padded_blocks(num_blocks: int) -> int:
    """How many blocks a row's merge and race take in at once: a power of 2, and 4 at least (one Philox call)."""
    return max(4, triton.next_power_of_2(num_blocks))


def sampling_on_device(
    sampling: ops.SamplingTensors, seed: torch.Tensor, position: torch.Tensor, drafts: torch.Tensor
) -> Sampling:
    """``drafts``: [B, any] the step's drafts, of which a row takes those before it."""
    ids, bias, in_prompt, count = (
        sampling.table_ids,
        sampling.table_bias,
        sampling.table_in_prompt,
        sampling.table_count,
    )
    if ids is not None:
        if ids.shape[1] == 0:  # a search needs an entry
            ids, *rest = (torch.nn.functional.pad(t, (0, 1)) for t in (ids, bias, in_prompt, count))
            ids, (bias, in_prompt, count) = ids + TokenTable.PADDING, rest
        in_prompt = in_prompt.contiguous().view(torch.uint8)
    return Sampling(
        sampling.temperature.contiguous(), contiguous(sampling.filters), contiguous(sampling.penalties),
        contiguous(ids), contiguous(bias), in_prompt, contiguous(count), 0 if ids is None else ids.shape[1],
        contiguous(sampling.ends), 0 if sampling.ends is None else sampling.ends.shape[0],
        contiguous(sampling.first_end), seed.contiguous(), position.contiguous(), drafts.contiguous(), drafts.shape[1],
    )  # fmt: skip


def rows_on_device(
    logits: torch.Tensor,
    strides: tuple[int, int],
    vocabulary: int,
    d2t: torch.Tensor | None,
    sampling: Sampling,
    stats_strides: tuple[int, int],
    block_stats: tuple[torch.Tensor | None, torch.Tensor | None],
    raw_stats: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None),
    cutoff: torch.Tensor | None = None,
) -> Rows:
    """``logits``: with a dense last dimension of which ``strides`` are what precedes; ``vocabulary``: the target's."""
    return Rows(
        sampling, logits, *strides, logits.shape[-1], number_of_blocks(vocabulary), d2t, *block_stats, *raw_stats,
        cutoff, *stats_strides,
    )  # fmt: skip


def device_guard(tensor: torch.Tensor):
    """Kernels run on the tensor's device, not on the current one; nothing on a CPU (Triton's interpreter)."""
    return torch.cuda.device_of(tensor)

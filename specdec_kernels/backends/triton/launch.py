"""The host's side of a launch: tensors become the tuples of pointers that kernels take."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ... import ops
from ...types import TABLE_PADDING
from .core import BLOCK
from .kinds import ALIGNMENT, Kind, Piece, described
from .rows import PARTS_OF_A_BLOCK, Rows, Sampling
from .shortlist import LIST


def dense_rows(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor``, copied only if the last dimension is not dense, which kernels require."""
    return tensor if tensor.stride(-1) == 1 or tensor.shape[-1] == 1 else tensor.contiguous()


def contiguous(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return None if tensor is None else tensor.contiguous()


def number_of_blocks(vocabulary: int) -> int:
    return -(-vocabulary // BLOCK.value)


def padded_blocks(num_blocks: int) -> int:
    """The vector size for the blocks of a row: a power of 2, and at least 4 (the words of one Philox call)."""
    return max(4, 1 << (num_blocks - 1).bit_length())


def pitch_of(num_blocks: int) -> int:
    """How far the statistics of a row's blocks lie from the next row's (``rows.blocks_of``)."""
    return -(-num_blocks // 16) * 16


class Given:
    """The tensors that a call was given, as kernels take them, and the part of its kind that they are.

    Args:
        drafts: [B, any], the step's drafts; row j counts the first j of them as generated. With ``parents`` [B, any]
            they are the nodes of trees; row j counts node j - 1 and its ancestors.
        others: the other tensors, dense.
        results: tensors for what the call returns, whose dtypes and shapes follow from all that it is given.
    """

    def __init__(
        self,
        sampling: ops.SamplingTensors,
        seed: torch.Tensor,
        position: torch.Tensor,
        drafts: torch.Tensor,
        parents: torch.Tensor | None,
        others: Sequence[torch.Tensor | None],
        results: Sequence[torch.Tensor],
    ):
        columns: Sequence[torch.Tensor | None] = (None,) * 4
        if (table := sampling.table()) is not None:
            ids, bias, in_prompt, count = table
            if ids.shape[1] == 0:  # the kernels' search needs at least one entry
                ids, bias, in_prompt, count = (torch.nn.functional.pad(t, (0, 1)) for t in table)
                ids = ids + TABLE_PADDING
            columns = [ids, bias, in_prompt.view(torch.uint8), count]
        tensors = (*sampling[:3], *columns, sampling.ends, sampling.first_end, seed, position, drafts, parents)
        self.tensors = [None if t is None else t.contiguous() for t in tensors]
        self.tensors += others
        self.addresses, forms = described(self.tensors)
        self.tensors += results
        its_addresses = [t.data_ptr() for t in results]
        self.addresses += its_addresses
        self.forms = forms, tuple([address % ALIGNMENT for address in its_addresses])

    def pointers(self, kind: Kind) -> tuple[Sampling, list]:
        """(the sampling, the others and the results), as addresses once the kernels of this kind are known."""
        pointers: list = self.addresses if kind.known else self.tensors
        (
            temperature,
            filters,
            penalties,
            ids,
            bias,
            in_prompt,
            count,
            ends,
            first_end,
            seed,
            position,
            drafts,
            parents,
        ) = pointers[:13]
        widths = [0 if (t := self.tensors[i]) is None else t.shape[1] for i in (3, 7, 11)]
        sampling = Sampling(
            temperature, filters, penalties, ids, bias, in_prompt, count, widths[0], ends, widths[1], first_end, seed,
            position, drafts, widths[2], parents,
        )  # fmt: skip
        return sampling, pointers[13:]


def pieces_of_statistics(rows: int, num_blocks: int, filtered: bool) -> tuple[Piece, ...]:
    """The scratch of ``rows`` rows whose statistics are found: ``Statistics`` without raw ones."""
    of_blocks = (torch.float32, (rows, pitch_of(num_blocks)))
    if not filtered:
        return (of_blocks, of_blocks, None, None, None)
    parts = num_blocks * PARTS_OF_A_BLOCK.value
    of_select = (torch.int64, (rows, parts + LIST.value))
    return (of_blocks, of_blocks, (torch.float32, (rows, parts)), of_select, (torch.float32, (rows,)))


NO_STATISTICS = (None,) * 5
NO_MASKS = (None,) * 5


def masks_of(pointer: Any, allowed: torch.Tensor, stride_j: int, masked_rows: int) -> tuple:
    """What ``Rows`` has of ``allowed`` [B, ..., W], whose first ``masked_rows`` rows hold."""
    return (pointer, allowed.stride(0), stride_j, masked_rows, allowed.shape[-1]) if masked_rows > 0 else NO_MASKS


def rows_on_device(
    pointer: Any,
    strides: tuple[int, int],
    vocabulary: int,
    num_blocks: int,
    d2t: Any,
    sampling: Sampling,
    stats_strides: tuple[int, int],
    statistics: Sequence,
    raw_stats: Sequence = (None, None),
    masks: tuple = NO_MASKS,
) -> Rows:
    """``pointer``: to logits whose last dimension is dense; ``strides``: of the others; ``vocabulary``: their own;
    ``statistics``: the scratch of ``pieces_of_statistics``."""
    block_max, block_sum, part_max, of_select, cutoff = statistics
    raw_max, raw_sum = raw_stats
    return Rows(
        sampling, pointer, *strides, vocabulary, num_blocks, pitch_of(num_blocks), d2t, block_max, block_sum, part_max,
        of_select, raw_max, raw_sum, cutoff, *stats_strides, *masks,
    )  # fmt: skip


def device_guard(tensor: torch.Tensor):
    """A context in which kernels run on the tensor's device; it does nothing for a CPU tensor (the interpreter's)."""
    return torch.cuda.device_of(tensor)

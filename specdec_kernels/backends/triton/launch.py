"""The host's side of a launch: tensors become the tuples of pointers that kernels take."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ... import ops
from ...types import TABLE_PADDING
from .core import BLOCK
from .kinds import ALIGNMENT, FirstCall, known, remember
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
    """The tensors that a call was given, as kernels take them, and their part of what its kind is.

    Args:
        drafts: [B, any], the step's drafts; row j counts the first j of them as generated. With ``parents`` [B, any]
            they are the nodes of trees; row j counts node j - 1 and its ancestors. None: none of these is read.
        others: the other tensors that have to be dense.
        rows: [B, rows, ...] or [B, ...] each, whose last dimension has to be dense; their strides are part of the kind.
        results: tensors for what the call returns, whose dtypes and shapes follow from all that it is given.
    """

    def __init__(
        self,
        sampling: ops.SamplingTensors,
        seed: torch.Tensor,
        position: torch.Tensor,
        drafts: torch.Tensor | None,
        parents: torch.Tensor | None,
        others: tuple[torch.Tensor | None, ...],
        rows: tuple[torch.Tensor | None, ...],
        results: Sequence[torch.Tensor],
    ):
        columns: Sequence[torch.Tensor | None] = (None,) * 4
        if (table := sampling.table()) is not None:
            ids, bias, in_prompt, count = table
            if ids.shape[1] == 0:  # the kernels' search needs at least one entry
                ids, bias, in_prompt, count = (torch.nn.functional.pad(t, (0, 1)) for t in table)
                ids = ids + TABLE_PADDING
            columns = [ids, bias, in_prompt.view(torch.uint8), count]
            drafts = seed.new_empty((seed.shape[0], 0)) if drafts is None else drafts
        tensors = (*sampling[:3], *columns, sampling.ends, sampling.first_end, seed, position, drafts, parents, *others)
        self.results, self.tensors = results, [None if t is None else t.contiguous() for t in tensors]
        self.addresses: list[int | None] = []
        forms: list[object] = []
        for t in rows:
            self.tensors.append(t := None if t is None else dense_rows(t))
            forms.append(None if t is None else t.stride())
        for t in self.tensors:
            if t is None:
                self.addresses.append(None)
                forms.append(None)
            else:
                self.addresses.append(address := t.data_ptr())
                forms += t.get_device(), t.dtype, t.shape, address % ALIGNMENT
        for t in results:
            self.addresses.append(address := t.data_ptr())
            forms.append(address % ALIGNMENT)
        self.form = tuple(forms)


def arguments_of(call: FirstCall) -> tuple[Sampling, list]:
    """(the sampling, the others and the results) of what a call was given."""
    (
        temperature, filters, penalties, ids, bias, in_prompt, count, ends, first_end, seed, position, drafts, parents,
        *others,
    ) = call.tensors  # fmt: skip
    widths = [0 if t is None else t.shape[1] for t in (ids, ends, drafts)]
    sampling = Sampling(
        temperature, filters, penalties, ids, bias, in_prompt, count, widths[0], ends, widths[1], first_end, seed,
        position, drafts, widths[2], parents,
    )  # fmt: skip
    return sampling, others


def launch(form: tuple, given: Given, first: Callable[[FirstCall], None]) -> None:
    """Launches the kernels of a call, by ``first`` if none of its kind came before.

    Args:
        form: whatever the launches depend on, but for the forms of tensors.
    """
    form, result = (form, given.form), given.results[0]
    with device_guard(result):
        if (kind := known(form)) is not None:
            kind.launch(given.addresses, result.device)
        else:
            call = FirstCall([*given.tensors, *given.results], result.device)
            first(call)
            remember(form, call.kind)


def statistics_of(call: FirstCall, rows: int, num_blocks: int, sampling: Sampling) -> tuple:
    """The scratch of ``rows`` rows whose statistics are found: what ``Rows`` has of it, without raw ones."""
    largest, total = (call.allocate(torch.float32, rows, pitch_of(num_blocks)) for _ in range(2))
    if sampling.filters_ptr is None:
        return largest, total, None, None, None
    parts = num_blocks * PARTS_OF_A_BLOCK.value
    return (
        largest,
        total,
        call.allocate(torch.float32, rows, parts),
        call.allocate(torch.int64, rows, parts + LIST.value),
        call.allocate(torch.float32, rows),
    )


def races_of(call: FirstCall, rows: int, num_blocks: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(scores, winners) of the blocks of ``rows`` rows that race."""
    pitch = pitch_of(num_blocks)
    return call.allocate(torch.float32, rows, pitch), call.allocate(torch.int32, rows, pitch)


NO_STATISTICS = (None,) * 5
NO_MASKS = (None,) * 5


def masks_of(allowed: torch.Tensor | None, masked_rows: int) -> tuple:
    """What ``Rows`` has of ``allowed`` [B, rows, W], whose first ``masked_rows`` rows hold, or [B, W] of any row."""
    if allowed is None or masked_rows == 0:
        return NO_MASKS
    return allowed, allowed.stride(0), allowed.stride(1) if allowed.dim() == 3 else 0, masked_rows, allowed.shape[-1]


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
    ``statistics``: of ``statistics_of``."""
    block_max, block_sum, part_max, of_select, cutoff = statistics
    raw_max, raw_sum = raw_stats
    return Rows(
        sampling, pointer, *strides, vocabulary, num_blocks, pitch_of(num_blocks), d2t, block_max, block_sum, part_max,
        of_select, raw_max, raw_sum, cutoff, *stats_strides, *masks,
    )  # fmt: skip


def device_guard(tensor: torch.Tensor):
    """A context in which kernels run on the tensor's device; it does nothing for a CPU tensor (the interpreter's)."""
    return torch.cuda.device_of(tensor)

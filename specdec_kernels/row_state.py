"""The state of a batch's rows, before and after a step: where its tokens belong, and how far it went.

On tensors alone, so that the steps of a batch follow each other without waiting for the host. What other backends do in
one launch, or one call, takes ``reference`` some fifty small operations.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from .backends import operation
from .types import Status

_FAULTS = int(Status.TARGET_FAULTS)


class PlacedRows(NamedTuple):
    """Where the tokens of a step are: the last two known ones, and then its drafts.

    Attributes:
        lengths: [n] int64, tokens in the target's cache before the step, which are all known ones but the last.
        positions: [n, K + 2] int64, absolute; 0 for tokens that do not count.
        slots: [n, K + 2] int64, of the caches; the trash slot for tokens that do not count.
        allowed: [n] int64, how many drafts each row may have.
        live: [n] bool, whether the row has a sequence that goes on.
    """

    lengths: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    allowed: torch.Tensor
    live: torch.Tensor


def place_rows(
    known: torch.Tensor, room: torch.Tensor, wanted: torch.Tensor, *, num_drafts: int, trash: int, backend: str = "auto"
) -> PlacedRows:
    """Returns where the tokens of a step with K = ``num_drafts`` drafts are. A sequence drafts at most ``room - 1``
    tokens, since a step adds one recovered or bonus token to them.

    Args:
        known: [n] int64, tokens of the text so far.
        room: [n] int64, tokens that the sequence may still emit; 0: it has ended, or there is none.
        wanted: [n] int64, how many drafts the row should have.
        trash: the slot of tokens that do not count.

    Raises:
        RuntimeError: the backend is not available; says what is missing.
    """
    place = operation("place_rows", backend, known.device.type)
    return PlacedRows(*place(known, room, wanted, num_drafts, trash))


def advance_rows(
    state: torch.Tensor, tokens: torch.Tensor, num_emitted: torch.Tensor, status: torch.Tensor, *, backend: str = "auto"
) -> torch.Tensor:
    """Advances the rows by what verification emitted, up to a token that ends the sequence. A row without room is left
    as it is, and so is, but for its room, one in which the target had no distribution.

    Args:
        state: [5 + E, n] int64, written: known, room, seed, the last two known tokens, and the tokens that end a
            sequence (-1: none) of each row.
        tokens: [n, D] int64, of which the first ``num_emitted`` [n] int32 are the row's.
        status: [n] int32, :class:`Status` of each row.

    Returns:
        [n] int64: how many of its tokens each row emitted.

    Raises:
        RuntimeError: the backend is not available; says what is missing.
    """
    return operation("advance_rows", backend, state.device.type)(state, tokens, num_emitted, status, _FAULTS)

"""The ids of a draft model's columns, where its output covers only a part of the target's vocabulary."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..checks import refuse
from ..models.forward.cached_model import CachedModel


def read_d2t(
    d2t: torch.Tensor | Sequence[int], draft: CachedModel, target: CachedModel
) -> tuple[torch.Tensor | None, int]:
    """Checks ``d2t``. Returns the target's ids of the first n columns of the draft's logits, [n] int64, and n. The ids
    are None if they are the target's whole vocabulary in order."""
    ids = torch.as_tensor(d2t, device=target.device)
    size, fed, columns = target.vocab_size, draft.num_embeddings, draft.num_outputs
    given = f"{str(ids.dtype).removeprefix('torch.')} of shape {list(ids.shape)}"
    same = ids.dim() == 1 and torch.equal(ids, torch.arange(len(ids), device=ids.device))
    if fed < (len(ids) if same else size):
        refuse("draft", f"an embedding of {fed} tokens with d2t", f"{size}: it is fed the target's tokens")
    right = ids.dim() == 1 and (len(ids) <= columns if same else len(ids) == columns)
    if ids.dtype not in (torch.int64, torch.int32) or not right or len(ids) == 0:
        allowed = f"{columns} integers, one for each column of the draft's logits"
        refuse("d2t", given, f"{allowed}, or range(n) for the first n")
    ids = ids.to(torch.int64)
    if (ids[1:] <= ids[:-1]).any() or not 0 <= ids[0] <= ids[-1] < size:
        refuse("d2t", "ids that do not ascend, or are out of range", f"ascending ids from 0 to {size - 1}")
    return None if same and len(ids) == size else ids, len(ids)

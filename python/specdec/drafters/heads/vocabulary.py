"""A head's own vocabulary, a part of the target's, and what a head borrows from its target."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.functional import linear
from transformers import PreTrainedModel

from ...checks import refuse
from ...models.exchanged.packed_weights import is_packed, rows_of, width_of
from .checkpoint import Checkpoint


def take_d2t(checkpoint: Checkpoint, vocab_size: int) -> torch.Tensor | None:
    """Takes ``d2t`` and ``t2d`` out of the checkpoint. Returns the target's id of each column of the head's logits,
    [columns] int64, in the order of the columns; None: the columns are the target's ids.

    ``d2t`` has the difference of the two: the id of column j is j + d2t[j]. ``t2d`` says of each of the target's ids
    whether it has a column.

    Raises:
        ValueError: names the tensor, which has another shape or dtype, is out of range, or contradicts the other.
    """
    d2t, t2d = (checkpoint.tensors.pop(name, None) for name in ("d2t", "t2d"))
    if d2t is None and t2d is None:
        return None
    if t2d is not None and (t2d.dtype != torch.bool or t2d.shape != (vocab_size,)):
        refuse("t2d", f"{t2d.dtype} of shape {[*t2d.shape]}", f"bool of shape [{vocab_size}]")
    kept = None if t2d is None else t2d.nonzero()[:, 0]
    if d2t is None:
        return kept
    if d2t.dtype not in (torch.int64, torch.int32) or d2t.dim() != 1 or len(d2t) == 0:
        refuse("d2t", f"{d2t.dtype} of shape {[*d2t.shape]}", "int64 of one dimension")
    ids = d2t.long() + torch.arange(len(d2t))
    if ids.min() < 0 or ids.max() >= vocab_size or len(ids.unique()) < len(ids):
        given = f"ids from {int(ids.min())} to {int(ids.max())}, {len(ids.unique())} of {len(ids)} distinct"
        refuse("d2t", given, f"differences that give distinct ids from 0 to {vocab_size - 1}")
    if kept is not None and not torch.equal(ids.sort().values, kept):
        refuse("t2d", f"{len(kept)} ids, others than d2t's {len(ids)}", "the same")
    return None if torch.equal(ids, torch.arange(vocab_size)) else ids


def ascending(checkpoint: Checkpoint, d2t: torch.Tensor | None) -> torch.Tensor | None:
    """Returns ``d2t`` in ascending order, as the kernels need it, and orders the rows that belong to it alike."""
    if d2t is None:
        return None
    order = d2t.argsort()
    for name in ("lm_head.weight", "markov_head.markov_w2.weight"):
        if (weight := checkpoint.tensors.get(name)) is not None and len(weight) == len(d2t):
            checkpoint.tensors[name] = weight[order]
    return d2t[order]


def target_embedding(
    target: PreTrainedModel, hidden: int, scaled: bool = False
) -> Callable[[torch.Tensor], torch.Tensor]:
    """Returns the target's embedding, as a table: without the scale that some models have on it, unless ``scaled``.

    Raises:
        ValueError: it is quantised, or its width is not ``hidden``.
    """
    module = target.get_input_embeddings()
    rows = _rows("embed_tokens.weight", module, hidden)
    return (lambda tokens: module(tokens)) if scaled else (lambda tokens: rows(tokens).to(target.dtype))


def has_scale(target: PreTrainedModel) -> bool:
    """Returns whether the target's embedding is not the table alone."""
    module: Any = target.get_input_embeddings()
    tokens = torch.arange(4, device=target.device)
    found = module(tokens)
    return not torch.equal(found, rows_of(module, tokens).to(found.dtype))


def target_head(
    target: PreTrainedModel, hidden: int, d2t: torch.Tensor | None = None
) -> Callable[[torch.Tensor], torch.Tensor]:
    """Returns the target's head; with ``d2t`` only its rows for these ids, which are copied.

    Raises:
        ValueError: its width is not ``hidden``, or it is quantised and ``d2t`` wants some of its rows.
    """
    module = target.get_output_embeddings()
    assert module is not None
    if d2t is not None:
        rows = _rows("lm_head.weight", module, hidden)(d2t).to(target.dtype)
        return lambda x: linear(x, rows)
    width = getattr(module, "in_features", hidden)
    if width != hidden:
        refuse("lm_head.weight", "no such tensor", f"one of width {hidden}: the target's has {width}")
    return lambda x: module(x)


def _rows(name: str, module: Any, hidden: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """Returns a function from the numbers of rows of the module's weights to these rows."""
    weight = getattr(module, "weight", None)
    floats = isinstance(weight, torch.Tensor) and weight.is_floating_point() and weight.itemsize > 1
    if not floats and not is_packed(module):
        refuse(name, "no such tensor", f"one of width {hidden}: the target's is quantised")
    if (width := width_of(module)) != hidden:
        refuse(name, "no such tensor", f"one of width {hidden}: the target's has {width}")
    return lambda rows: rows_of(module, rows)

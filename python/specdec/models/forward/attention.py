"""The rule for which slots a query attends to, and the masks and attention functions that follow it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from specdec_layers import MOST_ATTENDING
from specdec_layers import attend as attend_to_slots
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from transformers import AttentionInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from ...checks import refuse
from ..cache.tree import Tree
from ..exchanged.deferred import attend_deferred
from .attention_copies import copy_with_attention

Mask = torch.Tensor | dict[str, torch.Tensor]  # for all layers, or by kind of layer if some have a sliding window
BLOCK = 128  # slots; flex attention reads a sequence's keys in whole blocks
MOST_NODES = 64  # of a tree; of larger ones, fused attention would not see all
MAX_QUERIES = 127  # of one sequence; for more, Inductor does not use the decoding kernel, which splits the keys
_TILE = 128  # most rows (queries x heads of a group) of the decoding kernel's tile
_BEFORE_ALL = -(1 << 31)  # of any position, the first slot
_KERNELS = 256  # most shapes that flex attention is compiled for; Dynamo's default limit is eight


@dataclass(frozen=True)
class Queries:
    """The positions of the q queries of each sequence. Slot j of a cache holds position j, but for the nodes of a tree.

    A query at position 0 sees slot 0 only. It is a first token, or padding: the result of padding is not used, but it
    must not become NaN.

    Attributes:
        positions: [B, q] int64, in any order.
        window: how many positions a query sees, its own included, >= 1; None: its own and all before it.
        tree: the queries are all tokens of this tree, or its last ones, in its order, the root at the slot of its
            position; None: they are tokens of the text.
    """

    positions: torch.Tensor
    window: int | None = None
    tree: Tree | None = None


def sees(position: torch.Tensor, slot: torch.Tensor, window: int | None) -> torch.Tensor:
    """Returns whether a query at ``position`` sees ``slot``: it sees the slots in (position - window, position]. Both
    masks below use this rule. The window is that of transformers' ``sliding_window_overlay``."""
    causal = slot <= position
    return causal if window is None else causal & (slot > position - window)


def seen(queries: Queries, b: torch.Tensor, i: torch.Tensor, slot: torch.Tensor) -> torch.Tensor:
    """Returns whether query i of sequence b sees ``slot``: by the rule above, for the position of what the slot holds;
    and of a tree's slots it sees only those of its ancestors and its own."""
    position, tree = queries.positions[b, i], queries.tree
    if tree is None:
        return sees(position, slot, queries.window)
    own = b if tree.depths.shape[0] > 1 else b * 0  # a number among indices is a tensor that no kernel could read
    root = queries.positions[b, i * 0] if tree.root is None else tree.root[b]
    token = (slot - root).clamp(0, tree.depths.shape[1] - 1)
    in_tree = token == slot - root
    held = torch.where(in_tree, root + tree.depths[own, token], slot)
    return sees(position, held, queries.window) & (tree.ancestors[own, i, token] | ~in_tree)


def dense_mask(queries: Queries, slots: torch.Tensor) -> torch.Tensor:
    """Returns the mask over ``slots`` [n] int64: [B, 1, q, n] bool, True = attend."""
    if queries.tree is None:
        return sees(queries.positions[:, None, :, None], slots, queries.window)
    b, i = (torch.arange(size, device=slots.device) for size in queries.positions.shape)
    return seen(queries, b[:, None, None, None], i[:, None], slots)


def can_be_fused(tokens: int, tree: Tree | None) -> bool:
    """Whether one kernel can store so many tokens of a sequence, and attend to them, in a layer."""
    fits = tokens <= MOST_ATTENDING and (tree is None or tree.depths.shape[1] - 1 <= MOST_NODES)
    return fits and not torch.is_grad_enabled()


def says_slots(mask: torch.Tensor) -> bool:
    """Whether a mask is one of :func:`seen_slots`, and not of all slots."""
    return mask.dtype == torch.int64


def seen_slots(queries: Queries) -> torch.Tensor:
    """Returns which slots each query sees, as :func:`specdec_layers.attend` takes it, by the rule above: [B, 1, q, 2 +
    P] int64, in the four dimensions of a mask. Of a tree of P nodes, the P more slots are those of a query's ancestors
    below the root, and its own. Each operation here is a launch in every forward on a GPU; of tokens that are no tree
    it is one."""
    position, window, tree = queries.positions, queries.window, queries.tree
    if tree is None:
        return (position[:, None, :, None] + _range_from_position(window, position.device)).contiguous()
    root = (position[:, 0] if tree.root is None else tree.root)[:, None]
    # Padding sees slot 0.
    ends = torch.minimum(position, root)[..., None] + _range_from_position(None, position.device)
    seen, node = tree.ancestors[..., 1:], torch.arange(1, tree.depths.shape[1], device=position.device)
    if window is not None:
        lowest = (position - (window - 1))[..., None]
        ends = torch.cat((lowest, ends[..., 1:]), -1)
        seen = seen & ((root + tree.depths[:, 1:])[:, None] >= lowest)
    path = torch.where(seen, (root + node)[:, None], -1)
    return torch.cat((ends, path), -1)[:, None]


@functools.cache
def _range_from_position(window: int | None, device: torch.device) -> torch.Tensor:
    """Returns [2] int64: what is added to a query's position for the first slot that it sees, which may be below 0, and
    for the end of them. It is kept, because captured graphs read it, and could not copy it to the device."""
    with torch.inference_mode(False):
        return torch.tensor([_BEFORE_ALL if window is None else 1 - window, 1], device=device)


def block_mask(queries: Queries, capacity: int) -> BlockMask:
    """Returns the mask for flex attention over all ``capacity`` slots. Of each sequence, flex attention reads only the
    blocks from the first to the last slot that some query sees, and block 0 if there is padding.

    The mask is made on the device, without waiting for it. Its shapes depend only on q and the capacity, so one
    compiled kernel, or CUDA graph, serves all lengths. Blocks that are not read may hold anything; within a block that
    is read, unseen slots must be finite.

    It is seven or eight small kernels, in each forward anew. The K forwards of a draft model could share the numbers of
    blocks, made for the last position that they reach, but not the mask, whose function reads the forward's positions.
    So sessions would have to hand a part of a mask from forward to forward, and windows and trees would need another
    one: too much for kernels that are a few percent of a forward's.
    """
    positions, window = queries.positions, queries.window
    size, q = positions.shape
    last = positions.amax(1)
    if (tree := queries.tree) is not None:  # whose last slot is beyond the last position
        first = positions[:, 0] if tree.root is None else tree.root + tree.depths.shape[1] - q
        slots = first[:, None] + torch.arange(q, device=positions.device)
        last = torch.where(positions > 0, slots, 0).amax(1)
    last_block = last // BLOCK
    blocks = torch.arange(-(-capacity // BLOCK), device=positions.device)
    if window is None:
        numbers, indices = last_block + 1, blocks.expand(size, -1)
    else:
        low = torch.where(positions > 0, positions, capacity).amin(1)
        first_block = (low - (window - 1)).clamp(min=0).minimum(last) // BLOCK
        # Padding sees slot 0, so block 0 is added in front if the other blocks begin after it.
        extra = ((positions == 0).any(1) & (first_block > 0)).long()
        numbers = last_block - first_block + 1 + extra
        indices = (first_block - extra)[:, None] + blocks
        indices = torch.where((extra[:, None] > 0) & (blocks == 0), 0, indices).clamp(max=len(blocks) - 1)
    return BlockMask.from_kv_blocks(
        numbers.to(torch.int32)[:, None, None],
        indices.to(torch.int32)[:, None, None].contiguous(),
        BLOCK_SIZE=BLOCK,
        mask_mod=lambda b, h, i, slot: seen(queries, b, i, slot),
        seq_lengths=(q, capacity),
        compute_q_blocks=False,  # only a backward pass needs them
    )


@contextmanager
def _many_kernels() -> Iterator[None]:
    if torch._dynamo.config.recompile_limit >= _KERNELS:  # avoids the slower patch, which would run in every layer
        yield
        return
    with torch._dynamo.config.patch(recompile_limit=_KERNELS):
        yield


@functools.cache
def _compiled() -> Callable:
    return torch.compile(flex_attention, dynamic=False, fullgraph=True)


@functools.cache
def _softcap(cap: float) -> Callable[..., torch.Tensor]:
    return lambda score, b, h, i, slot: cap * torch.tanh(score / cap)


def _kernel_options(rows: int) -> dict[str, int]:
    """Returns options of the decoding kernel for a tile of ``rows`` rows (queries x heads of a group). By default one
    tile has all rows, which fails beyond the mask's 128, and two warps, whose registers do not hold a large tile."""
    tile = min(max(1 << (rows - 1).bit_length(), 16), _TILE)
    return {"BLOCK_M": tile, "num_warps": max(tile // 16, 2)}


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: BlockMask,
    *,
    scale: float | None = None,
    softcap: float | None = None,
) -> torch.Tensor:
    """Computes flex attention, compiled for each new shape. Grouped queries read keys and values without copies.

    Args:
        query: [B, H, q, D], q <= ``MAX_QUERIES``.
        key, value: [B, H_kv, S, D] and [B, H_kv, S, D_v], H a multiple of H_kv; S the capacity of ``mask``.
        mask: from ``block_mask``.
        scale: factor of the scores; None: D ** -0.5.
        softcap: c > 0 replaces each score by c tanh(score / c) (Gemma 2, arXiv 2408.00118, section 2); None: no cap.

    Returns:
        [B, H, q, D_v].
    """
    rows = query.shape[2] * query.shape[1] // key.shape[1]
    with _many_kernels():
        return _compiled()(
            query,
            key,
            value,
            score_mod=None if softcap is None else _softcap(softcap),
            block_mask=mask,
            scale=scale,
            enable_gqa=query.shape[1] != key.shape[1],
            kernel_options=_kernel_options(rows) if query.device.type == "cuda" else None,
        )


def _flex(module, query, key, value, attention_mask, dropout=0.0, scaling=None, softcap=None, **others):
    """Flex attention, in the form in which transformers calls it; the mask is the ``BlockMask`` given to the model."""
    _check_plain("flex", module, dropout, others, "s_aux")
    out = attend(query, key, value, attention_mask, scale=scaling, softcap=softcap)
    return out.transpose(1, 2).contiguous(), None


def _native(module, query, key, value, attention_mask, dropout=0.0, scaling=None, softcap=None, s_aux=None, **others):
    """The kernel of our own for CPUs; the mask is that of :func:`seen_slots`."""
    _check_plain("native", module, dropout, others)
    seen = attention_mask[:, 0]
    return attend_to_slots(query, key, value, seen, scale=scaling, softcap=softcap, sinks=s_aux), None


def _fused(module, query, key, value, attention_mask, dropout=0.0, scaling=None, softcap=None, s_aux=None, **others):
    """The kernel of our own for the steps of a GPU; the mask is that of :func:`seen_slots`. With more tokens it is a
    ``BlockMask``, which flex attention takes, or in a head's layers one of all slots, which is sdpa's."""
    if isinstance(attention_mask, BlockMask):
        return _flex(module, query, key, value, attention_mask, dropout, scaling, softcap, s_aux=s_aux, **others)
    if not says_slots(attention_mask):
        _check_plain("sdpa", module, dropout, {"softcap": softcap, "s_aux": s_aux, **others}, "softcap", "s_aux")
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **others)
    _check_plain("fused", module, dropout, others)
    seen = attention_mask[:, 0]
    return attend_deferred(query, key, value, seen, scale=scaling, softcap=softcap, sinks=s_aux), None


def _check_plain(name: str, module: object, dropout: float, others: Mapping[str, object], *more: str) -> None:
    unknown = [n for n in ("position_bias", *more) if others.get(n) is not None]
    if unknown or dropout:
        refuse("attention", f"{name} for {type(module).__name__} with {', '.join(unknown) or 'dropout'}", "neither")


_FUNCTIONS = {"flex": _flex, "native": _native, "fused": _fused}


def with_attention(model: PreTrainedModel, name: str) -> PreTrainedModel:
    """Returns ``model`` with "flex" attention, which needs a ``BlockMask``, with "native" attention, which needs
    :func:`seen_slots`, or with "fused" attention, which takes either; for "model", ``model`` itself."""
    return model if name == "model" else copy_with_attention(model, _registered(name))


@functools.cache
def _registered(name: str) -> str:
    """The name under which transformers' ``AttentionInterface`` knows the function."""
    AttentionInterface.register(f"specdec_{name}", _FUNCTIONS[name])
    return f"specdec_{name}"

"""Attention written plainly, to compare with: an oracle over explicit sets of slots, and attention that reads a
``BlockMask`` block by block, as a kernel does."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from specdec.models.cache.tree import Tree
from specdec.models.forward.attention import BLOCK, Queries

HUGE = 1e30  # for slots that no query of the sequence sees: only a weight of exactly 0 removes it


def slots_seen(queries: Queries, b: int, i: int) -> list[int]:
    position = int(queries.positions[b, i])
    if position == 0:
        return [0]
    if (tree := queries.tree) is not None:
        root = int(queries.positions[b, 0] if tree.root is None else tree.root[b])
        own = b if len(tree.depths) > 1 else 0
        path = [k for k in range(tree.depths.shape[1]) if tree.ancestors[own, i, k]]
        first = 0 if queries.window is None else max(position - queries.window + 1, 0)
        return [*range(first, root), *[root + k for k in path if root + tree.depths[own, k] >= first]]
    return [j for j in range(position + 1) if queries.window is None or j > position - queries.window]


def oracle(query, key, value, queries: Queries, scale: float | None = None, softcap: float | None = None):
    """Attention in float64, for one query and head at a time."""
    group = query.shape[1] // key.shape[1]
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    out = torch.zeros(*query.shape[:3], value.shape[-1], dtype=torch.float64)
    for b in range(query.shape[0]):
        for i in range(query.shape[2]):
            slots = slots_seen(queries, b, i)
            for h in range(query.shape[1]):
                scores = key[b, h // group, slots].double() @ query[b, h, i].double() * scale
                if softcap is not None:
                    scores = softcap * torch.tanh(scores / softcap)
                out[b, h, i] = scores.softmax(0) @ value[b, h // group, slots].double()
    return out


def read_slots(mask, capacity: int, b: int) -> list[int]:
    """The slots whose keys a kernel loads for sequence b."""
    blocks = mask.kv_indices[b, 0, 0, : int(mask.kv_num_blocks[b, 0, 0])].tolist()
    assert len(set(blocks)) == len(blocks)  # a block taken twice counts twice
    return [s for n in blocks for s in range(n * BLOCK, min((n + 1) * BLOCK, capacity))]


def by_blocks(query, key, value, score_mod=None, block_mask=None, scale=None, enable_gqa=False, kernel_options=None):
    """Replaces compiled FlexAttention: reads the blocks of the mask and nothing else."""
    group, q, capacity = query.shape[1] // key.shape[1], query.shape[2], key.shape[2]
    assert (enable_gqa or group == 1) and block_mask.seq_lengths == (q, capacity)
    assert query.shape[0] == block_mask.kv_indices.shape[0] == block_mask.kv_num_blocks.shape[0]
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    rows = []
    for b in range(query.shape[0]):
        slots = torch.tensor(read_slots(block_mask, capacity, b))
        keys, values = (t[b, :, slots].repeat_interleave(group, 0) for t in (key, value))
        scores = query[b] @ keys.mT * scale
        if score_mod is not None:
            scores = score_mod(scores, b, None, None, None)
        seen = block_mask.mask_mod(torch.tensor(b), None, torch.arange(q)[:, None], slots)
        rows.append(torch.where(seen, scores, -math.inf).softmax(-1).nan_to_num() @ values)
    return torch.stack(rows)


class Case(NamedTuple):
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    queries: Queries


def random_case(
    lengths, q, *, heads=4, group=2, size=64, capacity=300, window=None, padding=0, seed=0,
    dtype=torch.float32, poison=HUGE, parents=None,
) -> Case:  # fmt: skip
    """A random case: sequences with these numbers of stored tokens, and q queries after them, or a tree of ``parents``,
    or its last q tokens.
    The last ``padding`` queries do not count, and with length -1 none does. Unless ``poison`` is None, slots that no
    query sees hold ``poison`` in blocks that a kernel reads, and NaN elsewhere."""
    generator = torch.Generator().manual_seed(seed)
    stored = torch.tensor(lengths)[:, None]
    live = (torch.arange(q) < q - padding) & (stored >= 0)
    tree = None if parents is None else Tree.of(torch.tensor(parents))
    if tree is not None and q < tree.depths.shape[1]:
        tree = Tree(tree.depths, tree.ancestors[:, -q:], stored[:, 0].clamp(min=0))
    queries = Queries((stored + (torch.arange(q) if tree is None else tree.depths[:, -q:])) * live, window, tree)
    shapes = ((heads, q, size), (heads // group, capacity, size), (heads // group, capacity, size))
    query, key, value = (torch.randn(len(lengths), *shape, generator=generator) for shape in shapes)
    if poison is not None:
        for b in range(len(lengths)):
            seen = {s for i in range(q) for s in slots_seen(queries, b, i)}
            blocks = {s // BLOCK for s in seen}
            for s in set(range(capacity)) - seen:
                key[b, :, s] = value[b, :, s] = poison if s // BLOCK in blocks else math.nan
    return Case(*(t.to(dtype) for t in (query, key, value)), queries)


LENGTHS = (0, 5, 127, 200)
PARENTS = (-1, -1, 0, 0, 1, 2, 5, 6, 7, 8)  # of a broad tree with one long branch
LEVELS = (-1, -1, 0, 0, 1, 2, 2, 3, 4, 4)  # whose last four are one level
CHAIN, STAR = tuple(range(-1, 9)), (-1,) * 10


CASES = {
    "one query": ((0, 5, 127, 128, 290), 1, {}),
    "nine, groups of eight": (LENGTHS, 9, {"heads": 8, "group": 8}),
    "two, groups of four, heads of 80": (LENGTHS, 2, {"heads": 8, "group": 4, "size": 80}),
    "no groups, heads of 128": (LENGTHS, 5, {"group": 1, "size": 128}),
    "groups of three": (LENGTHS, 3, {"heads": 6, "group": 3}),
    "padding and an ended sequence": ((-1, 0, 130, 280), 6, {"padding": 3}),
    "a window": ((-1, 0, 7, 130, 280), 4, {"window": 9}),
    "a window of one": ((3, 130, 280), 3, {"window": 1}),
    "a window that begins with a block's last slot": ((135, 263), 2, {"window": 9}),
    "a window and padding": ((-1, 7, 130, 280), 4, {"window": 9, "padding": 2}),
    "whole blocks": ((0, 127, 250), 5, {"capacity": 256}),
    "less than a block": ((0, 17, 60), 3, {"capacity": 70}),
    "a tree": ((0, 5, 120, 127, 280), 11, {"parents": PARENTS}),
    "a tree, a window and padding": ((-1, 0, 7, 125, 280), 11, {"parents": PARENTS, "window": 4, "padding": 2}),
    "a tree's last level": ((-1, 1, 5, 118, 125, 280), 4, {"parents": LEVELS, "window": 4}),
    "four trees": (LENGTHS, 11, {"parents": (PARENTS, STAR, CHAIN, PARENTS), "window": 100}),
}


WIDER = {
    **CASES,
    "more rows than a tile": ((0, 5, 200), 40, {"heads": 8, "group": 8}),
    "4000 slots": ((0, 600, 3900), 5, {"capacity": 4000, "heads": 8, "group": 4, "size": 128}),
}

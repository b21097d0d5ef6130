"""Compares what a model computes over a static cache with its forwards over whole texts, on random tokens."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from .cache.kv_cache import VISIBLE_STEP, visible_slots
from .cache.tree import Tree
from .forward.cached_model import CachedModel


class FedShape(NamedTuple):
    """What the check feeds in one forward: a chain, if there are no parents, or a tree."""

    parents: tuple[int, ...] | None
    paths: tuple[tuple[int, ...], ...]  # columns of the fed tokens, from the root to each leaf


_CHAIN = FedShape(None, ((0, 1, 2, 3),))
TREE = FedShape((-1, -1, 0), ((0, 1, 3), (0, 2)))
_FED = 4


def check_against_full_forward(model: PreTrainedModel, name: str, whole: torch.nn.Module | None = None) -> None:
    """Compares ragged cached forwards with full ones on random tokens, with two sequences and one rollback. A model
    with a sliding window is compared once more with a window shorter than the sequences.

    Args:
        whole: the model that computes the full forward, such as the ``peft`` model around ``model``; None: ``model``.

    Raises:
        ValueError: names the model type and the largest difference.
    """
    described = f"{name}: model type {model.config.model_type!r} cannot be driven with a static cache"
    check_shape(model, model if whole is None else whole, _CHAIN, described)


@torch.inference_mode()
def check_shape(model: PreTrainedModel, whole: torch.nn.Module, shape: FedShape, described: str) -> None:
    _compare(CachedModel(model), whole, shape, described)
    configs = {id(c): c for m in model.modules() if (c := getattr(m, "config", None)) is not None}
    with _short_windows(list(configs.values())) as shortened:
        if shortened:
            _compare(CachedModel(model), whole, shape, described)


@contextmanager
def _short_windows(configs: list[PreTrainedConfig], window: int = 4) -> Iterator[bool]:
    """Shortens the sliding windows, and yields whether there are any. transformers' masking_utils reads the window in
    every forward, so a few tokens show whether the model applies it by the mask alone."""
    saved = [(c, c.sliding_window) for c in configs if getattr(c, "sliding_window", None) is not None]
    try:
        for config, _ in saved:
            config.sliding_window = window
        yield bool(saved)
    finally:
        for config, old in saved:
            config.sliding_window = old


def _compare(cached: CachedModel, whole: torch.nn.Module, shape: FedShape, described: str) -> None:
    # Tokens that stand for images, for example, would need image inputs.
    config = cached.model.config.to_dict()
    special = {i for key, i in config.items() if key.endswith(("_token_id", "_token_index")) and isinstance(i, int)}
    ordinary = torch.tensor([i for i in range(min(cached.vocab_size, 1000)) if i not in special])
    draws = torch.randint(len(ordinary), (2, 3, 3 * _FED), generator=torch.Generator().manual_seed(0))
    try:
        pairs = _steps(cached, whole, shape, ordinary[draws].tolist())
    except Exception as error:  # an unknown model can raise anything for this mask and cache
        raise ValueError(f"{described}: {type(error).__name__}: {error}") from error
    logits, expected = (torch.cat(side).float() for side in zip(*pairs, strict=True))
    difference = (logits - expected).abs().max().item()
    allowed = torch.finfo(cached.dtype).eps ** 0.5 * expected.abs().max().item()
    if not difference <= allowed:
        raise ValueError(
            f"{described}: its logits differ from a full forward by up to {difference:.3g}, allowed: {allowed:.3g}"
        )


def _steps(
    cached: CachedModel, whole: torch.nn.Module, shape: FedShape, draws: list[list[list[int]]]
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Feeds what a batch of two sequences may. Returns logits [n, V] of cached forwards, and of full ones for the same
    tokens."""
    cache = cached.new_cache(2, 2 * VISIBLE_STEP, _FED)  # attention sees empty slots, too
    device, pairs = cached.device, list[tuple[torch.Tensor, torch.Tensor]]()

    def step(texts: list[list[int]], fed: list[list[int]], rows: tuple[int, ...] = (0, 1)) -> None:
        cache.lengths = torch.tensor([len(text) for text in texts], device=device)
        positions = slots = cache.lengths[:, None] + torch.arange(_FED, device=device)
        counts, tree = torch.tensor([[row in rows] for row in (0, 1)], device=device).expand(-1, _FED), None
        if shape.parents is not None:
            tree = Tree.of(torch.tensor(shape.parents, device=device))
            positions, slots = tree.places(cache.lengths, counts, cache.trash)
        visible = visible_slots(max(map(len, texts)) + _FED, cache.capacity)
        layout = cached.layout(positions * counts, torch.where(counts, slots, cache.trash), visible, tree)
        logits = cached(torch.tensor(fed, device=device), cache, layout)
        for row in rows:
            for path in shape.paths:
                own = torch.tensor([texts[row] + [fed[row][i] for i in path]], device=device)
                pairs.append((logits[row, list(path)], whole(own).logits[0, len(texts[row]) :]))

    first, second, third = ([row[i] for row in draws] for i in range(3))
    texts = [first[0][:9], first[1][:6]]
    cached.prefill(cache, [text[:5] for text in texts])
    cached.extend(cache, texts, [5, 5])
    step(texts, [row[:_FED] for row in second])  # wrong tokens, which the next line overwrites
    step(texts, [row[:_FED] for row in third])
    if shape.parents is None:  # some of these are accepted, and one sequence waits a step
        texts = [texts[0] + third[0][:2], texts[1] + third[1][:1]]
        step(texts, [row[_FED : 2 * _FED] for row in second], rows=(1,))
        texts[1] += second[1][_FED : 2 * _FED - 1]
        step(texts, [row[_FED : 2 * _FED] for row in third])
        cache.begin(0)  # another sequence
        texts[0] = second[0][: _FED - 1]
        cached.extend(cache, [texts[0]], [0])
    else:  # one path is accepted, of the other sequence's tree the root
        path = shape.paths[0]
        cache.compact(torch.tensor([[i - 1 for i in path[1:]], [-1] * (len(path) - 1)], device=device))
        texts = [texts[0] + [third[0][i] for i in path], texts[1] + third[1][:1]]
    step(texts, [row[-_FED:] for row in first])
    return pairs

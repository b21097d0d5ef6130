"""What the queries of a step see, as one rule; the mask and the flex attention that are made from it."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar, cast

import torch
from torch import nn
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._triton import has_triton
from transformers import AttentionInterface, PreTrainedConfig, PreTrainedModel

from ..checks import refuse

Mask = torch.Tensor | dict[str, torch.Tensor]  # of all layers, or of each kind of layer where some slide
CHOICES = ("auto", "model", "flex", "grouped")
BLOCK = 128  # slots: flex attention reads a sequence's keys in whole blocks of them
MAX_QUERIES = 127  # of one sequence: beyond them Inductor leaves the decoding kernel, which splits the keys
_TILE = 128  # rows (queries x heads of a group) of the decoding kernel's tile, at most
_KERNELS = 256  # compiled for as many different shapes: by default Dynamo refuses the ninth


@dataclass(frozen=True)
class Queries:
    """Where the q queries of each sequence stand. Slot j of a cache holds position j.

    Position 0 sees slot 0 and no other: it is a first token, or padding, whose result nobody reads, but which must
    not become NaN.

    Attributes:
        positions: [B, q] int64, in any order.
        window: how many positions a query sees, its own included, >= 1; None: all that are not after it.
    """

    positions: torch.Tensor
    window: int | None = None


def sees(position: torch.Tensor, slot: torch.Tensor, window: int | None) -> torch.Tensor:
    """The rule: a query sees the slots (position - window, position]. Both masks below are made from it; the window is
    that of transformers' ``sliding_window_overlay``."""
    causal = slot <= position
    return causal if window is None else causal & (slot > position - window)


def dense_mask(queries: Queries, slots: torch.Tensor) -> torch.Tensor:
    """[B, 1, q, n] bool, True = attend, over ``slots`` [n] int64."""
    return sees(queries.positions[:, None, :, None], slots, queries.window)


def block_mask(queries: Queries, capacity: int) -> BlockMask:
    """The same for flex attention over all ``capacity`` slots, of which it reads the blocks that some query of a
    sequence sees: from the first slot in its window, and slot 0 where there is padding, to the last one.

    Made on the device, without a wait. Its shapes depend on q and the capacity alone, so one compiled kernel, or CUDA
    graph, serves all lengths. What is not read may hold anything; within a block that is read, unseen slots must be
    finite.
    """
    positions, window = queries.positions, queries.window
    size, q = positions.shape
    last = positions.amax(1)
    last_block = last // BLOCK
    blocks = torch.arange(-(-capacity // BLOCK), device=positions.device)
    if window is None:
        numbers, indices = last_block + 1, blocks.expand(size, -1)
    else:
        low = torch.where(positions > 0, positions, capacity).amin(1)
        first_block = (low - (window - 1)).clamp(min=0).minimum(last) // BLOCK
        # Padding looks at slot 0, so block 0 comes first where the others begin after it.
        extra = ((positions == 0).any(1) & (first_block > 0)).long()
        numbers = last_block - first_block + 1 + extra
        indices = (first_block - extra)[:, None] + blocks
        indices = torch.where((extra[:, None] > 0) & (blocks == 0), 0, indices).clamp(max=len(blocks) - 1)
    return BlockMask.from_kv_blocks(
        numbers.to(torch.int32)[:, None, None],
        indices.to(torch.int32)[:, None, None].contiguous(),
        BLOCK_SIZE=BLOCK,
        mask_mod=lambda b, h, i, slot: sees(positions[b, i], slot, window),
        seq_lengths=(q, capacity),
        compute_q_blocks=False,  # which only a backward needs
    )


@contextmanager
def _many_kernels() -> Iterator[None]:
    if torch._dynamo.config.recompile_limit >= _KERNELS:  # quicker, in each of a model's layers
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
    """Of the decoding kernel for so many rows of its tile (queries x heads of a group): by default it takes them all
    in one, which fails beyond the mask's 128, and always with two warps, whose registers do not hold it."""
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
    """Flex attention, compiled for each new shape, of grouped queries: keys and values are read as they are stored.

    Args:
        query: [B, H, q, D], q <= ``MAX_QUERIES``.
        key, value: [B, H_kv, S, D] and [B, H_kv, S, D_v], H a multiple of H_kv; S the capacity of ``mask``.
        mask: as from ``block_mask``.
        scale: of the scores; None: D ** -0.5.
        softcap: c, for scores c tanh(score / c) (Gemma 2, arXiv 2408.00118, section 2).

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
    """As transformers calls an attention function: the mask is the ``BlockMask`` that was given to the model."""
    _check_plain("flex", module, dropout, others)
    out = attend(query, key, value, attention_mask, scale=scaling, softcap=softcap)
    return out.transpose(1, 2).contiguous(), None


def _grouped(module, query, key, value, attention_mask, dropout=0.0, scaling=None, **others):
    """PyTorch's own, of grouped queries. transformers repeats keys and values for each query beside a mask: on a CPU
    the result is the same to the bit, and 5 % (256 slots) to 50 % (1024) of a forward were the copies."""
    _check_plain("grouped", module, dropout, others, "softcap")
    out = scaled_dot_product_attention(query, key, value, attention_mask, scale=scaling, enable_gqa=True)
    return out.transpose(1, 2).contiguous(), None


def _check_plain(name: str, module: object, dropout: float, others: Mapping[str, object], *more: str) -> None:
    unknown = [n for n in ("s_aux", "position_bias", *more) if others.get(n) is not None]
    if unknown or dropout:
        refuse("attention", f"{name} for {type(module).__name__} with {', '.join(unknown) or 'dropout'}", "neither")


_FUNCTIONS = {"flex": _flex, "grouped": _grouped}


def with_attention(model: PreTrainedModel, name: str) -> PreTrainedModel:
    """``model`` with "flex" attention, which wants a ``BlockMask``, or "grouped"; with "model" it is ``model`` itself.

    The user's model and its configuration stay as they are. Modules that ask a configuration which attention to
    compute, and the modules around them, are copied without their weights; all others are the very same objects, so
    adapters that are switched later act in both.
    """
    if name == "model":
        return model
    AttentionInterface.register(f"specdec_{name}", _FUNCTIONS[name])
    configs: dict = {}  # modules that share a configuration share its copy
    return _copied(model, f"specdec_{name}", configs, {})


M = TypeVar("M", bound=nn.Module)


def _copied(module: M, attention: str, configs: dict, done: dict[int, nn.Module]) -> M:
    if id(module) not in done:
        children = {n: c if c is None else _copied(c, attention, configs, done) for n, c in module._modules.items()}
        config = getattr(module, "config", None)
        own = isinstance(config, PreTrainedConfig)
        copied = module
        if own or any(children[n] is not c for n, c in module._modules.items()):
            copied = copy.copy(module)
        if any(children[n] is not c for n, c in module._modules.items()):
            copied._modules = children
        if own:
            vars(copied)["config"] = copy.deepcopy(config, configs)
            # Not by the property, which sets the parts of a configuration as well.
            vars(copied)["config"]._attn_implementation_internal = attention
        done[id(module)] = copied
    return cast(M, done[id(module)])


def choose(model: PreTrainedModel, requested: str = "auto") -> str:
    """How the model's attention is computed: "flex"; with a mask, "grouped", or "model" for its own function (sdpa,
    eager).

    Args:
        requested: "auto" takes flex on a GPU, and grouped on a CPU instead of sdpa, where the model's attention allows
            it; the others are taken or refused.
    """
    if requested not in CHOICES:
        refuse("attention", repr(requested), " or ".join(map(repr, CHOICES)))
    if requested == "model":
        return "model"
    config, on_cpu = model.config.get_text_config(decoder=True), model.device.type == "cpu"
    # Compiled for a CPU flex is right, but slower than the model's own, and takes seconds for each shape.
    wanted = requested if requested != "auto" else "grouped" if on_cpu else "flex"
    lacks = _lacks(model)
    if wanted == "grouped" and not lacks:
        if not on_cpu:
            lacks = f"on {model.device.type!r}, where it would compute without a fused kernel"
        elif config._attn_implementation != "sdpa":
            lacks = f"with {config._attn_implementation} attention in the place of sdpa"
    if requested != "auto" and lacks:
        refuse("attention", f"{requested!r} for {type(model).__name__}, {lacks}", "'model' or 'auto' for it")
    return "model" if lacks else wanted


def _lacks(model: PreTrainedModel) -> str | None:
    config = model.config.get_text_config(decoder=True)
    if not (model._supports_attention_backend and model._supports_flex_attn):
        return "which by its class takes no BlockMask, or no attention function"
    if getattr(config, "alibi", False):
        return "which has ALiBi"
    if getattr(config, "attn_logit_softcapping", None) and config._attn_implementation != "eager":
        return "whose scores are soft-capped, but not by its own sdpa"  # transformers 5.17 leaves that out
    if any(name.endswith("sinks") for name, _ in model.named_parameters()):
        return "which has attention sinks"
    if any("forward" in vars(module) for module in model.modules()):
        return "of which a forward was replaced (by torch.compile, or hooks)"  # it would go on to run the original
    if model.device.type == "cuda":
        size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        if size < 16:
            return f"whose heads have {size} numbers, and the kernel at least 16"
        if not has_triton():
            return "where Triton does not work"
    elif model.device.type != "cpu":
        return f"on {model.device.type!r}, where it is untested"
    return None

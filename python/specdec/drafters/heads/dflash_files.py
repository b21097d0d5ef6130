"""DFlash, and the heads that walk through its block, from their files."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch

from ...checks import refuse
from .blocks import Shape
from .dflash import DFlash, Windows
from .dflash_walks import DFlash2, DFlash2Layer, Domino, DSpark
from .interface import Head, Variant
from .source import Source
from .vocabulary import has_scale, target_embedding

Make = Callable[..., DFlash]  # of the arguments of DFlash
# Entries that change what a block computes, in ways that are not known here.
_UNREAD = (
    "attention_sink_bias", "attention_value_scale", "final_logit_softcapping", "output_multiplier", "use_swa",
)  # fmt: skip


def dflash(source: Source) -> Head:
    """DFlash and DFlash2 as z-lab and speculators write them, DSpark as DeepSpec, SpecForge and speculators do, and
    Domino as SpecForge does."""
    checkpoint, config = source.checkpoint, source.config
    sizes, nested = source.layer_sizes(), config.get("dflash_config") or {}
    ours, said = config.get("speculators_model_type") is not None, {**config, **nested}
    for name in _UNREAD:
        if said.get(name) not in (None, False, 1.0):
            refuse("config.json", f"{name} {said[name]!r}", "none")
    walks = (kind for begin, kind in WALKS.items() if any(name.startswith(begin) for name in checkpoint.tensors))
    kind = next(walks, "dflash")
    if said.get("projector_type", kind) != kind:
        refuse("config.json", f"projector_type {said['projector_type']!r}", f"{kind!r}, by its tensors")
    # SpecForge's windows of Domino have had other masks than z-lab's.
    shape = Shape.read(sizes, checkpoint.tensors, windows=kind != "domino")
    num_layers = checkpoint.count(r"layers\.(\d+)\.")
    states = source.resolved(num_layers)
    source.check_fc(len(states))
    d2t, columns = source.vocabulary(sizes)
    block = said.get("block_size")
    if not isinstance(block, int) or block < 2:
        refuse("config.json", f"block_size {block!r}", "an integer >= 2")
    from_anchor = config.get("sample_from_anchor", said.get("shift_label", kind == "dspark" and not ours))
    parts = source.parts(shape, states, num_layers, columns)
    causal = config.get("is_causal", nested.get("causal"))
    across = config.get("sliding_window_non_causal", kind == "dflash2") if ours else causal is False
    windows = _windows(sizes, num_layers, not across, ours)
    cap = getattr(source.target.config, "final_logit_softcapping", None)
    make = _MAKERS[kind](source, said, shape.hidden, source.target.vocab_size if d2t is None else len(d2t))
    with torch.device("meta"):
        head = make(parts, block, source.mask_token(nested), bool(causal), bool(from_anchor), windows, cap)
    assert source.ids is not None
    head.doubts = [Variant(f"hidden states {list(other)}", {"states": other}) for other in source.ids.doubts]
    # z-lab's code embeds a block as the target does. SpecForge and speculators train with the table alone, and
    # SpecForge's files are like z-lab's.
    source.finished(head, shape.hidden, d2t, scaled=not ours)
    if not ours and head.target_embedding is not None and has_scale(source.model):
        table = target_embedding(source.model, shape.hidden)
        head.doubts.append(Variant("the embedding without the target's scale", {"target_embedding": table}))
    return head


def _windows(sizes: Mapping[str, Any], num_layers: int, causal: bool, by_block: bool) -> Windows | None:
    """Returns the windows of layers with sliding attention. Their tokens see those of their block before them only,
    unless the configuration says otherwise, as in vLLM and speculators."""
    kinds = (sizes.get("layer_types") or ())[:num_layers]
    layers = tuple(i for i, kind in enumerate(kinds) if kind == "sliding_attention")
    if not layers:
        return None
    size = sizes.get("sliding_window")
    if not isinstance(size, int) or size < 1:
        refuse("config.json", f"sliding_window {size!r}", "an integer >= 1")
    return Windows(layers, size, causal, by_block)


def _dspark(source: Source, said: Mapping[str, Any], hidden: int, columns: int) -> Make:
    if (kind := said.get("markov_head_type", "vanilla")) != "vanilla":
        refuse("config.json", f"markov_head_type {kind!r}", "'vanilla'")
    name, sure = "confidence_head.proj.weight", None
    rank = source.checkpoint.shape("markov_head.markov_w1.weight", 2)[1]
    if name in source.checkpoint.tensors:
        sure = source.checkpoint.shape(name, 2)[1]
        if sure not in (hidden, hidden + rank):
            refuse(name, f"{sure} columns", f"{hidden}, or with the Markov head's {hidden + rank}")
    return functools.partial(DSpark, rank, columns, sure)


def _domino(source: Source, said: Mapping[str, Any], hidden: int, columns: int) -> Make:
    tensors, checkpoint = source.checkpoint.tensors, source.checkpoint
    for name in ("prefix_gru.weight_ih", "prefix_gru.weight_hh"):  # torch names one step of such a network so
        if (weight := tensors.pop(f"{name}_l0", None)) is not None:
            tensors[name] = weight
    state, inner = checkpoint.shape("prefix_gru.weight_hh", 2)[1], checkpoint.shape("embed_proj.0.weight", 2)[0]
    return functools.partial(Domino, state, inner, columns, said.get("pure_draft_prefix_len", 0))


def _dflash2(source: Source, said: Mapping[str, Any], hidden: int, columns: int) -> Make:
    vocab_size = source.target.vocab_size
    if columns != vocab_size:
        refuse("d2t", f"{columns} columns of a head with a selector", f"{vocab_size}, all of the target's")
    taps, size, most = (
        said.get(name, usual)
        for name, usual in (("conv_kernel_size", 2), ("conv_group_size", 16), ("selector_top_k", 16))
    )
    if hidden % size:
        refuse("config.json", f"conv_group_size {size}", f"a divisor of hidden_size, {hidden}")
    if most > vocab_size:
        refuse("config.json", f"selector_top_k {most}", f"1 to {vocab_size}, the target's tokens")
    rank = source.checkpoint.shape("candidate_selector.hidden_projection.weight", 2)[0]
    return functools.partial(DFlash2, rank, most, layer=functools.partial(DFlash2Layer, taps, size))


# What walks through the block, told by how the names of its tensors begin.
WALKS = {"markov_head.": "dspark", "prefix_gru.": "domino", "candidate_selector.": "dflash2"}
_MAKERS: Mapping[str, Callable[[Source, Mapping[str, Any], int, int], Make]] = {
    "dflash": lambda *_: DFlash,
    "dspark": _dspark,
    "domino": _domino,
    "dflash2": _dflash2,
}

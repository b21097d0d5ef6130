"""Gemma 4's assistants: a few layers that attend to the target's keys and values, and have none of their own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ...checks import refuse
from ...models.cache.kv_cache import StaticKVCache
from ...models.forward.attention import Queries, can_be_fused, dense_mask, seen_slots
from ...models.forward.layout import Layout
from .checkpoint import Checkpoint
from .fused import layers_can_fuse
from .interface import Head, HeadInput, Logits
from .source import Source

KINDS = ("full_attention", "sliding_attention")


class Gemma4Assistant(Head):
    """The last known token and its predecessor's final state give a draft, and a state with which the draft gives the
    next one. All drafts of a step have the last token's place in the text, and see the keys of all before it.

    Args:
        text_model: transformers' model of its layers.
        window: of layers with sliding attention.
        read_layers: by kind of layer, the target's layer whose keys and values are read.
        centroids: the number of groups of tokens, and how many of these a draft is chosen from; None: from all tokens.
    """

    kind, reads_target_cache = "gemma4_assistant", True

    def __init__(
        self,
        text_model: Any,
        states: tuple[int, ...],
        hidden: int,
        vocab_size: int,
        window: int,
        read_layers: dict[str, int],
        centroids: tuple[int, int] | None,
    ):
        super().__init__(states, hidden, hidden, vocab_size)
        own = text_model.config.hidden_size
        self.pre_projection = nn.Linear(2 * hidden, own, bias=False)
        self.post_projection = nn.Linear(own, hidden, bias=False)
        self.lm_head = nn.Linear(own, vocab_size, bias=False)
        self.layers, self.norm = text_model.layers, text_model.norm
        self.rotary: Callable = text_model.rotary_emb.forward
        self.window, self.read_layers = window, read_layers
        self.tokens_of_centroids: torch.Tensor | None = None  # [centroids, tokens of each] int64
        self.best_centroids = 0
        if centroids is not None:
            count, self.best_centroids = centroids
            self.masked_embedding = nn.ModuleDict({"centroids": nn.Linear(own, count, bias=False)})

    def draft(self, rows: HeadInput, ahead: Layout, cache: StaticKVCache, count: int) -> Logits:
        layout, token, state = rows.layout, rows.tokens[:, -1:], rows.features[:, -1:]
        fed, visible = layout.positions[:, -1:], layout.visible
        place, size, fused = fed + 1, len(fed), self.fuses and can_be_fused(1, None)
        # As in transformers, which counts the window from the last key that there is.
        windows = {"full_attention": None, "sliding_attention": self.window + 1}
        masks, shared = {}, {}
        for kind, layer in self.read_layers.items():
            queries, stored = Queries(fed, windows[kind]), (cache.layers[layer].keys, cache.layers[layer].values)
            if fused:
                masks[kind], shared[kind] = seen_slots(queries), tuple(t[:size] for t in stored)
                continue
            seen = dense_mask(queries, torch.arange(visible, device=fed.device))
            masks[kind] = torch.where(seen, 0.0, torch.finfo(state.dtype).min).to(state.dtype)
            shared[kind] = tuple(t[:size, :, :visible].to(state.dtype) for t in stored)
        fixed: dict[str, dict[str, Any]] = {}  # what layers of a kind get in all forwards
        for kind in self.read_layers:
            own = {"position_embeddings": self.rotary(state, place, kind), "attention_mask": masks[kind]}
            fixed[kind] = {"shared_kv_states": shared, "position_ids": place, **own}
        for _ in range(count):
            x = self.pre_projection(torch.cat((self.embedded(token), state), -1))
            for block in self.layers:
                x = block(x, None, **fixed[block.self_attn.layer_type])
            x = self.norm(x)
            state = self.post_projection(x)
            token = yield self.logits(x)[:, 0]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Returns [n, 1, V]. With centroids, tokens that are not of the best ones have -inf."""
        if self.tokens_of_centroids is None:
            return self.lm_head(hidden)
        best = self.masked_embedding["centroids"](hidden).topk(self.best_centroids, -1).indices
        tokens = self.tokens_of_centroids[best].flatten(2)  # [n, 1, tokens]
        found = (self.lm_head.weight[tokens] @ hidden[..., None]).squeeze(-1)
        return found.new_full((*hidden.shape[:2], self.vocab_size), -torch.inf).scatter(-1, tokens, found)


def gemma4_assistant(source: Source) -> Head:
    """The assistants of Gemma 4, as transformers has them."""
    from transformers.models.gemma4.modeling_gemma4 import Gemma4TextModel
    from transformers.models.gemma4_assistant import Gemma4AssistantConfig

    checkpoint, target, theirs = source.checkpoint, source.target, source.target.config
    if theirs.model_type != "gemma4_text":
        refuse("target", f"model type {theirs.model_type!r} for a Gemma 4 assistant", "gemma4_text")
    config: Any = Gemma4AssistantConfig.from_dict(source.config)
    own = config.text_config
    if config.backbone_hidden_size != source.hidden:
        refuse("config.json", f"backbone_hidden_size {config.backbone_hidden_size}", f"{source.hidden}, the target's")
    if others := set(own.layer_types) - {*KINDS}:
        refuse("config.json", f"layers with {', '.join(others)}", ", ".join(KINDS))
    own._attn_implementation = theirs._attn_implementation
    _share_all(own)
    # The last layer of each kind that stores keys and values.
    slots, kinds = target.layer_slots(), theirs.layer_types
    stores = {kind: i for i, kind in enumerate(kinds) if slots[i] is not None}
    if lacking := set(own.layer_types) - stores.keys():
        refuse("target", f"no layer with {', '.join(lacking)}", "one of each kind that the assistant has")
    read_layers, ordered = {kind: stores[kind] for kind in own.layer_types}, config.use_ordered_embeddings
    centroids = (config.num_centroids, config.centroid_intermediate_top_k) if ordered else None
    parts = source.final_state(), source.hidden, target.vocab_size, own.sliding_window, read_layers, centroids
    with torch.device(target.device):  # not "meta", since the rotary embedding's tables are no part of the files
        text_model = Gemma4TextModel(own)
        head = Gemma4Assistant(text_model, *parts)
    head.can_fuse = layers_can_fuse(target)
    attentions: list[Any] = [layer.self_attn for layer in text_model.layers]
    for attention in attentions:
        slot = slots[stores[attention.layer_type]]
        assert slot is not None
        given = own.num_attention_heads // attention.num_key_value_groups, attention.head_dim
        if given != slot[0][:2]:
            described = "{} key heads of {} numbers in layers with " + attention.layer_type
            refuse("config.json", described.format(*given), described.format(*slot[0][:2]) + ", as the target has")
    if centroids is not None:
        head.tokens_of_centroids = _ordering(checkpoint, target.vocab_size, centroids[0]).to(target.device)
    if (table := checkpoint.tensors.pop("embed_tokens.weight", None)) is not None:
        checkpoint.tensors.setdefault("lm_head.weight", table)
    embedding: Any = source.model.get_input_embeddings()
    head.target_embedding = lambda tokens: embedding(tokens)  # with its scale
    return source.finished(head)


def _share_all(config: Any) -> None:
    """Has every layer read keys and values that are given to it. The configuration of transformers 5.23.0 refuses a
    model without a layer that makes them, which all assistants are."""

    class AllShared(type(config)):  # type: ignore[misc]
        kv_sharing_modes = property(lambda self: ["reuse"] * self.num_hidden_layers)

    config.__class__ = AllShared


def _ordering(checkpoint: Checkpoint, vocab_size: int, count: int) -> torch.Tensor:
    """Takes the tokens of each centroid out of the checkpoint, [count, tokens] int64."""
    name = "masked_embedding.token_ordering"
    [found] = checkpoint.shape(name, 1)
    ids = checkpoint.tensors.pop(name).long()
    if found != vocab_size or found % count or not torch.equal(ids.sort().values, torch.arange(vocab_size)):
        refuse(name, f"{found} ids from {int(ids.min())} to {int(ids.max())}", f"each of {vocab_size} ids once")
    return ids.view(count, -1)

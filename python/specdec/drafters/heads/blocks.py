"""The parts that heads are built of: a Llama's, over rows of a static cache."""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from specdec_layers import rotate
from torch import nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import LlamaConfig
from transformers.activations import ACT2FN
from transformers.models.llama.modeling_llama import LlamaRMSNorm, LlamaRotaryEmbedding, rotate_half

from ...checks import one_line, refuse
from ...models.cache.kv_cache import StaticKVCache
from ...models.exchanged.elementwise import has_elementwise
from ...models.exchanged.norms import computes
from ...models.forward.attention import says_slots
from .fields import OF_LAYERS, check_fields
from .interface import Head

Rotation = tuple[torch.Tensor, torch.Tensor]  # cosines and sines, [n, q, head_dim] each
# Other rotations change with the length of the text, so that a longer neighbour would change a sequence's drafts.
ROPE_TYPES = ("default", "linear", "llama3", "yarn")
_OF_LLAMA = frozenset(OF_LAYERS) - {"model_type", "layer_types"} | {"original_max_position_embeddings"}


@dataclass(frozen=True)
class Shape:
    """The sizes of a head's layers, and which optional weights they have."""

    config: LlamaConfig
    qk_norm: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool

    @classmethod
    def read(
        cls, config: Mapping[str, Any], names: Container[str], layer: str = "layers.0", windows: bool = False
    ) -> Shape:
        """Reads a head's own configuration. Biases and norms of queries and keys are there if the first layer has
        their weights.

        Args:
            windows: whether layers may have a sliding window.

        Raises:
            ValueError: names the entry of config.json.
        """
        check_fields(config, OF_LAYERS)
        for name in ("hidden_size", "intermediate_size", "num_attention_heads"):
            if name not in config:
                refuse("config.json", f"no {name}", str(OF_LAYERS[name]))
        if config.get("hidden_act", "silu") not in ACT2FN:
            refuse("config.json", f"hidden_act {config['hidden_act']!r}", ", ".join(sorted(ACT2FN)))
        if str(config.get("model_type", "")).startswith("gemma4"):
            refuse("config.json", f"model_type {config['model_type']!r}: layers of Gemma 4", "those of Llama or Qwen3")
        if "kv_lora_rank" in config and config["kv_lora_rank"]:
            refuse("config.json", "kv_lora_rank: latent attention (MLA)", "attention with keys and values of their own")
        known = {"full_attention", "sliding_attention"} if windows else {"full_attention"}
        kinds = sorted({*(config.get("layer_types") or ())} - known)
        if kinds or (config.get("use_sliding_window") and not windows):
            refuse("config.json", f"layers with {', '.join(kinds) or 'a sliding window'}", "full attention")
        try:  # with what a Llama's layers read alone, as the other entries are other classes'
            own = LlamaConfig.from_dict({k: v for k, v in config.items() if k in _OF_LLAMA})
        except Exception as error:  # of transformers' checks, which have classes of their own
            refuse("config.json", one_line(error), "sizes that fit each other")
        rope: Mapping[str, Any] = own.rope_parameters or {}
        if rope.get("rope_type") not in ROPE_TYPES or rope.get("partial_rotary_factor", 1) != 1:
            refuse("config.json", f"the rotary embedding {rope}", ", ".join(ROPE_TYPES) + ", whole")
        biased = bool(config.get("attention_bias"))
        return cls(
            own,
            qk_norm=f"{layer}.self_attn.q_norm.weight" in names,
            qkv_bias=biased or f"{layer}.self_attn.q_proj.bias" in names,
            o_bias=biased or f"{layer}.self_attn.o_proj.bias" in names,
            mlp_bias=bool(config.get("mlp_bias")) or f"{layer}.mlp.gate_proj.bias" in names,
        )

    @property
    def hidden(self) -> int:
        return self.config.hidden_size

    @property
    def key_heads(self) -> int:
        return self.config.num_key_value_heads or self.config.num_attention_heads

    @property
    def head_dim(self) -> int:
        return self.config.head_dim or self.hidden // self.config.num_attention_heads

    def norm(self, size: int | None = None) -> LlamaRMSNorm:
        return LlamaRMSNorm(size or self.hidden, self.config.rms_norm_eps)

    def rotary(self, device: torch.device) -> LlamaRotaryEmbedding:
        with torch.device(device):  # the weights around it are made elsewhere, without values
            return LlamaRotaryEmbedding(self.config)


class Attention(nn.Module):
    """Attention with queries, keys and values of ``inputs`` numbers."""

    def __init__(self, shape: Shape, inputs: int):
        super().__init__()
        self.size = shape.head_dim
        queries, keys = shape.config.num_attention_heads * self.size, shape.key_heads * self.size
        self.q_proj = nn.Linear(inputs, queries, bias=shape.qkv_bias)
        self.k_proj, self.v_proj = (nn.Linear(inputs, keys, bias=shape.qkv_bias) for _ in range(2))
        self.o_proj = nn.Linear(queries, shape.hidden, bias=shape.o_bias)
        self.q_norm, self.k_norm = (shape.norm(self.size) if shape.qk_norm else nn.Identity() for _ in range(2))

    def queries(self, x: torch.Tensor, rotation: Rotation) -> torch.Tensor:
        """Returns [n, H, q, D] for x [n, q, inputs]."""
        return rotated(self.q_norm(self._heads(self.q_proj(x))), rotation)

    def keys_and_values(self, x: torch.Tensor, rotation: Rotation) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns [n, H_kv, q, D] each."""
        keys = rotated(self.k_norm(self._heads(self.k_proj(x))), rotation)
        return keys, self._heads(self.v_proj(x)).transpose(1, 2)

    def forward(
        self, x: torch.Tensor, rotation: Rotation, cache: StaticKVCache, layer: int, mask: torch.Tensor
    ) -> torch.Tensor:
        """Stores the keys and values of ``x`` where ``cache.write_at`` says, and attends to the slots that ``mask``
        allows: [n, 1, q, visible] bool, or that of ``seen_slots``. Returns [n, q, hidden]."""
        if says_slots(mask):
            q, k, v = self._projected(x)
            return self.o_proj(cache.layers[layer].store_and_attend(q, k, v, mask[:, 0], rotation).flatten(2))
        keys, values = cache.layers[layer].update(*self.keys_and_values(x, rotation))
        return self.attend(self.queries(x, rotation), keys, values, mask)

    def attend(
        self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor
    ) -> torch.Tensor:
        compute = by_group if queries.device.type == "cuda" else by_head
        return self.o_proj(compute(queries, keys, values, mask).transpose(1, 2).flatten(2))

    def _projected(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Returns queries [n, H, q, D], and keys and values [n, H_kv, q, D], that are not rotated."""
        queries, keys = self.q_norm(self._heads(self.q_proj(x))), self.k_norm(self._heads(self.k_proj(x)))
        return queries.transpose(1, 2), keys.transpose(1, 2), self._heads(self.v_proj(x)).transpose(1, 2)

    def _heads(self, x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(-1, (-1, self.size))


def by_head(queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Returns [n, H, q, D]: what queries [n, H, q, D] see of keys and values [n, H_kv, visible, D] by ``mask``
    [n, 1, q, visible] bool."""
    return scaled_dot_product_attention(queries, keys, values, mask, enable_gqa=keys.shape[1] != queries.shape[1])


def by_group(queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Returns the same. No fused kernel of a GPU has both a mask and grouped queries, so the heads that share keys
    become one head with the queries of all of them. Of a prompt the masks of these would be larger than copies of the
    keys for each head."""
    size, heads, q, width = queries.shape
    groups = heads // keys.shape[1]
    if groups * q > heads * width:
        return by_head(queries, keys.repeat_interleave(groups, 1), values.repeat_interleave(groups, 1), mask)
    each = mask.expand(-1, -1, groups, -1) if q == 1 else mask.repeat(1, 1, groups, 1)
    out = by_head(queries.reshape(size, -1, groups * q, width), keys, values, each)
    return out.reshape(size, heads, q, -1)


def rotated(x: torch.Tensor, rotation: Rotation) -> torch.Tensor:
    """Returns x [n, q, H, D] rotated to its positions, as [n, H, q, D]."""
    (cos, sin), x = rotation, x.transpose(1, 2)
    if computes(x) and has_elementwise(x.device.type) and cos.dtype == x.dtype:
        return rotate(x, cos, sin)
    return x * cos[:, None] + rotate_half(x) * sin[:, None]


class MLP(nn.Module):
    def __init__(self, shape: Shape):
        super().__init__()
        c, bias = shape.config, shape.mlp_bias
        self.gate_proj, self.up_proj = (nn.Linear(c.hidden_size, c.intermediate_size, bias=bias) for _ in range(2))
        self.down_proj = nn.Linear(c.intermediate_size, c.hidden_size, bias=bias)
        self.act_fn = ACT2FN[c.hidden_act]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


@dataclass(frozen=True)
class Parts:
    """What a head of such layers is made of.

    Attributes:
        states, target_hidden: which hidden states of the target it reads, and the width of one.
        vocab_size: ids that it may be fed.
        columns: of its own ``lm_head``; None: it uses the target's.
        own_embedding: whether it has ``embed_tokens``.
    """

    shape: Shape
    states: tuple[int, ...]
    target_hidden: int
    vocab_size: int
    num_layers: int
    device: torch.device
    columns: int | None = None
    own_embedding: bool = False


class LayeredHead(Head):
    """A head whose layers are a Llama's."""

    def __init__(self, parts: Parts):
        shape = parts.shape
        super().__init__(parts.states, shape.hidden, parts.target_hidden, parts.vocab_size, parts.num_layers)
        self.key_heads, self.head_dim, self.rotary = shape.key_heads, shape.head_dim, shape.rotary(parts.device)
        self.lm_head = None if parts.columns is None else nn.Linear(shape.hidden, parts.columns, bias=False)
        self.embed_tokens = nn.Embedding(parts.vocab_size, shape.hidden) if parts.own_embedding else None

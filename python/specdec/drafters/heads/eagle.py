"""EAGLE-1 and EAGLE-2 (Li et al., arXiv 2401.15077 and 2406.16858), which share their weights' format."""

from __future__ import annotations

import torch
from torch import nn

from ...models.cache.kv_cache import StaticKVCache
from .blocks import MLP, Attention, LayeredHead, Parts, Shape
from .in_turn import DraftsInTurn
from .interface import HeadInput


class EagleLayer(nn.Module):
    """A decoder layer. The first one has no norm before its attention."""

    def __init__(self, shape: Shape, first: bool):
        super().__init__()
        self.input_layernorm = None if first else shape.norm()
        self.post_attention_layernorm = shape.norm()
        self.self_attn, self.mlp = Attention(shape, shape.hidden), MLP(shape)


class Eagle(LayeredHead, DraftsInTurn):
    """A pair of a token's final state and the next token predicts the state of the next token, of which the target's
    head makes the distribution of the token after both."""

    kind, can_fuse = "eagle", True

    def __init__(self, parts: Parts, fc_bias: bool):
        super().__init__(parts)
        self.fc = nn.Linear(2 * parts.shape.hidden, parts.shape.hidden, bias=fc_bias)
        self.layers = nn.ModuleList(EagleLayer(parts.shape, i == 0) for i in range(parts.num_layers))

    def run(self, rows: HeadInput, cache: StaticKVCache) -> torch.Tensor:
        """Feeds pairs, and returns predicted states [n, q, hidden]."""
        layout = rows.layout
        assert isinstance(layout.mask, torch.Tensor)
        cache.write_at(layout.slots, layout.visible, rows.first_row)
        rotation = self.rotary(rows.features, layout.positions)
        x = self.fc(torch.cat((self.embedded(rows.tokens), rows.features), -1))
        for i, layer in enumerate(self.layers):
            assert isinstance(layer, EagleLayer)
            normed = x if layer.input_layernorm is None else layer.input_layernorm(x)
            x = x + layer.self_attn(normed, rotation, cache, i, layout.mask)
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        return x

"""EAGLE-3 (Li et al., arXiv 2503.01840): one or more decoder layers over several of the target's hidden states;
and P-EAGLE, which drafts all tokens of a step in one forward."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ...models.cache.kv_cache import StaticKVCache
from ...models.forward.layout import Layout
from .blocks import MLP, Attention, LayeredHead, Parts, Rotation, Shape
from .in_turn import DraftsInTurn
from .interface import HeadInput, Logits


@dataclass(frozen=True)
class Eagle3Flags:
    """What differs between published heads; the names are those of their config.json."""

    fused: bool = True  # ``fc`` over the states (``use_aux_hidden_state``); else the one state is the feature
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    fc_bias: bool = False
    logit_scale: float = 1.0


class Eagle3Layer(nn.Module):
    """The first layer reads token and feature side by side; later ones are plain decoder layers."""

    def __init__(self, shape: Shape, first: bool):
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = shape.norm(), shape.norm()
        self.hidden_norm = shape.norm() if first else None
        self.self_attn = Attention(shape, (2 if first else 1) * shape.hidden)
        self.mlp = MLP(shape)


class Eagle3(LayeredHead, DraftsInTurn):
    """A pair of a token's feature and the next token predicts the token after both. The output of the last layer,
    before the norm, stands in for the feature of a drafted token."""

    kind, can_fuse = "eagle3", True

    def __init__(self, parts: Parts, flags: Eagle3Flags):
        super().__init__(parts)
        shape, inputs = parts.shape, len(parts.states) * parts.target_hidden
        self.flags, self.norm_before_residual, self.norm_output = flags, flags.norm_before_residual, flags.norm_output
        self.fc = nn.Linear(inputs, shape.hidden, bias=flags.fc_bias) if flags.fused else None
        self.input_norm = shape.norm(inputs) if flags.norm_before_fc else None
        self.fc_norm = nn.ModuleList(shape.norm(parts.target_hidden) for _ in parts.states) if flags.fc_norm else None
        self.layers = nn.ModuleList(Eagle3Layer(shape, i == 0) for i in range(parts.num_layers))
        self.norm = shape.norm()

    def combine(self, states: torch.Tensor) -> torch.Tensor:
        if self.fc is None:
            return states
        if self.input_norm is not None:
            states = self.input_norm(states)
        if self.fc_norm is not None:
            parts = states.chunk(len(self.states), -1)
            states = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], -1)
        return self.fc(states)

    def run(self, rows: HeadInput, cache: StaticKVCache) -> torch.Tensor:
        """Feeds pairs, and returns the output of the last layer [n, q, hidden]."""
        layout = rows.layout
        cache.write_at(layout.slots, layout.visible, rows.first_row)
        rotation = self.rotary(rows.features, layout.positions)
        out = rows.features
        for i, layer in enumerate(self.layers):
            out = self._layer(i, layer, out, rows, rotation, cache)
        return out

    def _layer(
        self, i: int, layer: nn.Module, x: torch.Tensor, rows: HeadInput, rotation: Rotation, cache: StaticKVCache
    ) -> torch.Tensor:
        assert isinstance(layer, Eagle3Layer)
        if layer.hidden_norm is None:
            u = layer.input_layernorm(x)
        else:
            feature = layer.hidden_norm(x)
            u = torch.cat((layer.input_layernorm(self.embedded(rows.tokens)), feature), -1)
            x = feature if self.norm_before_residual else x
        assert isinstance(rows.layout.mask, torch.Tensor)
        x = x + layer.self_attn(u, rotation, cache, i, rows.layout.mask)
        return x + layer.mlp(layer.post_attention_layernorm(x))

    def recycled(self, out: torch.Tensor) -> torch.Tensor:
        return self.norm(out) if self.norm_output else out

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return super().logits(self.norm(hidden)) * self.flags.logit_scale


class PEagle(Eagle3):
    """The pairs of tokens that are not drafted yet have a mask token and a trained feature. So the drafts do not
    influence each other, and each one's q is known.

    Args:
        mask_token: the id that stands for tokens that are not known.
        others: those of :class:`Eagle3`.
    """

    kind, at_once, independent = "peagle", True, True

    def __init__(self, mask_token: int, *others: Any):
        super().__init__(*others)
        self.mask_token = mask_token
        inputs = len(self.states) * self.hidden
        self.mask_hidden = nn.Parameter(torch.empty(1, 1, inputs))

    def draft(self, rows: HeadInput, ahead: Layout, cache: StaticKVCache, count: int) -> Logits:
        size, known = len(rows.tokens), rows.layout
        masked = self.combine(self.mask_hidden).expand(size, count - 1, -1)
        tokens = rows.tokens.new_full((size, count - 1), self.mask_token)
        positions = torch.cat((known.positions, ahead.positions), 1)
        layout = self.layout(positions, torch.cat((known.slots, ahead.slots), 1), known.visible)
        whole = HeadInput(torch.cat((rows.features, masked), 1), torch.cat((rows.tokens, tokens), 1), layout)
        out = self.run(whole, cache)[:, -count:]
        for i in range(count):
            yield self.logits(out[:, i])

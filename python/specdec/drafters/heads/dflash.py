"""DFlash: a block of masked tokens, filled in by one forward with the target's hidden states as context."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import nn

from ...models.cache.kv_cache import StaticKVCache
from ...models.forward.layout import Layout
from .blocks import MLP, Attention, LayeredHead, Parts, Rotation, Shape
from .interface import HeadInput, Logits

KeysAndValues = tuple[torch.Tensor, torch.Tensor]  # [n, H_kv, q, D] each


class Windows(NamedTuple):
    """What layers with sliding attention see of the text before a block."""

    layers: tuple[int, ...]  # which have a window
    size: int  # positions, as in transformers
    causal: bool  # whether a token of a block sees in them only those before it
    by_block: bool  # whether all tokens of a block see the same part of the text, as speculators trains it


class DFlashLayer(nn.Module):
    def __init__(self, shape: Shape):
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = shape.norm(), shape.norm()
        self.self_attn, self.mlp = Attention(shape, shape.hidden), MLP(shape)

    def forward(self, x: torch.Tensor, rotation: Rotation, known: KeysAndValues, sees: torch.Tensor) -> torch.Tensor:
        """Returns [n, q, hidden]. ``sees``: as ``mask`` of ``fill_in``."""
        x = x + self.attend(self.input_layernorm(x), rotation, known, sees)
        return x + self.mlp(self.post_attention_layernorm(x))

    def attend(self, a: torch.Tensor, rotation: Rotation, known: KeysAndValues, sees: torch.Tensor) -> torch.Tensor:
        own = self.self_attn.keys_and_values(a, rotation)
        keys, values = (torch.cat(both, 2) for both in zip(known, own, strict=True))
        return self.self_attn.attend(self.self_attn.queries(a, rotation), keys, values, sees)


class DFlash(LayeredHead):
    """Each layer attends to keys and values of the known tokens' features, which is all that the cache holds, and of
    the block: the last known token, then masks. Given these, the tokens of the block are independent.

    Args:
        block: B, tokens of the block. It is computed as a whole, since its tokens see each other.
        mask_token: the id of the masks.
        causal: whether a token of the block sees only those before it.
        from_anchor: whether the output at a token is for the one after it, which makes B drafts; else it is for the
            token itself, which makes B - 1.
        windows: of layers with sliding attention.
        cap: logits become cap tanh(logits / cap), as those of some targets do; None: they stay.
        layer: makes a layer.
    """

    kind, at_once, independent = "dflash", True, True
    beside = (("k_proj", "v_proj"), ("gate_proj", "up_proj"))  # known tokens have no queries

    def __init__(
        self,
        parts: Parts,
        block: int,
        mask_token: int,
        causal: bool = False,
        from_anchor: bool = False,
        windows: Windows | None = None,
        cap: float | None = None,
        layer: Callable[[Shape], DFlashLayer] = DFlashLayer,
    ):
        super().__init__(parts)
        self.windows, self.cap = windows, cap
        shape = parts.shape
        self.block, self.mask_token, self.causal, self.from_anchor = block, mask_token, causal, from_anchor
        self.most_drafts = block if from_anchor else block - 1
        self.fc = nn.Linear(len(parts.states) * parts.target_hidden, shape.hidden, bias=False)
        self.hidden_norm, self.norm = shape.norm(), shape.norm()
        self.layers = nn.ModuleList(layer(shape) for _ in range(parts.num_layers))

    def combine(self, states: torch.Tensor) -> torch.Tensor:
        return self.hidden_norm(self.fc(states))

    def read(self, rows: HeadInput, cache: StaticKVCache) -> None:
        self.context(rows, cache)

    def context(self, rows: HeadInput, cache: StaticKVCache) -> list[KeysAndValues]:
        """Stores keys and values of the features. Returns each layer's visible ones."""
        cache.write_at(rows.layout.slots, rows.layout.visible, rows.first_row)
        rotation = self.rotary(rows.features, rows.layout.positions)
        found = []
        for i, layer in enumerate(self.layers):
            assert isinstance(layer, DFlashLayer)
            found.append(cache.layers[i].update(*layer.self_attn.keys_and_values(rows.features, rotation)))
        return found

    def draft(self, rows: HeadInput, ahead: Layout, cache: StaticKVCache, count: int) -> Logits:
        known, (size, block) = self.context(rows, cache), (len(rows.tokens), self.block)
        masks = rows.tokens.new_full((size, block - 1), self.mask_token)
        offsets = torch.arange(1, block + 1, device=masks.device)
        # The block sees what the last known feature sees, and itself.
        assert isinstance(rows.layout.mask, torch.Tensor)
        context = rows.layout.mask[:, :, -1:].expand(-1, -1, block, -1)
        each_other = torch.ones(size, 1, block, block, dtype=torch.bool, device=masks.device)
        tokens, places = torch.cat((rows.tokens[:, -1:], masks), 1), rows.layout.positions[:, -1:] + offsets
        mask = torch.cat((context, each_other.tril() if self.causal else each_other), 3)
        x = self.fill_in(tokens, places, known, mask, self._in_window(context, each_other, places))
        out = self.norm(x if self.from_anchor else x[:, 1:])
        return (yield from self.walk(out[:, :count], rows.tokens[:, -1:]))

    def walk(self, out: torch.Tensor, previous: torch.Tensor) -> Logits:
        """Yields and returns what ``draft`` does.

        Args:
            out: [n, count, hidden], what the block has for each draft.
            previous: [n, 1] int64, the token before the first one.
        """
        for own in out.unbind(1):
            yield self.logits(own)

    def fill_in(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        known: list[KeysAndValues],
        mask: torch.Tensor,
        in_window: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Returns the output of the last layer [n, q, hidden] at ``tokens`` [n, q] int64, of one block or several.

        Args:
            positions: [n, q] int64.
            known: what ``context`` returned.
            mask: [n, 1, q, visible + q] bool: which of the known tokens, and which of these, each one sees.
            in_window: the same in layers with a sliding window.
        """
        slides = () if self.windows is None else self.windows.layers
        in_window = mask if in_window is None else in_window
        x = self.embedded(tokens)
        rotation = self.rotary(x, positions)
        for i, (layer, own) in enumerate(zip(self.layers, known, strict=True)):
            x = layer(x, rotation, own, in_window if i in slides else mask)
        return x

    def _in_window(self, context: torch.Tensor, each_other: torch.Tensor, places: torch.Tensor) -> torch.Tensor | None:
        """Returns what the tokens of a block at ``places`` [n, block] see in layers with a window."""
        if self.windows is None:
            return None
        windows, slots = self.windows, torch.arange(context.shape[3], device=context.device)
        # speculators counts back from the block's first token, others from each one.
        first = places[:, :1] - windows.size if windows.by_block else places - windows.size + 1
        context = context & (slots >= first.view(len(places), 1, -1, 1))
        own = each_other.tril() if windows.causal else each_other
        if not windows.by_block:
            own = own.triu(1 - windows.size)
        return torch.cat((context, own), 3)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        logits = super().logits(hidden)
        return logits if self.cap is None else self.cap * torch.tanh(logits / self.cap)

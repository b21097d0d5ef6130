"""The MTP layers of a target (multi-token prediction; DeepSeek-AI, arXiv 2412.19437, section 2.2): decoder layers of
its own kind, trained with it, each for one more token ahead. Transformers drops them when it loads the target."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn

from ...models.cache.kv_cache import StaticKVCache, cache_argument
from ...models.cache.kv_layer import Slot
from ...models.forward.attention import says_slots
from ...models.forward.layout import Layout
from .blocks import Rotation
from .in_turn import DraftsInTurn
from .interface import Head, HeadInput, Logits


class MtpLayer(nn.Module):
    """Token and feature, each after a norm of its own, projected to one width and fed to a decoder layer.

    Args:
        block: a decoder layer of the target's class, which takes its place in the head's cache from its layer index,
            or several blocks that take a layer's place.
        norm: makes a norm of the target's class.
    """

    def __init__(self, block: nn.Module, hidden: int, norm: Callable[[], nn.Module]):
        super().__init__()
        self.enorm, self.hnorm, self.norm = norm(), norm(), norm()
        self.eh_proj = nn.Linear(2 * hidden, hidden, bias=False)
        self.block = block


class MtpHead(Head):
    """What heads of MTP layers share. Features are the target's final states, after its norm.

    Args:
        slot: the keys and the values that a token stores in one layer.
        rotary: the target's rotary embedding: takes features and positions [n, q] int64; None: it has none.
        own: whether it has ``embed_tokens`` and ``lm_head``.

    Attributes:
        hidden_first: whether the projection reads the feature before the token's embedding.
        recycle_normed: whether an output stands in for a feature after its norm, or before.
    """

    kind, certain = "mtp", True
    in_float32 = ("e_score_correction_bias",)  # of experts' routers; transformers keeps it so, too

    def __init__(
        self,
        layers: Sequence[MtpLayer],
        states: tuple[int, ...],
        hidden: int,
        vocab_size: int,
        slot: tuple[Slot, Slot],
        rotary: Callable[[torch.Tensor, torch.Tensor], Rotation] | None,
        hidden_first: bool,
        own: tuple[bool, bool],
    ):
        super().__init__(states, hidden, hidden, vocab_size, len(layers))
        self.layers, self._slot, self._rotary = nn.ModuleList(layers), slot, rotary
        self.hidden_first, self.recycle_normed = hidden_first, True
        self.embed_tokens = nn.Embedding(vocab_size, hidden) if own[0] else None
        self.lm_head = nn.Linear(hidden, vocab_size, bias=False) if own[1] else None

    def layer_slot(self) -> tuple[Slot, Slot]:
        return self._slot

    def feed(self, i: int, rows: HeadInput, cache: StaticKVCache) -> torch.Tensor:
        """Feeds pairs to layer ``i``, and returns its output [n, q, hidden], before the norm."""
        layer, layout = self.layers[i], rows.layout
        assert isinstance(layer, MtpLayer) and isinstance(layout.mask, torch.Tensor)
        fused, mask = says_slots(layout.mask), layout.mask
        cache.write_at(layout.slots, layout.visible, rows.first_row, defers=fused)
        parts = layer.enorm(self.embedded(rows.tokens)), layer.hnorm(rows.features)
        x = layer.eh_proj(torch.cat(parts[::-1] if self.hidden_first else parts, -1))
        if not fused:  # eager attention adds its mask to the scores, and sdpa takes either kind
            mask = torch.where(mask, 0.0, torch.finfo(x.dtype).min).to(x.dtype)
        return layer.block(
            x,
            attention_mask=mask,
            position_ids=layout.positions,
            position_embeddings=None if self._rotary is None else self._rotary(x, layout.positions),
            **{cache_argument(layer.block): cache},
        )

    def normed(self, i: int, out: torch.Tensor) -> torch.Tensor:
        layer = self.layers[i]
        assert isinstance(layer, MtpLayer)
        return layer.norm(out)


class Mtp(MtpHead, DraftsInTurn):
    """One MTP layer, which makes any number of drafts: its output stands in for the feature of a drafted token."""

    def run(self, rows: HeadInput, cache: StaticKVCache) -> torch.Tensor:
        return self.feed(0, rows, cache)

    def recycled(self, out: torch.Tensor) -> torch.Tensor:
        return self.normed(0, out) if self.recycle_normed else out

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return super().logits(self.normed(0, hidden))


class MtpInSuccession(MtpHead):
    """Several MTP layers, of which each makes one draft. Layer i pairs the output of the layer before for a token with
    the token i + 1 after it, so its last i rows stem from drafts, and are computed anew in the next step."""

    def __init__(self, layers: Sequence[MtpLayer], *others):
        super().__init__(layers, *others)
        self.most_drafts, self.lookahead = len(layers), len(layers) - 1

    def read(self, rows: HeadInput, cache: StaticKVCache) -> None:
        self._read_from(0, rows, cache)

    def draft(self, rows: HeadInput, ahead: Layout, cache: StaticKVCache, count: int) -> Logits:
        for i in range(count):
            out = self.feed(i, rows, cache)
            rows = rows._replace(features=self._passed_on(i, out))
            if i + 1 == count:  # later layers read what is known, for a step with more drafts
                unknown = rows.tokens[:, -1:].expand(-1, len(self.layers))
                self._read_from(count, rows._replace(tokens=torch.cat((rows.tokens[:, 1:], unknown), 1)), cache)
            token = yield self.logits(self.normed(i, out[:, -1]))
            rows = rows._replace(tokens=torch.cat((rows.tokens[:, 1:], token), 1))

    def _read_from(self, first: int, rows: HeadInput, cache: StaticKVCache) -> None:
        """Feeds layer ``first`` and all after it, whose tokens begin in the first columns."""
        tokens, count = rows.tokens, rows.features.shape[1]
        for i in range(first, len(self.layers)):
            out = self.feed(i, rows._replace(tokens=tokens[:, i - first : i - first + count]), cache)
            rows = rows._replace(features=self._passed_on(i, out))

    def _passed_on(self, i: int, out: torch.Tensor) -> torch.Tensor:
        return self.normed(i, out) if self.recycle_normed else out

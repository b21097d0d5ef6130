"""DFlash: a few layers that fill in a whole block of tokens at once, from the target's hidden states before it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ...drafters.heads.blocks import Parts, Shape
from ...drafters.heads.dflash import DFlash
from ...drafters.heads.interface import HeadInput
from ...drafters.heads.layer_ids import written
from ...models.forward.cached_model import CachedModel
from ...models.forward.layout import Layout
from .learner import (
    DECAY,
    Files,
    GrowingCache,
    Learner,
    Lesson,
    agreement,
    layer_sizes,
    loss_between,
    output_ids,
    small,
    speculators_config,
)

ANCHORS = 48  # of a text in a lesson, at most: the places at which a block begins


class DflashLearner(Learner):
    """
    Args:
        depth: tokens that a block fills in, one less than its size.
        layers: of the head.
        states: which hidden states it reads, as transformers counts them.
        mask_token: stands for the tokens to be filled in.
    """

    kind, scaled = "dflash", True

    def __init__(
        self,
        target: CachedModel,
        loss: Mapping[str, float],
        depth: int,
        layers: int,
        states: Sequence[int],
        mask_token: int,
    ):
        self._states = written(states, target.config.num_hidden_layers)
        self._outputs = output_ids(self._states)
        self.sizes = layer_sizes(target.config, layers, "qwen3")
        shape = Shape.read(self.sizes, {"layers.0.self_attn.q_norm.weight"})
        parts = Parts(shape, (*states,), target.config.hidden_size, target.vocab_size, layers, target.device)
        cap = getattr(target.config, "final_logit_softcapping", None)
        self.dflash = DFlash(parts, depth + 1, mask_token, cap=cap)
        super().__init__(self.dflash, target, loss)
        small(self.dflash)

    def learn(self, lesson: Lesson, chance: torch.Generator) -> tuple[torch.Tensor, list[float]]:
        """Slot i of the block that begins at place p is about token p + i. It sees the features before p, and its own
        block."""
        head, block, device = self.dflash, self.dflash.block, lesson.tokens.device
        size, length = lesson.tokens.shape
        most = length - block + 1  # a block may reach one token beyond the text, which the last logits are about
        anchors = torch.stack([torch.randperm(most, generator=chance)[:ANCHORS] + 1 for _ in range(size)]).to(device)
        count, before = anchors.shape[1], torch.arange(length, device=device)
        places = anchors[:, :, None] + torch.arange(block, device=device)  # [B, A, block]
        tokens = torch.full_like(places, head.mask_token)
        tokens[..., 0] = lesson.tokens.gather(1, anchors)
        number = torch.arange(count * block, device=device) // block
        sees_context = before < anchors.repeat_interleave(block, 1)[..., None]  # [B, A * block, L]
        sees_block = (number[:, None] == number).expand(size, -1, -1)
        mask = torch.cat([sees_context, sees_block], -1)[:, None]
        cache: Any = GrowingCache(head.num_layers)
        layout = Layout(before.expand(size, -1), before.expand(size, -1), length, None)
        known = head.context(HeadInput(head.combine(lesson.states), lesson.tokens, layout), cache)
        out = head.fill_in(tokens.flatten(1), places.flatten(1), known, mask)
        ours = head.logits(head.norm(out).unflatten(1, (count, block))[:, :, 1:])
        text = torch.arange(size, device=device)[:, None]
        total, hits = lesson.states.new_zeros(()), []
        for i in range(block - 1):
            log_p = lesson.log_p[text, anchors + i]
            total = total + DECAY**i * loss_between(self.loss, ours[:, :, i], log_p)
            hits.append(agreement(ours[:, :, i], log_p))
        return total, hits

    def published(self, name: str) -> Files:
        """As z-lab writes it: the states are counted as outputs of layers, from 0."""
        config = {
            **self.sizes,
            "architectures": ["DFlashDraftModel"],
            "num_target_layers": self.target.config.num_hidden_layers,
            "block_size": self.dflash.block,
            "layer_types": ["full_attention"] * self.dflash.num_layers,
            "dflash_config": {"mask_token_id": self.dflash.mask_token, "target_layer_ids": self._outputs},
        }
        return config, self.tensors

    def container(self, name: str, num_drafts: int) -> Files:
        common = speculators_config("dflash", "DFlashDraftModel", self.sizes, self.target, name, num_drafts)
        own = {
            "aux_hidden_state_layer_ids": self._states,
            "block_size": self.dflash.block,
            "mask_token_id": self.dflash.mask_token,
            "draft_vocab_size": self.head.vocab_size,
            "sample_from_anchor": False,
        }
        return {**common, **own}, self.tensors

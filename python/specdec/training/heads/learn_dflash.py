"""DFlash: a few layers that fill in a whole block of tokens at once, from the target's hidden states before it; and
DSpark, which walks through the block."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ...drafters.heads.blocks import Parts, Shape
from ...drafters.heads.dflash import DFlash
from ...drafters.heads.dflash_walks import DSpark
from ...drafters.heads.interface import HeadInput, returned
from ...models.forward.cached_model import CachedModel
from ...models.forward.layout import Layout
from .learner import DECAY, Files, GrowingCache, Learner, Lesson, agreement, layer_sizes, loss_between, small

ANCHORS = 48  # of a text in a lesson, at most: the places at which a block begins
RANK = 256  # of DSpark's Markov head, at most: that of DeepSpec's heads


class DflashLearner(Learner):
    """
    Args:
        depth: drafts of a block.
        layers: of the head.
        states: which hidden states it reads, as transformers counts them.
        mask_token: stands for the tokens to be filled in.
    """

    kind, architecture, scaled = "dflash", "DFlashDraftModel", True

    def __init__(
        self,
        target: CachedModel,
        loss: Mapping[str, float],
        depth: int,
        layers: int,
        states: Sequence[int],
        mask_token: int,
    ):
        self.reads(states, target)
        self.sizes = layer_sizes(target.config, layers, "qwen3")
        shape = Shape.read(self.sizes, {"layers.0.self_attn.q_norm.weight"})
        parts = Parts(shape, (*states,), target.config.hidden_size, target.vocab_size, layers, target.device)
        self.dflash = self.new_head(parts, depth, mask_token, getattr(target.config, "final_logit_softcapping", None))
        super().__init__(self.dflash, target, loss)
        small(self.dflash)

    def new_head(self, parts: Parts, depth: int, mask_token: int, cap: float | None) -> DFlash:
        return DFlash(parts, depth + 1, mask_token, cap=cap)

    def learn(self, lesson: Lesson, chance: torch.Generator) -> tuple[torch.Tensor, list[float]]:
        """The block that begins at place p is about the tokens after p. It sees the features before p, and itself, and
        is walked through with the text's own tokens."""
        head, block, device = self.dflash, self.dflash.block, lesson.tokens.device
        (size, length), depth = lesson.tokens.shape, block if self.dflash.from_anchor else block - 1
        most = length - depth  # a block may reach one token beyond the text, which the last logits are about
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
        out = head.norm(head.fill_in(tokens.flatten(1), places.flatten(1), known, mask)).unflatten(1, (count, block))
        text = torch.arange(size, device=device)[:, None]
        walk = head.walk(out[:, :, block - depth :].flatten(0, 1), tokens[..., :1].flatten(0, 1))
        total, hits, accepted = lesson.states.new_zeros(()), list[float](), list[torch.Tensor]()
        following: Any = None
        for i in range(depth):
            ours = walk.send(following).unflatten(0, (size, count))
            log_p = lesson.log_p[text, anchors + i]
            total = total + DECAY**i * loss_between(self.loss, ours, log_p)
            hits.append(agreement(ours, log_p))
            if head.says_how_sure:
                accepted.append(torch.minimum(ours.detach().float().softmax(-1), log_p.exp()).sum(-1).flatten())
            following = lesson.tokens[text, (anchors + i + 1).clamp(max=length - 1)].flatten()[:, None]
        if (sure := returned(walk, following)) is not None:
            total = total + _wrongness(sure, torch.stack(accepted, 1))
        return total, hits

    def published(self, name: str) -> Files:
        """As z-lab writes it: the states are counted as outputs of layers, from 0."""
        config = {
            **self.sizes,
            "architectures": [self.architecture],
            "num_target_layers": self.target.config.num_hidden_layers,
            "block_size": self.dflash.block,
            "layer_types": ["full_attention"] * self.dflash.num_layers,
            "dflash_config": {"mask_token_id": self.dflash.mask_token, "target_layer_ids": self._outputs},
        }
        return config, self.tensors

    def container(self, name: str, num_drafts: int) -> Files:
        own = {
            "aux_hidden_state_layer_ids": self._states,
            "block_size": self.dflash.block,
            "mask_token_id": self.dflash.mask_token,
            "draft_vocab_size": self.head.vocab_size,
            "sample_from_anchor": self.dflash.from_anchor,
        }
        return {**self.config_of_container(name, num_drafts), **own}, self.tensors


class DsparkLearner(DflashLearner):
    """Every token of the block is about the next one, after a Markov head; and a confidence head learns how likely each
    draft is to be accepted."""

    kind, architecture = "dspark", "DSparkDraftModel"

    def new_head(self, parts: Parts, depth: int, mask_token: int, cap: float | None) -> DFlash:
        hidden = parts.shape.hidden
        rank = min(RANK, hidden)
        head = DSpark(rank, parts.vocab_size, hidden + rank, parts, depth, mask_token, False, True, None, cap)
        for weight in head.markov_head.parameters():
            nn.init.normal_(weight, std=0.02)
        self.walks = {"markov_rank": rank, "markov_head_type": "vanilla", "enable_confidence_head": True,
                      "confidence_head_with_markov": True}  # fmt: skip
        return head

    def published(self, name: str) -> Files:
        """As SpecForge writes it, without the target's matrices, which DeepSpec's files have."""
        config, tensors = super().published(name)
        alone = self.sizes["num_key_value_heads"] == self.sizes["num_attention_heads"]
        config["dflash_config"] |= {
            "projector_type": "dspark", "attention_mode": "mha" if alone else "gqa", **self.walks
        }  # fmt: skip
        return config, tensors

    def container(self, name: str, num_drafts: int) -> Files:
        config, tensors = super().container(name, num_drafts)
        return config | self.walks, tensors


def _wrongness(sure: torch.Tensor, accepted: torch.Tensor) -> torch.Tensor:
    """Returns the cross-entropy of how likely drafts are to be accepted, [n, depth] each."""
    sure = sure.clamp(1e-6, 1 - 1e-6)
    wrong = -(accepted * sure.log() + (1 - accepted) * (1 - sure).log()).mean(0)
    return (wrong * DECAY ** torch.arange(len(wrong), device=wrong.device)).sum()

"""DFlash: a few layers that fill in a whole block of tokens at once, from the target's hidden states before it."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import LlamaConfig

from .layers import Lesson, Mlp, Norm, Projections, agreement, divergence, small

LAYERS, BLOCK = 2, 8
ANCHORS = 48  # of a text in a lesson: the places at which a block begins
DECAY = 0.8  # the weight of a slot's loss, of the one before
MASK = 1  # the padding token, which no text has


class Layer(nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.input_layernorm = Norm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = Norm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Projections(config, config.hidden_size, norms=True)
        self.mlp = Mlp(config)


class Dflash(nn.Module):
    file = "model.safetensors"

    def __init__(self, target: LlamaConfig, embedding: Tensor, kept: Tensor) -> None:
        super().__init__()
        layers = target.num_hidden_layers
        self.target = target
        self.outputs = [round(1 + i * (layers - 4) / (LAYERS - 1)) for i in range(LAYERS)]  # of these layers
        self.fc = nn.Linear(LAYERS * target.hidden_size, target.hidden_size, bias=False)
        self.hidden_norm = Norm(target.hidden_size, target.rms_norm_eps)
        self.layers = nn.ModuleList(Layer(target) for _ in range(LAYERS))
        self.norm = Norm(target.hidden_size, target.rms_norm_eps)
        small(self)

    def learn(self, lesson: Lesson, chance: torch.Generator) -> tuple[Tensor, list[float]]:
        """The loss, and how often each slot's token is the target's. Slot i of a block at p is about token p + i."""
        texts, length = lesson.tokens.shape
        begins = [torch.randperm(length - BLOCK - 1, generator=chance)[:ANCHORS] + 1 for _ in range(texts)]
        anchors = torch.stack(begins)
        places = anchors[:, :, None] + torch.arange(BLOCK)  # [B, A, BLOCK]
        tokens = torch.full_like(places, MASK)
        tokens[..., 0] = lesson.tokens.gather(1, anchors)
        x = lesson.embedding[tokens.flatten(1)]
        context = self.hidden_norm(self.fc(torch.cat([lesson.states[i + 1] for i in self.outputs], dim=-1)))
        positions, before = places.flatten(1)[:, None], torch.arange(length)
        block = torch.arange(ANCHORS * BLOCK) // BLOCK
        sees_context = before < anchors.repeat_interleave(BLOCK, dim=1)[..., None]  # [B, A * BLOCK, L]
        sees_block = (block[:, None] == block).expand(texts, -1, -1)
        mask = torch.cat([sees_context, sees_block], dim=-1)[:, None]
        for layer in self.layers:
            attention, a = layer.self_attn, layer.input_layernorm(x)
            keys = torch.cat([attention.keys(context, before), attention.keys(a, positions)], dim=2)
            values = torch.cat([attention.values(context), attention.values(a)], dim=2)
            scores = attention.queries(a, positions) @ keys.transpose(-1, -2) * attention.size**-0.5
            weights = scores.masked_fill(~mask, -torch.inf).float().softmax(-1)
            x = x + attention.out(weights @ values.float())
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        ours = (self.norm(x) @ lesson.embedding.T).unflatten(1, (ANCHORS, BLOCK))
        total, hits = 0.0, []
        for slot in range(1, BLOCK):
            about = (anchors + slot - 1)[..., None].expand(-1, -1, lesson.logits.shape[-1])
            wanted = lesson.logits.gather(1, about)
            total = total + DECAY ** (slot - 1) * divergence(ours[:, :, slot], wanted)
            hits.append(agreement(ours[:, :, slot], wanted))
        return total, hits

    def tensors(self) -> dict[str, Tensor]:
        return dict(self.state_dict())

    def config(self) -> dict[str, object]:
        config = {**self.target.to_dict(), "num_hidden_layers": LAYERS, "model_type": "qwen3"}
        config.update(
            architectures=["DFlashDraftModel"],
            num_target_layers=self.target.num_hidden_layers,
            block_size=BLOCK,
            layer_types=["full_attention"] * LAYERS,
            dflash_config={"mask_token_id": MASK, "target_layer_ids": self.outputs},
        )
        return config

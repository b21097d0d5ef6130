"""EAGLE-3 (arXiv 2503.01840): one layer that reads three of the target's hidden states, and then its own output.

In a training-time test (section 3.2) the head goes on from its own outputs for DEPTH tokens, as it will when it drafts.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import LlamaConfig

from .layers import Lesson, Mlp, Norm, Projections, divergence, small

DEPTH = 4
DECAY = 0.8  # the weight of a depth's loss, of the one before


class MidLayer(nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.hidden_norm = Norm(config.hidden_size, config.rms_norm_eps)
        self.input_layernorm = Norm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = Norm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Projections(config, 2 * config.hidden_size)
        self.mlp = Mlp(config)


class Eagle3(nn.Module):
    file = "model.safetensors"

    def __init__(self, target: LlamaConfig, embedding: Tensor, kept: Tensor) -> None:
        super().__init__()
        layers = target.num_hidden_layers
        self.states = (2, layers // 2, layers - 3)
        self.target, self.eps = target, target.rms_norm_eps
        self.fc = nn.Linear(3 * target.hidden_size, target.hidden_size, bias=False)
        self.midlayer = MidLayer(target)
        self.norm = Norm(target.hidden_size, target.rms_norm_eps)
        self.lm_head = nn.Linear(target.hidden_size, len(kept), bias=False)
        small(self)
        with torch.no_grad():
            self.lm_head.weight.copy_(embedding[kept])
        self.register_buffer("kept", kept)

    def learn(self, lesson: Lesson, chance: torch.Generator) -> tuple[Tensor, list[float]]:
        """The loss, and how often the token of each depth is the target's.

        Row t begins with the pair of the target's states at t and token t + 1, which is about token t + 2. At depth s
        it has gone on to the pair of its own output and token t + 1 + s. It then sees the true pairs up to t, and what
        it made itself since.
        """
        attention, layer = self.midlayer.self_attn, self.midlayer
        rows = lesson.tokens.shape[1] - 1 - DEPTH
        feature = self.fc(torch.cat([lesson.states[i] for i in self.states], dim=-1))[:, :rows]
        causal = torch.ones(rows, rows, dtype=torch.bool, device=feature.device).tril()
        keys: list[Tensor] = []
        values: list[Tensor] = []
        total, hits = 0.0, []
        for depth in range(DEPTH):
            positions = torch.arange(rows, device=feature.device) + depth
            embedded = lesson.embedding[lesson.tokens[:, 1 + depth : 1 + depth + rows]]
            pair = torch.cat([layer.input_layernorm(embedded), layer.hidden_norm(feature)], dim=-1)
            q = attention.queries(pair, positions)
            keys.append(attention.keys(pair, positions))
            values.append(attention.values(pair))
            scores = [(q @ keys[0].transpose(-1, -2)).masked_fill(~causal, -torch.inf)]
            scores += [(q * own).sum(-1, keepdim=True) for own in keys[1:]]
            weights = (torch.cat(scores, dim=-1).float() * attention.size**-0.5).softmax(-1)
            seen = weights[..., :rows] @ values[0].float()
            for own in range(1, depth + 1):
                seen = seen + weights[..., rows + own - 1, None] * values[own]
            feature = feature + attention.out(seen)
            feature = feature + layer.mlp(layer.post_attention_layernorm(feature))
            ours = self.lm_head(self.norm(feature))
            wanted = lesson.logits[:, 1 + depth : 1 + depth + rows]
            total = total + DECAY**depth * divergence(ours, wanted[..., self.kept])
            hits.append((self.kept[ours.argmax(-1)] == wanted.argmax(-1)).float().mean().item())
        return total, hits

    def tensors(self) -> dict[str, Tensor]:
        tensors = {name: tensor for name, tensor in self.state_dict().items() if name != "kept"}
        listed = torch.arange(len(self.kept))
        taken = torch.zeros(self.target.vocab_size, dtype=torch.bool)
        taken[self.kept] = True
        return {**tensors, "d2t": self.kept.cpu() - listed, "t2d": taken}

    def config(self) -> dict[str, object]:
        config = {**self.target.to_dict(), "num_hidden_layers": 1, "draft_vocab_size": len(self.kept)}
        config.update(architectures=["LlamaForCausalLMEagle3"], tie_word_embeddings=False)
        # SpecForge's entry, which counts the outputs of layers from 0.
        outputs = [state - 1 for state in self.states]
        config["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": outputs, "use_aux_hidden_state": True}
        return config

"""Pairs that cost what real models of their shape cost, with random weights and an acceptance to be set.

Layers by which the two differ are computed like any others, but their output projections are scaled by ``eps``. As eps
goes to 0, the two become one function. README.md says more.
"""

from __future__ import annotations

import bisect
import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

LOGIT_STD = 4.0


class Preset(NamedTuple):
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    draft_layers: int
    target_layers: int
    dtype: torch.dtype


PRESETS = {
    "tiny": Preset(128, 352, 4, 2, 32, 2048, 1, 6, torch.float32),  # for a CPU: a smoke test
    "120m": Preset(768, 2048, 12, 4, 64, 8192, 1, 16, torch.float32),  # 113 million, of which a forward reads 107
    "1b": Preset(2048, 8192, 32, 8, 64, 128256, 2, 16, torch.bfloat16),  # Llama-3.2-1B's shape
    "8b": Preset(4096, 14336, 32, 8, 128, 128256, 1, 32, torch.bfloat16),  # Llama-3.1-8B's shape
}
# Target and draft. Where a pair has two shapes, each model has all its ``target_layers``.
PAIRS: dict[str, tuple[Preset, Preset | None]] = {name: (preset, None) for name, preset in PRESETS.items()} | {
    "tiny+tiny": (PRESETS["tiny"], Preset(64, 176, 2, 1, 32, 2048, 1, 2, torch.float32)),
    "8b+1b": (PRESETS["8b"], PRESETS["1b"]),
}


@dataclass
class TunablePair:
    target: PreTrainedModel
    draft: PreTrainedModel
    differing: list[nn.Module]  # the layers by which they differ
    eps: float = 1.0

    def set_eps(self, eps: float) -> None:
        """Scales that by which the two differ, in place: > 0."""
        factor, self.eps = eps / self.eps, eps
        with torch.no_grad():
            for layer in self.differing:
                layer.self_attn.o_proj.weight.mul_(factor)
                layer.mlp.down_proj.weight.mul_(factor)

    def expected_alpha(self, temperature: float, tokens: int = 256) -> float:
        """The chance that a draft is accepted, sum min(p, q), over random text; at temperature 0, how often the largest
        logits agree. Generated text is other text, so what a run measures may differ a little."""
        device = self.target.device
        generator = torch.Generator().manual_seed(0)
        text = torch.randint(self.target.config.vocab_size, (1, tokens), generator=generator).to(device)
        with torch.inference_mode():
            models = (self.target, self.draft)
            p_logits, q_logits = (m(text, use_cache=False).logits[0].float() for m in models)
            if temperature == 0:
                return (p_logits.argmax(-1) == q_logits.argmax(-1)).float().mean().item()
            p, q = ((logits / temperature).softmax(-1) for logits in (p_logits, q_logits))
            return torch.minimum(p, q).sum(-1).mean().item()

    def calibrate(self, alpha: float, temperature: float) -> float:
        """Finds the eps of this acceptance by bisection over powers of 2^(1/16). Returns what it reached."""

        def reached(exponent: int) -> float:
            self.set_eps(2 ** (exponent / 16))
            return self.expected_alpha(temperature)

        # Acceptance falls as eps grows. The exponent sought is one less than the first that is too large.
        return reached(bisect.bisect_left(range(-191, 16), True, key=lambda e: reached(e) < alpha) - 192)

    @property
    def cost_ratio(self) -> float:
        """c, where reading weights is the cost: bytes that the draft's forward reads, over the target's."""
        return read_bytes(self.draft) / read_bytes(self.target)


def read_bytes(model: PreTrainedModel) -> int:
    """Of the weights that a forward reads. Its embedding, whose head is another matrix, is looked up only."""
    looked_up = model.get_input_embeddings().weight
    return sum(w.numel() * w.element_size() for w in model.parameters() if w is not looked_up)


def _model(preset: Preset, layers: int, device: torch.device) -> PreTrainedModel:
    config = LlamaConfig(
        vocab_size=preset.vocabulary, hidden_size=preset.hidden, intermediate_size=preset.intermediate,
        num_hidden_layers=layers, num_attention_heads=preset.heads, num_key_value_heads=preset.kv_heads,
        head_dim=preset.head_dim, max_position_embeddings=16384, bos_token_id=None, eos_token_id=None,
        tie_word_embeddings=False,  # tied costs the same, but what was fed would be the likeliest token
        pad_token_id=None,
    )  # fmt: skip
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=preset.dtype).eval()
    with torch.no_grad():  # as initialised, logits are so flat that nearly any two models agree
        model.lm_head.weight.normal_(std=LOGIT_STD / math.sqrt(preset.hidden))
    return model


def make_pair(preset: Preset, device: torch.device) -> TunablePair:
    """The draft is the target's first layers."""
    torch.manual_seed(0)
    target, draft = (_model(preset, layers, device) for layers in (preset.target_layers, preset.draft_layers))
    shared = {name: weight for name, weight in target.state_dict().items() if name in draft.state_dict()}
    draft.load_state_dict(shared)
    return TunablePair(target, draft, list(target.model.layers[preset.draft_layers :]))


def make_pair_of_two(target: Preset, draft: Preset, device: torch.device) -> TunablePair:
    """Two models of different shapes with one vocabulary. n copies of the draft's embedding side by side have its root
    mean square, so the final norm makes n copies of its own result of them, which n copies of its head, over n, turn
    into its logits."""
    copies = target.hidden // draft.hidden
    torch.manual_seed(0)
    large, small = (_model(preset, preset.target_layers, device) for preset in (target, draft))
    with torch.no_grad():
        large.get_input_embeddings().weight.copy_(small.get_input_embeddings().weight.repeat(1, copies))
        large.lm_head.weight.copy_(small.lm_head.weight.repeat(1, copies) / copies)
    return TunablePair(large, small, [*large.model.layers, *small.model.layers])


def named_pair(name: str, device: torch.device) -> TunablePair:
    """One of ``PAIRS``."""
    target, draft = PAIRS[name]
    return make_pair(target, device) if draft is None else make_pair_of_two(target, draft, device)

"""Tiny random models. Weights are drawn wider than usual, so that logits differ clearly and near-ties stay away."""

from __future__ import annotations

import copy
import functools

import torch
from specdec import SpeculativeDecoder
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    LogitsProcessor,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)

VOCABULARY = 101
WINDOW = 8  # of Gemma-3: far shorter than the test sequences
POSITIONS = 256
TYPES = ("llama", "qwen3", "gpt2", "gemma3", "bloom")

COMMON = {
    "vocab_size": VOCABULARY,
    "tie_word_embeddings": False,  # a tied random model only repeats its input
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
DECODER = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": POSITIONS,
    **COMMON,
}


def _new(kind: str, layers: int) -> PreTrainedModel:
    match kind:
        case "llama":
            return LlamaForCausalLM(LlamaConfig(num_hidden_layers=layers, **DECODER))
        case "qwen3":
            return Qwen3ForCausalLM(Qwen3Config(num_hidden_layers=layers, **DECODER))
        case "gpt2":
            config = GPT2Config(n_embd=32, n_layer=layers, n_head=4, n_positions=POSITIONS, **COMMON)
            return GPT2LMHeadModel(config)
        case "gemma3":
            types = (["sliding_attention", "full_attention"] * layers)[:layers]
            config = Gemma3TextConfig(
                num_hidden_layers=layers,
                layer_types=types,
                sliding_window=WINDOW,
                query_pre_attn_scalar=8,
                **DECODER,
            )
            return Gemma3ForCausalLM(config)
        case "bloom":
            return BloomForCausalLM(BloomConfig(hidden_size=32, n_layer=layers, n_head=4, **COMMON))
    raise ValueError(f"kind: got {kind!r}, allowed: {', '.join(TYPES)}")


@functools.cache
@torch.inference_mode(False)  # whoever asks for it first, since others train it
def tiny_model(kind: str = "llama", seed: int = 0, layers: int = 2) -> PreTrainedModel:
    """A tiny random model of this type. It is cached, so it must not be changed in place."""
    torch.manual_seed(seed)
    model = _new(kind, layers).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() == 2:
                weight.normal_(std=1.0 if "emb" in name or "wte" in name else 0.3)
    return model


@functools.cache
@torch.inference_mode(False)  # whoever asks for it first, since others train it
def tunable_pair(eps: float, seed: int = 0, layers: int = 2) -> tuple[PreTrainedModel, PreTrainedModel]:
    """(target, draft): the target has the draft's layers and as many more, whose contributions are scaled by ``eps``.
    At 0 both compute the same function; acceptance falls as ``eps`` grows."""
    draft = tiny_model("llama", seed, layers)
    torch.manual_seed(seed + 1000)
    target = _new("llama", 2 * layers).eval()
    with torch.no_grad():
        for weight in target.parameters():
            if weight.dim() == 2:
                weight.normal_(std=0.3)
        for layer in target.model.layers[layers:]:
            layer.self_attn.o_proj.weight.mul_(eps)
            layer.mlp.down_proj.weight.mul_(eps)
    target.load_state_dict(draft.state_dict(), strict=False)
    return target, draft


@functools.cache
@torch.inference_mode(False)  # whoever asks for it first, since others train it
def toy_model(seed: int) -> PreTrainedModel:
    """A model with a vocabulary of five tokens, so that all short texts can be enumerated."""
    torch.manual_seed(seed)
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=5, initializer_range=0.7, max_position_embeddings=16, **sizes)
    return LlamaForCausalLM(config).eval()


def pruned_draft(model, keep: torch.Tensor):
    """``model`` with logits for the tokens ``keep`` only, as in FR-Spec."""
    draft = copy.deepcopy(model)
    head = torch.nn.Linear(model.lm_head.in_features, len(keep), bias=False)
    head.weight = torch.nn.Parameter(model.lm_head.weight[keep].detach().clone())
    draft.lm_head = head
    return draft.eval()


class GeneratedPenalties(LogitsProcessor):
    """OpenAI's presence and frequency penalties, which transformers lacks."""

    def __init__(self, prompt_length: int, presence: float, frequency: float):
        self.prompt_length, self.presence, self.frequency = prompt_length, presence, frequency

    def __call__(self, input_ids, scores):
        counts = torch.stack([torch.bincount(row, minlength=scores.shape[1]) for row in input_ids])
        counts -= torch.stack([torch.bincount(r[: self.prompt_length], minlength=scores.shape[1]) for r in input_ids])
        return scores - self.presence * (counts > 0) - self.frequency * counts


def prompts(count: int, shortest: int, longest: int, seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(shortest, longest + 1, (count,), generator=generator).tolist()
    return [torch.randint(VOCABULARY, (n,), generator=generator).tolist() for n in lengths]


def generate(target, draft, ids, num_drafts=4, d2t=None, tree=None, **kwargs):
    kwargs.setdefault("eos_token_id", [])
    return SpeculativeDecoder(target, draft, num_drafts, d2t=d2t, tree=tree).generate(ids, **kwargs)


TIE = 1e-4

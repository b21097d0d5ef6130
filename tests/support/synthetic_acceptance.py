"""Models whose next token depends on the last one alone, with an acceptance that is known exactly, and what each accept
rule makes of it.

In every context p and q are the same two distributions with the tokens renamed, so the drafts of all steps and
positions are accepted independently with the same probabilities, as the formulas assume.
"""

from __future__ import annotations

import itertools
from collections import defaultdict

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

# Over six tokens: min(p, q) relative to alpha, and what p and q have beyond it, relative to 1 - alpha.
COMMON = (0.3, 0.2, 0.2, 0.15, 0.1, 0.05)
ONLY_P = (0.7, 0.3, 0.0, 0.0, 0.0, 0.0)
ONLY_Q = (0.0, 0.0, 0.0, 0.6, 0.4, 0.0)


def distributions(alpha: float) -> tuple[list[float], list[float]]:
    """(p, q) with sum min(p, q) = ``alpha``, whose quotients are above, below and equal to 1."""
    p, q = ([alpha * m + (1 - alpha) * x for m, x in zip(COMMON, own, strict=True)] for own in (ONLY_P, ONLY_Q))
    return p, q


def table(distribution: list[float]) -> torch.Tensor:
    """[V, V] logits: after token x, the distribution with its tokens shifted by x."""
    logits = torch.tensor(distribution, dtype=torch.float64).log()
    return torch.stack([logits.roll(x) for x in range(len(distribution))]).float()


def markov_model(logits: torch.Tensor) -> PreTrainedModel:
    """A Llama with these logits [V, V] after each token. Its layer adds nothing to the embedding, which is one-hot, and
    the head reads the table."""
    V = len(logits)
    config = LlamaConfig(
        vocab_size=V, hidden_size=V, intermediate_size=V, num_hidden_layers=1, num_attention_heads=1, head_dim=V,
        max_position_embeddings=4096, rms_norm_eps=0.0, tie_word_embeddings=False, bos_token_id=None,
        eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        model.model.embed_tokens.weight.copy_(torch.eye(V))
        model.lm_head.weight.copy_(logits.T / V**0.5)  # the final norm scales a one-hot row by sqrt(V)
    return model


# ---- What the rules make of p and q


def coupled_alpha(p: list[float], q: list[float]) -> float:
    """The probability that p's and q's races, with the same noise, have the same winner: the sum over v of
    1 / sum_u max(p_u / p_v, q_u / q_v) (Daliri et al., arXiv 2408.07978, section 2)."""
    winners = [v for v in range(len(p)) if p[v] > 0 and q[v] > 0]
    return sum(1 / sum(max(p[u] / p[v], q[u] / q[v]) for u in range(len(p))) for v in winners)


def block_tau(p: list[float], q: list[float], k: int) -> float:
    """The tokens that a step of rule ``block`` emits. Of the first i drafts at least all are accepted with probability
    w_i = min(1, w_{i-1} p(x_i) / q(x_i)) (Sun et al., arXiv 2403.10444, Algorithm 2 and its analysis), which is
    averaged here over all drafts."""
    weights, tau = {1.0: 1.0}, 1.0  # probability of each w_i
    for _ in range(k):
        following: defaultdict[float, float] = defaultdict(float)
        for w, chance in weights.items():
            for p_x, q_x in zip(p, q, strict=True):
                if q_x > 0:
                    following[round(min(1.0, w * p_x / q_x), 12)] += chance * q_x
        weights = following
        tau += sum(w * chance for w, chance in weights.items())
    return tau


def sibling_acceptance(p: list[float], q: list[float], width: int) -> list[float]:
    """The probability that the first, second, ... of ``width`` children is accepted that were drawn from q without
    replacement and are tested one after the other, each against what p has left (SpecInfer, Miao et al., arXiv
    2305.09781; without replacement as in Sequoia, arXiv 2402.12374): all draws are enumerated."""
    found = [0.0] * width
    for drawn in itertools.permutations([v for v in range(len(q)) if q[v] > 0], width):
        left_p, left_q, reached = list(p), list(q), 1.0
        drawing = 1.0
        for v in drawn:
            drawing *= q[v] / (1 - sum(q[u] for u in drawn[: drawn.index(v)]))
        for i, v in enumerate(drawn):
            accepted = min(1.0, left_p[v] / left_q[v])
            found[i] += drawing * reached * accepted
            reached *= 1 - accepted
            if reached <= 1e-15:
                break
            left_p = _normalised([max(a - b, 0.0) for a, b in zip(left_p, left_q, strict=True)])
            left_q = _normalised([0.0 if u == v else b for u, b in enumerate(left_q)])
    return found


def _normalised(weights: list[float]) -> list[float]:
    total = sum(weights)
    return [w / total for w in weights] if total > 0 else weights

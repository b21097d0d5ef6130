"""FlashInfer's way to verify drafts: softmax, filters, ``chain_speculative_sampling``, each a launch or more.

It compiles its kernels at their first call; ``python bench/flashinfer_peer.py`` does that and nothing else.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable

import torch


def distributions(
    temperature: float, filters: dict[str, float] | None = None
) -> Callable[[torch.Tensor], torch.Tensor]:
    """Its own softmax, which divides by the temperature, then its top-k and top-p: logits [B, N, V] to float32 rows.

    Raises:
        ImportError: the module is not installed.
        ValueError: a filter that it has not on probabilities.
    """
    module = importlib.import_module("flashinfer.sampling")
    if unknown := set(filters or {}) - {"top_k", "top_p"}:
        raise ValueError(f"filters: got {', '.join(sorted(unknown))}, allowed: top_k, top_p")

    def rows_of(logits: torch.Tensor) -> torch.Tensor:
        rows = module.softmax(logits.reshape(-1, logits.shape[-1]), temperature=temperature)
        if filters and "top_k" in filters:
            rows = module.top_k_renorm_probs(rows, int(filters["top_k"]))
        if filters and "top_p" in filters:
            rows = module.top_p_renorm_probs(rows, float(filters["top_p"]))
        return rows.view(logits.shape)

    return rows_of


def chain() -> Callable:
    """step(q, tokens int32, p, noise [1] int64): its kernel, with the noise's offset in a tensor, so that it asks the
    host for nothing and a CUDA graph can hold it."""
    sample = importlib.import_module("flashinfer.sampling").chain_speculative_sampling
    seeded = {"seed", "offset"} <= inspect.signature(sample).parameters.keys()

    def step(q, tokens, p, noise):
        return sample(q, tokens, p, **({"seed": noise, "offset": noise} if seeded else {}))

    return step


def from_logits(temperature: float, filters: dict[str, float] | None = None) -> Callable:
    """Both softmaxes inside: step(target, tokens int32, draft, noise)."""
    distribution, sample = distributions(temperature, filters), chain()
    return lambda target, tokens, draft, noise: sample(distribution(draft), tokens, distribution(target), noise)


def with_q(temperature: float, filters: dict[str, float] | None = None) -> Callable:
    """The draft's probabilities were kept: step(target, tokens int32, q, noise)."""
    distribution, sample = distributions(temperature, filters), chain()
    return lambda target, tokens, q, noise: sample(q, tokens, distribution(target), noise)


def with_p_q() -> Callable:
    """The kernel alone: step(p, tokens int32, q, noise)."""
    sample = chain()
    return lambda p, tokens, q, noise: sample(q, tokens, p, noise)


if __name__ == "__main__":
    gpu = torch.device("cuda")
    tokens, noise = torch.zeros(1, 1, dtype=torch.int32, device=gpu), torch.zeros(1, dtype=torch.int64, device=gpu)
    logits = torch.randn(1, 2, 1024, device=gpu)
    print(from_logits(0.8, {"top_k": 50, "top_p": 0.95})(logits, tokens, logits[:, :1], noise))
    torch.cuda.synchronize()

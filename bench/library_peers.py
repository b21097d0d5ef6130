"""Ways to verify drafts of libraries that need not be installed: FlashInfer and vLLM.

FlashInfer compiles its kernels at their first call; ``python bench/library_peers.py`` does that and nothing else.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from types import SimpleNamespace

import torch
from peers import probabilities

_VLLM_KNOWN = (
    *("draft_token_ids", "num_draft_tokens", "max_spec_len", "cu_num_draft_tokens"),
    *("draft_probs", "target_probs", "bonus_token_ids", "sampling_metadata"),
)


def vllm_step(temperature: float) -> Callable:
    """step(target, tokens, q [B, K, V] float32): ``vllm.v1.sample.rejection_sampler.rejection_sample`` with the
    target's softmax and the race for the bonus token before it, as vLLM's sampler draws them. The draft's probabilities
    were kept from drafting.

    Raises:
        ImportError: vLLM is not installed.
        RuntimeError: its function has other parameters than are known here.
    """
    sample = importlib.import_module("vllm.v1.sample.rejection_sampler").rejection_sample
    parameters = inspect.signature(sample).parameters
    required = {name for name, p in parameters.items() if p.default is inspect.Parameter.empty}
    if unknown := sorted(required - set(_VLLM_KNOWN)) or sorted(set(_VLLM_KNOWN) - parameters.keys()):
        raise RuntimeError(f"rejection_sample has other parameters than are known here: {', '.join(unknown)}")

    def step(target, tokens, q):
        (batch, num_drafts), vocabulary = tokens.shape, target.shape[-1]
        p_bonus = probabilities(target[:, -1], temperature)
        bonus = (p_bonus / torch.empty_like(p_bonus).exponential_()).argmax(-1, keepdim=True)
        return sample(
            draft_token_ids=tokens.int().flatten(),
            num_draft_tokens=[num_drafts] * batch,
            max_spec_len=num_drafts,
            cu_num_draft_tokens=torch.arange(1, batch + 1, dtype=torch.int32, device=target.device) * num_drafts,
            draft_probs=q.view(-1, vocabulary),
            target_probs=probabilities(target[:, :-1], temperature).view(-1, vocabulary),
            bonus_token_ids=bonus.int(),
            sampling_metadata=SimpleNamespace(  # the sampler reads no more of it
                all_greedy=False, all_random=True, generators={},
                temperature=torch.full((batch,), temperature, device=target.device),
            ),
        )  # fmt: skip

    return step


def flashinfer_step(temperature: float, filters: dict[str, float] | None = None, given: str = "") -> Callable:
    """step(target, tokens int32, draft, noise [1] int64): softmax, filters, ``chain_speculative_sampling``. The noise's
    offset is in a tensor, so that it asks the host for nothing and a CUDA graph can hold it.

    Args:
        given: "q": ``draft`` are probabilities, kept from drafting; "pq": ``target`` are probabilities, too.

    Raises:
        ImportError: FlashInfer is not installed.
        ValueError: FlashInfer has no such filter on probabilities.
    """
    module = importlib.import_module("flashinfer.sampling")
    if unknown := set(filters or {}) - {"top_k", "top_p"}:
        raise ValueError(f"filters: got {', '.join(sorted(unknown))}, allowed: top_k, top_p")
    sample = module.chain_speculative_sampling
    seeded = {"seed", "offset"} <= inspect.signature(sample).parameters.keys()

    def distribution(logits: torch.Tensor) -> torch.Tensor:
        rows = module.softmax(logits.reshape(-1, logits.shape[-1]), temperature=temperature)
        if filters and "top_k" in filters:
            rows = module.top_k_renorm_probs(rows, int(filters["top_k"]))
        if filters and "top_p" in filters:
            rows = module.top_p_renorm_probs(rows, float(filters["top_p"]))
        return rows.view(logits.shape)

    def step(target, tokens, draft, noise):
        q = draft if "q" in given else distribution(draft)
        p = target if "p" in given else distribution(target)
        return sample(q, tokens, p, **({"seed": noise, "offset": noise} if seeded else {}))

    return step


if __name__ == "__main__":
    gpu = torch.device("cuda")
    tokens, noise = torch.zeros(1, 1, dtype=torch.int32, device=gpu), torch.zeros(1, dtype=torch.int64, device=gpu)
    logits = torch.randn(1, 2, 1024, device=gpu)
    print(flashinfer_step(0.8, {"top_k": 50, "top_p": 0.95})(logits, tokens, logits[:, :1], noise))
    torch.cuda.synchronize()

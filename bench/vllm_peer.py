"""vLLM's rejection sampler, ``vllm.v1.sample.rejection_sampler.rejection_sample``, if vLLM is installed."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from types import SimpleNamespace

import torch
from peers import probabilities

KNOWN = ("draft_token_ids", "num_draft_tokens", "max_spec_len", "cu_num_draft_tokens", "draft_probs", "target_probs",
         "bonus_token_ids", "sampling_metadata")  # fmt: skip


def vllm_step(temperature: float) -> Callable:
    """step(target, tokens, q [B, K, V] float32): the target's softmax, the bonus token's race as its sampler draws it,
    and the rejection sampler, which gets the probabilities that were kept from drafting.

    Raises:
        ImportError: vLLM is not installed.
        RuntimeError: its function asks for what this benchmark does not know.
    """
    sample = importlib.import_module("vllm.v1.sample.rejection_sampler").rejection_sample
    parameters = inspect.signature(sample).parameters
    required = {name for name, p in parameters.items() if p.default is inspect.Parameter.empty}
    if unknown := sorted(required - set(KNOWN)) or sorted(set(KNOWN) - parameters.keys()):
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
            # All that it reads of its metadata.
            sampling_metadata=SimpleNamespace(
                all_greedy=False,
                all_random=True,
                temperature=torch.full((batch,), temperature, device=target.device),
                generators={},
            ),
        )

    return step

"""A server's service over models so small that a request takes milliseconds, with the embedded pair's tokenizer."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from specdec import Request, Scheduler, SpeculativeDecoder
from specdec.serving.scheduler import Usage
from specdec.serving.server.lanes import Lanes
from specdec.serving.server.server_settings import ServerSettings
from specdec.serving.server.service import Service
from transformers import LlamaConfig, LlamaForCausalLM

NAME = "tiny"
MAX_LENGTH = 64
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"


def tiny_service(
    tokenizer: Any, rows: int = 4, max_waiting: int = 256, prefill_chunk: int = 256, **settings: Any
) -> Service:
    """Args:
    tokenizer: the embedded pair's.
    settings: those of ``ServerSettings``.
    """
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.chat_template = TEMPLATE
    target, draft = _pair(len(tokenizer))
    drafters = {"model": draft, "none": None}

    def make(drafter: str, rule: str) -> Scheduler:
        decoder = SpeculativeDecoder(target, drafters[drafter], 3)
        own = {"rows": rows, "max_waiting": max_waiting, "prefill_chunk": prefill_chunk}
        return Scheduler(decoder, max_length=MAX_LENGTH, rule=rule, **own)

    lanes = Lanes(make, list(drafters), ["coupled", "token"])
    return Service(NAME, tokenizer, lanes, ServerSettings(port=0, **settings))


def load(service: Service) -> list[Usage]:
    return [lane.engine.usage for lane in service.lanes.running]


def is_idle(service: Service) -> bool:
    """Whether no row and no token of a cache is taken, and nothing waits."""
    return all(
        (usage.live, usage.prefilling, usage.waiting, usage.cache_tokens_used) == (0, 0, 0, 0)
        for usage in load(service)
    )


def _pair(vocabulary: int) -> tuple[LlamaForCausalLM, LlamaForCausalLM]:
    """A random model of one layer, and a draft whose output differs from it a little."""
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = LlamaConfig(
        vocab_size=vocabulary, max_position_embeddings=MAX_LENGTH + 8, initializer_range=0.5, eos_token_id=0, **sizes
    )
    torch.manual_seed(0)
    target = LlamaForCausalLM(config).eval()
    draft = copy.deepcopy(target)
    with torch.no_grad():
        draft.lm_head.weight += 0.1 * torch.randn_like(draft.lm_head.weight)
    return target, draft


FAULT = 10**6  # the seed of texts that fail


class FaultyRequest(Request):
    """In the place of ``Request``: the logits of texts with the seed FAULT are NaN after their sixth token."""

    def __init__(self, prompt: list[int], *others: Any, **more: Any):
        if FAULT in others:
            more["logits_processor"] = [_spoil_after(len(prompt) + 6)]
        super().__init__(prompt, *others, **more)


def _spoil_after(length: int) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    def spoil(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores * float("nan") if input_ids.shape[1] > length else scores

    return spoil

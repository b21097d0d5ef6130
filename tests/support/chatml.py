"""A tokenizer whose chat template is like those of Qwen's models, and a server whose texts are what a test says."""

from __future__ import annotations

import asyncio
import copy
import socket
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from specdec import Request, Scheduler, SpeculativeDecoder
from specdec.drafters.predicted import PredictedDrafter
from specdec.serving.server import plan
from specdec.serving.server.lanes import Lanes
from specdec.serving.server.life_cycle import Server
from specdec.serving.server.server_settings import url_of
from specdec.serving.server.service import Service
from transformers import LlamaConfig, LlamaForCausalLM

NAME = "chatml"
MAX_LENGTH = 1024
TEMPLATE = """{%- if tools %}<|im_start|>system
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}Call them with <tool_call></tool_call>.<|im_end|>
{% endif %}{%- for m in messages %}<|im_start|>{{ m.role }}
{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>
{% endif %}{{ m.content }}
{%- for call in m.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}<|im_end|>
{% endfor %}{%- if add_generation_prompt %}<|im_start|>assistant
{% if think is defined and not think %}<think>

</think>

{% elif think is defined %}<think>
{% endif %}{% endif %}"""


def chatml(tokenizer: Any, template: str = TEMPLATE) -> Any:
    """A copy of the embedded pair's tokenizer with this template, and its two special tokens."""
    made = copy.deepcopy(tokenizer)
    made.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    made.chat_template = template
    return made


def scripted_service(tokenizer: Any, **settings: Any) -> Service:
    """Decodes by a random model of one layer; requests may have predictions, of up to 4 tokens a step."""
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    limits = {"max_position_embeddings": MAX_LENGTH + 8, "eos_token_id": 0}
    torch.manual_seed(0)
    target = LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **limits, **sizes)).eval()

    def make(drafter: str, rule: str) -> Scheduler:
        decoder = SpeculativeDecoder(target, PredictedDrafter(None), 4)
        return Scheduler(decoder, rows=4, max_length=MAX_LENGTH, rule=rule)

    return Service(NAME, tokenizer, Lanes(make, ["none"], ["coupled"]), **settings)


def say(monkeypatch: pytest.MonkeyPatch, tokenizer: Any, texts: Mapping[int, str]) -> None:
    """Lets the text of a request with one of these seeds be that text, and end after it."""
    scripts = {seed: [*tokenizer(text, add_special_tokens=False).input_ids, 0] for seed, text in texts.items()}

    class Said(Request):
        def __init__(self, prompt: list[int], new: int, params: Any, seed: int, *others: Any, **more: Any):
            if (script := scripts.get(seed)) is not None:
                more["logits_processor"] = [_forced(len(prompt), script)]
            super().__init__(prompt, new, params, seed, *others, **more)

    monkeypatch.setattr(plan, "Request", Said)


def _forced(begin: int, script: list[int]) -> Any:
    def force(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        place = min(input_ids.shape[1] - begin, len(script) - 1)
        forced = torch.full_like(scores, -torch.inf)
        forced[:, script[place]] = 0.0
        return forced

    return force


@contextmanager
def serving(service: Service) -> Iterator[str]:
    """Serves it on a port of this machine, by a thread; the value is the URL."""
    with socket.create_server(("127.0.0.1", 0)) as bound:
        server = Server(service, bound)
        thread = threading.Thread(target=lambda: asyncio.run(server.run_until_signal()))
        thread.start()
        try:
            yield url_of(bound)
        finally:
            server.stop()
            thread.join()


@contextmanager
def saying(monkeypatch: pytest.MonkeyPatch, tokenizer: Any, texts: Mapping[int, str]) -> Iterator[tuple[str, Service]]:
    """Yields the address and the service of a server that says these texts, by seed."""
    tokenizer = chatml(tokenizer)
    say(monkeypatch, tokenizer, texts)
    service = scripted_service(tokenizer)
    with serving(service) as url:
        yield url, service

"""64 clients at one time, over sockets, with every kind of setting: each text is that of the engine alone."""

from __future__ import annotations

import asyncio
import copy
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import openai
import pytest
import torch
from specdec import FinishReason, Request, Scheduler, SpeculativeDecoder
from specdec.detokenize import Detokenizer, continuation
from specdec.serving.server.lanes import Lanes
from specdec.serving.server.life_cycle import Server
from specdec.serving.server.server_settings import ServerSettings, bind, url_of
from specdec.serving.server.service import Service
from specdec.serving.server.stop_cut import StopCut, TextStop
from transformers import LlamaConfig, LlamaForCausalLM

from specdec_kernels import SamplingParams

CLIENTS = 64
LANES = [("model", "coupled"), ("model", "token"), ("none", "coupled")]
# What clients send -> what a ``Request`` has of it. Each client takes one of them, or two.
SETTINGS: list[tuple[dict, dict]] = [
    ({"temperature": 0}, {"temperature": 0.0}),
    ({"temperature": 1.3}, {"temperature": 1.3}),
    ({"top_k": 5}, {"top_k": 5}),
    ({"top_p": 0.7}, {"top_p": 0.7}),
    ({"min_p": 0.05}, {"min_p": 0.05}),
    ({"repetition_penalty": 1.5}, {"repetition_penalty": 1.5}),
    ({"presence_penalty": 1.5}, {"presence_penalty": 1.5}),
    ({"frequency_penalty": -0.5}, {"frequency_penalty": -0.5}),
    ({"logit_bias": {"201": 4, "202": -50}}, {"logit_bias": {201: 4, 202: -50}}),
    ({"num_drafts": 1}, {"num_drafts": 1}),
    ({"num_drafts": 0}, {"num_drafts": 0}),
    ({"stop": ["e", "0"]}, {"stop": ["e", "0"]}),
    ({"stop": ["a", "r", "  "]}, {"stop": ["a", "r", "  "]}),
    ({"logprobs": 2}, {"top_log_probs": 2}),
    ({"n": 2}, {"n": 2}),
    ({"min_tokens": 6}, {"min_new_tokens": 6}),
]
FILTERS = {"temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"}
OWN = {"top_k", "min_p", "repetition_penalty", "min_tokens", "num_drafts", "drafter", "rule"}  # not OpenAI's


class Asked(NamedTuple):
    """One client's request, and the same for the engine."""

    lane: tuple[str, str]
    body: dict[str, Any]
    fields: dict[str, Any]  # of a ``Request``, and ``n``; ``stop`` as strings


class Told(NamedTuple):
    """A choice of a response."""

    text: str
    finish_reason: str
    log_probs: list[float] | None


def crowd(longest: int, count: int = CLIENTS) -> list[Asked]:
    """Requests of mixed lengths and settings, half of them streamed."""
    draw, found = random.Random(1), []
    for i in range(count):
        prompt, new = [draw.randrange(64, 300) for _ in range(draw.randint(1, 20))], draw.randint(1, longest)
        lane, seed = LANES[i % len(LANES)], draw.choice([5, 2**40 + i, -i])
        body = {"prompt": prompt, "max_tokens": new, "seed": seed, "drafter": lane[0], "rule": lane[1]}
        fields = {"prompt": prompt, "max_new_tokens": new, "seed": seed}
        for sent, meant in (SETTINGS[i % len(SETTINGS)], draw.choice(SETTINGS)):
            if not (sent.keys() & body.keys() or {"num_drafts"} & sent.keys() and lane[0] == "none"):
                body, fields = body | sent, fields | meant
        body["min_tokens"] = min(body.get("min_tokens", 0), new)
        fields["min_new_tokens"] = body["min_tokens"]
        found.append(Asked(lane, body | {"stream": i // 2 % 2 == 1}, fields))
    return found


def alone(tokenizer: Any, make: Callable[[str, str], Scheduler], asked: list[Asked]) -> list[list[Told]]:
    """What schedulers like the server's give, which get only the requests of one lane, one after the other."""
    schedulers = {lane: make(*lane) for lane in LANES}
    return [
        [_alone(tokenizer, schedulers[each.lane], each.fields, i) for i in range(each.fields.get("n", 1))]
        for each in asked
    ]


def _alone(tokenizer: Any, scheduler: Scheduler, given: dict[str, Any], copy: int) -> Told:
    fields = {name: value for name, value in given.items() if name not in FILTERS | {"n", "stop"}}
    params = SamplingParams(**{"temperature": 1.0} | {name: given[name] for name in FILTERS & given.keys()})
    strings, prompt = given.get("stop", []), given["prompt"]
    stop = TextStop(Detokenizer(tokenizer), prompt, strings) if strings else None
    fields |= {"params": params, "seed": given["seed"] + copy, "stop": stop}
    (outcome,) = scheduler.run([Request(**fields)])
    cut = StopCut(strings)
    text = cut.push(continuation(tokenizer, prompt, outcome.tokens))
    text += cut.finish()
    scores = None if outcome.top_log_probs is None else [max(each.log_prob, -9999.0) for each in outcome.top_log_probs]
    return Told(text, "length" if outcome.finish_reason == FinishReason.LENGTH else "stop", scores)


async def ask(client: openai.AsyncOpenAI, asked: Asked) -> list[Told]:
    own = {name: value for name, value in asked.body.items() if name in OWN}
    fields = {name: value for name, value in asked.body.items() if name not in OWN}
    response = await client.completions.create(model="tiny", extra_body=own, **fields)
    chunks = [chunk async for chunk in response] if fields["stream"] else [response]
    found = []
    for index in range(fields.get("n", 1)):
        parts = [choice for chunk in chunks for choice in chunk.choices if choice.index == index]
        scores = [score for part in parts if part.logprobs for score in part.logprobs.token_logprobs]
        text = "".join(part.text for part in parts)
        found.append(Told(text, parts[-1].finish_reason, scores if "logprobs" in fields else None))
    return found


@contextmanager
def serving(service: Service) -> Iterator[str]:
    """Yields the URL of a server that runs in a thread of its own."""
    with bind(service.settings) as bound:
        server, started = Server(service, bound, lambda: started.set()), threading.Event()
        thread = threading.Thread(target=lambda: asyncio.run(server.run_until_signal()))
        thread.start()
        started.wait()
        try:
            yield url_of(bound)
        finally:
            server.stop()
            thread.join()


def check(tokenizer: Any, make: Callable[[str, str], Scheduler], longest: int) -> None:
    asked = crowd(longest)
    drafters, rules = ([*dict.fromkeys(names)] for names in zip(*LANES, strict=True))
    service = Service("tiny", tokenizer, Lanes(make, drafters, rules), ServerSettings(port=0))

    async def main() -> list[list[Told]]:
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=300) as client:
            return await asyncio.gather(*(ask(client, each) for each in asked))

    with serving(service) as url:
        told = asyncio.run(main())
    for each, choices, expected in zip(asked, told, alone(tokenizer, make, asked), strict=True):
        for found, right in zip(choices, expected, strict=True):
            assert found[:2] == right[:2], each
            if right.log_probs is None:
                assert found.log_probs is None, each
            else:  # of a text that a stop string cuts, those after the cut are not told
                told_of = len(found.log_probs or [])
                assert told_of == len(right.log_probs) or 0 < told_of and each.fields.get("stop") or not right.text, (
                    each
                )
                assert found.log_probs == pytest.approx(right.log_probs[:told_of], abs=1e-3), each
    assert len({choice.text for choices in told for choice in choices}) > CLIENTS // 2
    assert {choice.finish_reason for choices in told for choice in choices} == {"stop", "length"}


def test_texts_of_a_crowd_are_those_of_the_engine_alone(pair):
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=len(pair[2]), max_position_embeddings=64, initializer_range=0.5, **sizes)
    target = LlamaForCausalLM(config).eval()
    draft = copy.deepcopy(target)
    with torch.no_grad():
        draft.lm_head.weight += 0.1 * torch.randn_like(draft.lm_head.weight)

    def make(drafter: str, rule: str) -> Scheduler:
        decoder = SpeculativeDecoder(target, draft if drafter == "model" else None, 3)
        return Scheduler(decoder, rows=4, max_length=48, rule=rule)

    check(pair[2], make, longest=20)


@pytest.mark.nightly
def test_texts_of_a_crowd_on_the_embedded_pair(pair):
    target, draft, tokenizer = pair

    def make(drafter: str, rule: str) -> Scheduler:
        return Scheduler(
            SpeculativeDecoder(target, draft if drafter == "model" else None, 4), rows=8, max_length=96, rule=rule
        )

    check(tokenizer, make, longest=48)

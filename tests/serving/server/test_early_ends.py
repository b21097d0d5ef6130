"""How requests end early: refused, failed, or left by their client; and what then happens to the others."""

from __future__ import annotations

import asyncio
import json
import socket
import time

import httpx
import pytest
import torch
from specdec import Request
from specdec.serving.server import answer as answers
from specdec.serving.server import plan
from specdec.serving.server.request_bodies import CompletionRequest

LONG = {"model": "embedded", "prompt": "x = ", "max_tokens": 120, "logit_bias": {"0": -100}, "seed": 1}
SAID = [{"role": "user", "content": "x"}]
LONG_SAID = [{"role": "user", "content": "x" * 500}]
FAULT = 10**6  # the seed of texts that fail


def post(served, path: str = "completions", **body) -> httpx.Response:
    return httpx.post(f"{served.url}/v1/{path}", json={"model": "embedded", **body}, timeout=60)


def idle(served) -> bool:
    usage = served.usage()
    return (usage.live, usage.prefilling, usage.waiting, usage.cache_tokens_used) == (0, 0, 0, 0)


@pytest.mark.parametrize(
    ("path", "body", "status", "param", "code"),
    [
        ("completions", {"model": "gpt-4", "prompt": "x"}, 404, "model", "model_not_found"),
        ("completions", {}, 400, "prompt", "missing_required_parameter"),
        ("completions", {"prompt": ""}, 400, "prompt", "invalid_value"),
        ("completions", {"prompt": ["x", ""]}, 400, "prompt", "invalid_value"),
        ("completions", {"prompt": []}, 400, "prompt", "invalid_value"),
        ("completions", {"prompt": ["x"] * 65, "n": 2}, 400, "prompt", "invalid_value"),
        ("completions", {"prompt": [4096]}, 400, "prompt", "invalid_value"),
        ("completions", {"prompt": "x", "max_tokens": 0}, 400, "max_tokens", "invalid_value"),
        ("completions", {"prompt": "x", "max_tokens": 128}, 400, "prompt", "context_length_exceeded"),
        ("completions", {"prompt": [9] * 128}, 400, "prompt", "context_length_exceeded"),
        ("completions", {"prompt": "x", "best_of": 2}, 400, "best_of", "invalid_value"),
        ("completions", {"prompt": "x", "stream_options": {}}, 400, "stream_options", "invalid_value"),
        ("completions", {"prompt": "x", "echo": True, "logprobs": 1, "stream": True}, 400, "echo", "invalid_value"),
        ("completions", {"prompt": "x", "prompt_logprobs": 1, "stream": True}, 400, "prompt_logprobs", "invalid_value"),
        ("completions", {"prompt": "x", "logit_bias": {"4096": 1}}, 400, "logit_bias", "invalid_value"),
        ("completions", {"prompt": "x", "temperature": 1e-5}, 400, "temperature", "invalid_value"),
        ("completions", {"prompt": "x", "min_tokens": 17}, 400, "min_tokens", "invalid_value"),
        ("completions", {"prompt": "x", "stop_token_ids": [*range(9)]}, 400, "stop_token_ids", "invalid_value"),
        ("completions", {"prompt": "x", "num_drafts": 5}, 400, "num_drafts", "invalid_value"),
        ("completions", {"prompt": "x", "drafter": "/etc/passwd"}, 400, "drafter", "invalid_value"),
        ("completions", {"prompt": "x", "rule": "typical"}, 400, "rule", "invalid_value"),
        ("chat", {"messages": "x"}, 400, "messages", "invalid_value"),
        ("chat", {"messages": LONG_SAID}, 400, "messages", "context_length_exceeded"),
        ("chat", {"messages": SAID, "top_logprobs": 1}, 400, "top_logprobs", "invalid_value"),
        ("chat", {"messages": SAID, "max_tokens": 1, "max_completion_tokens": 1}, 400, "max_tokens", "invalid_value"),
    ],
)  # fmt: skip
def test_refusals(served, path, body, status, param, code):
    answer = post(served, {"chat": "chat/completions"}.get(path, path), **body)
    told = answer.json()["error"]
    assert (answer.status_code, told["param"], told["code"]) == (status, param, code), told
    assert told["type"] in ("invalid_request_error", "not_found_error") and told["message"]


def test_lengths_are_told(served):
    told = post(served, prompt=[9] * 100, max_tokens=29).json()["error"]["message"]
    assert "128 tokens" in told and "129 tokens (100 in the prompt; 29 for the completion)" in told
    assert post(served, prompt=[9] * 127, max_tokens=1).status_code == 200
    whole = post(served, prompt=[9] * 120, logit_bias={"0": -100}).json()
    assert whole["usage"]["completion_tokens"] == 8  # 16 do not fit
    assert post(served, prompt="x", logit_bias={"0": -100}).json()["usage"]["completion_tokens"] == 16


@pytest.fixture
def faults(monkeypatch):
    """Texts with the seed FAULT have logits of NaN after six tokens."""

    def spoil(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores * float("nan") if input_ids.shape[1] > 8 else scores

    def request(prompt, new, params, seed, *others, **more) -> Request:
        processors = {"logits_processor": [spoil]} if seed == FAULT else {}
        return Request(prompt, new, params, seed, *others, **more, **processors)

    monkeypatch.setattr(plan, "Request", request)


@pytest.mark.filterwarnings("ignore:a sequence drafts no more")
def test_a_text_that_fails_fails_alone(served, faults):
    """With its siblings, whose client gets nothing either way; other requests go on."""

    async def main() -> list[httpx.Response]:
        async with httpx.AsyncClient(base_url=served.url, timeout=60) as client:
            bodies = [
                {**LONG, "seed": FAULT},
                {**LONG, "seed": FAULT - 1, "n": 3},
                {**LONG, "seed": FAULT, "stream": True},
                {**LONG, "seed": FAULT - 1, "n": 2, "stream": True},
                {**LONG, "max_tokens": 20},
            ]
            return await asyncio.gather(*(client.post("/v1/completions", json=body) for body in bodies))

    *failed, fine = asyncio.run(main())
    error = {"message": "the text failed: the model's logits define no distribution", "type": "server_error"}
    error |= {"param": None, "code": "decoding_failed"}
    for answer in failed[:2]:
        assert answer.status_code == 500 and answer.json() == {"error": error}
    for answer in failed[2:]:
        *chunks, last, done = (event.removeprefix("data: ") for event in answer.text.removesuffix("\n\n").split("\n\n"))
        assert answer.status_code == 200 and chunks and json.loads(last) == {"error": error} and done == "[DONE]"
        assert all(json.loads(chunk)["choices"][0]["finish_reason"] is None for chunk in chunks)
    assert fine.json()["usage"]["completion_tokens"] == 20
    assert idle(served)  # the siblings were cancelled before the answers


def test_an_error_that_nobody_expected_ends_a_stream(served, monkeypatch):
    """Its client is told in the stream, which is no whole one: there is no [DONE]. Its connection serves on."""

    def fail(*arguments: object) -> dict:
        raise RuntimeError("a secret")

    with httpx.Client(base_url=served.url, timeout=60) as client:
        monkeypatch.setattr(answers, "stats", fail)  # which the last chunk has
        answer = client.post("/v1/completions", json={**LONG, "max_tokens": 20, "stream": True})
        *chunks, last = answer.text.removesuffix("\n\n").split("\n\n")
        monkeypatch.undo()
        again = client.post("/v1/completions", json={**LONG, "max_tokens": 20, "stream": True})
    error = json.loads(last.removeprefix("data: "))["error"]
    assert chunks and (error["type"], error["code"]) == ("server_error", "failed")
    assert answer.headers["x-request-id"] in error["message"] and "secret" not in answer.text
    assert answer.headers.get("connection") is None and again.text.endswith("data: [DONE]\n\n")
    assert idle(served)


@pytest.mark.parametrize("fields", [{}, {"stream": True}, {"n": 2}, {"n": 2, "stream": True}, {"n": 10}])
def test_a_client_that_leaves_cancels_its_request(served, fields):
    """Also while it waits for a row, and without a byte of an answer. The text would need at least 25 more steps."""
    body = json.dumps({**LONG, **fields}).encode()
    fields_of_head = f"Host: 127.0.0.1\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    head = f"POST /v1/completions HTTP/1.1\r\n{fields_of_head}"
    address = (httpx.URL(served.url).host, httpx.URL(served.url).port)
    with socket.create_connection(address) as client:
        client.sendall(head.encode() + body)
        if fields.get("stream"):
            client.recv(1)
        while served.usage().live == 0:
            time.sleep(0.001)
    before = served.usage().steps
    deadline = time.monotonic() + 20
    while not idle(served) and time.monotonic() < deadline:
        time.sleep(0.001)
    assert idle(served) and served.usage().steps - before < 10


def test_a_request_takes_all_its_places_or_none(served):
    """Of 128 texts, 64 may wait and a row takes one after the other: too many are refused, and nothing is left."""
    answer, before = post(served, prompt=["x = "] * 128, max_tokens=100), served.usage().steps
    assert answer.status_code == 429 and answer.headers["Retry-After"] == "1"
    assert answer.json()["error"]["type"] == "rate_limit_error"
    deadline = time.monotonic() + 20
    while not idle(served) and time.monotonic() < deadline:
        time.sleep(0.001)
    assert idle(served) and served.usage().steps - before < 10
    assert post(served, prompt="x = ", max_tokens=1).status_code == 200


def test_the_owner_of_a_request_is_that_of_its_key(served):
    body = CompletionRequest(model="embedded", prompt="x", n=2)
    made = asyncio.run(plan.plan_completion(served.service, body, "key-1"))
    assert [request.owner for request in made.requests] == ["key-1", "key-1"]

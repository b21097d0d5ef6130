"""POST /predict, as LLMSpeculativeSampling answers it."""

from __future__ import annotations

import asyncio
import dataclasses

import httpx
import pytest
from specdec import Request
from specdec.serving.server import plan
from specdec.serving.server.app import create_app
from specdec.serving.server.server_settings import ServerSettings

from specdec_kernels import SamplingParams

PROMPT = "def read(self, size=-1):\n"


def test_it_answers_with_prompt_and_text(pair, within, monkeypatch):
    from specdec import SpeculativeDecoder

    monkeypatch.setattr("secrets.randbelow", lambda most: 7)
    answer = within(lambda client: client.post("/predict", json={"prompt": PROMPT}))
    assert answer.status_code == 200
    target, draft, tokenizer = pair
    ids = tokenizer(PROMPT).input_ids
    params = SamplingParams(1.0, top_k=10, top_p=0.9)
    alone = SpeculativeDecoder(target, draft, 4).generate([ids], None, 40, params, 7, rule="coupled")
    assert answer.json() == tokenizer.decode([*ids, *alone.tokens[0]], skip_special_tokens=True)
    assert answer.json().startswith(PROMPT)


def test_its_line_in_the_log_is_that_of_a_completion(within, caplog):
    caplog.set_level("INFO", "specdec")
    body = {"model": "embedded", "prompt": PROMPT, "max_tokens": 40}

    async def both(client):
        await client.post("/predict", json={"prompt": PROMPT})
        await client.post("/v1/completions", json=body)

    within(both)
    predicted, completed = (record.facts for record in caplog.records if record.message == "request")
    assert predicted.keys() == completed.keys() >= {"accepted_tokens", "rule", "stream"}
    assert predicted["prompt_tokens"] == completed["prompt_tokens"] and 0 < predicted["completion_tokens"] <= 40
    assert (predicted["drafter"], predicted["stream"]) == ("model", False)
    assert predicted["finish"] in (["length"], ["stop"])


def test_texts_differ(within):
    async def twice(client):
        return [(await client.post("/predict", json={"prompt": PROMPT})).json() for _ in range(2)]

    first, second = within(twice)
    assert first != second


def test_texts_belong_to_the_key(service, monkeypatch):
    """Memories of earlier texts are separate for each owner."""
    owners: list[object] = []

    def request(*arguments, owner=None, **more) -> Request:
        owners.append(owner)
        return Request(*arguments, owner=owner, **more)

    monkeypatch.setattr(plan, "Request", request)
    keyed = dataclasses.replace(service, settings=ServerSettings(api_keys=("the-first-key", "the-other-key")))

    async def ask() -> None:
        transport = httpx.ASGITransport(create_app(keyed))
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
            for key in keyed.settings.api_keys:
                head = {"Authorization": f"Bearer {key}"}
                assert (await client.post("/predict", json={"prompt": "x"}, headers=head)).status_code == 200

    asyncio.run(ask())
    assert len(owners) == len({*owners}) == 2 and None not in owners


@pytest.mark.parametrize(
    "body, param",
    [
        ({}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": 5}, "prompt"),
        ({"prompt": "x", "max_tokens": 5}, "max_tokens"),
        ({"prompt": "x " * 300}, "prompt"),
    ],
)
def test_what_it_refuses(within, body, param):
    answer = within(lambda client: client.post("/predict", json=body))
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert (error["type"], error["param"]) == ("invalid_request_error", param)

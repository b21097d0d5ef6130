"""Whose prompts may take over what, and what is told of it. A hit is told by the time to the first token, so it must
not say what others sent (CVE-2025-46570)."""

from __future__ import annotations

import asyncio
import json

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from specdec.serving.server.app import create_app
from support.tiny_service import NAME, tiny_service

KEYS = ("first-key-of-two", "second-key-of-two")
PROMPT = list(range(20, 34))  # 14 tokens; the first 12 are three whole parts
ROUTE = "/v1/completions"


class Asked:
    """A service within the process, and what its answers have in ``usage``."""

    def __init__(self, client: httpx.AsyncClient):
        self.client = client

    async def post(self, key: str | None = None, **fields) -> dict:
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        body = {"model": NAME, "prompt": PROMPT, "max_tokens": 2, "ignore_eos": True, **fields}
        answer = await self.client.post(ROUTE, json=body, headers=headers)
        assert answer.status_code == 200, answer.text
        return answer

    async def cached(self, key: str | None = None, **fields) -> int:
        usage = (await self.post(key, **fields)).json()["usage"]
        assert usage["prompt_tokens"] == 14
        return usage["prompt_tokens_details"]["cached_tokens"]


@pytest.fixture
def run(pair):
    def within(call, **settings):
        async def main():
            service = tiny_service(pair[2], prefill_chunk=4, **settings)
            transport = httpx.ASGITransport(create_app(service))
            try:
                async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
                    return await asyncio.wait_for(call(Asked(client)), 60)
            finally:
                await service.lanes.close()

        return asyncio.run(main())

    return within


def test_keys_and_salts_are_apart(run):
    async def call(asked):
        each = [(key, {} if salt is None else {"cache_salt": salt}) for key in KEYS for salt in (None, "a", "b")]
        return [[await asked.cached(key, **salt) for key, salt in each] for _ in range(2)]

    assert run(call, rows=8, api_keys=KEYS) == [[0] * 6, [12] * 6]


def test_lanes_are_apart(run):
    async def call(asked):
        return [await asked.cached(rule=rule) for rule in ("coupled", "token", "token", "coupled")]

    assert run(call) == [0, 0, 12, 12]


def test_shared_prefixes_are_those_of_all_keys_but_not_of_all_salts(run):
    async def call(asked):
        first = [await asked.cached(key) for key in KEYS]
        return first + [await asked.cached(key, cache_salt="a") for key in KEYS]

    assert run(call, api_keys=KEYS, share_prefixes=True) == [0, 12, 0, 12]


def test_a_salt_is_a_text(run):
    async def call(asked):
        for salt in ("", "x" * 1025, 7):
            body = {"model": NAME, "prompt": PROMPT, "cache_salt": salt}
            answer = await asked.client.post(ROUTE, json=body)
            assert answer.status_code == 400 and answer.json()["error"]["param"] == "cache_salt"

    run(call)


def test_what_is_told(run, caplog):
    """Of several choices a prompt counts once in ``usage``, and each in the metrics."""
    caplog.set_level("INFO")

    async def call(asked):
        told = [await asked.cached(n=3), await asked.cached(n=2)]
        streamed = (await asked.post(stream=True, stream_options={"include_usage": True})).text
        told.append(await asked.cached(prompt_logprobs=0))  # which has to be read
        return told, streamed, (await asked.client.get("/metrics")).text

    (first, second, scored), streamed, metrics = run(call)
    assert (first, second, scored) == (0, 12, 0)
    last = json.loads(streamed.split("data: ")[-2])
    assert last["usage"]["prompt_tokens_details"]["cached_tokens"] == 12
    lines = [record.facts for record in caplog.records if getattr(record, "facts", {}).get("path") == ROUTE]
    assert [line["cached_tokens"] for line in lines] == [0, 12, 12, 0]
    found = {s.name: s.value for family in text_string_to_metric_families(metrics) for s in family.samples}
    assert found["vllm:prefix_cache_queries_total"] == 14 * (3 + 2 + 1)
    assert found["vllm:prefix_cache_hits_total"] == 12 * (2 + 2 + 1)
    assert found["vllm:prompt_tokens_total"] == 14 * (3 + 2 + 1 + 1)

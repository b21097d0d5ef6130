"""Metrics: they add up to what the requests came to, and readers of vLLM's can read them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from specdec import Output, Producer, Request
from specdec.serving.server.app import create_app
from specdec.serving.server.decoded_text import DecodedText
from specdec.stats import Stats
from support.tiny_service import NAME, tiny_service

from specdec_kernels import SamplingParams

PROMPTS = ("def read(self, size=-1):\n", "import os\n", "class Stack:\n")


def parsed(text: str) -> dict[tuple, float]:
    """By name and all labels but the model's."""
    samples = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            assert family.type != "unknown", sample
            labels = {name: value for name, value in sample.labels.items() if name != "model_name"}
            samples[sample.name, *sorted(labels.items())] = sample.value
    return samples


async def scrape(client) -> Callable[..., float]:
    answer = await client.get("/metrics")
    assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    samples = parsed(answer.text)
    return lambda name, engine="0", **labels: samples[name, *sorted({"engine": engine, **labels}.items())]


async def decode(service, prompt: str, new: int, lane: tuple[str, ...] = (), **more) -> DecodedText:
    where = await service.lanes.get(*lane)
    ids = service.tokenizer(prompt).input_ids
    request = Request(ids, new, SamplingParams(0.8), seed=5, eos_token_id=[], **more)
    text = await DecodedText.begin(service.detokenizer, where, request, service.metrics)
    async for _ in text.pieces():
        pass
    return text


def test_counters_are_the_sums_of_outcomes(within, service):
    async def run(client):
        wanted = [decode(service, prompt, 8 + i) for i, prompt in enumerate(PROMPTS[1:], 1)]
        texts = await asyncio.gather(*wanted, decode(service, PROMPTS[0], 0, prompt_log_probs=0))
        return [text.ended for text in texts], await scrape(client)

    outcomes, value = within(run)
    spec = {
        name: sum(getattr(outcome.stats, of) for outcome in outcomes)
        for name, of in (("num_draft_tokens", "drafted"), ("num_accepted_tokens", "accepted"))
    }
    assert spec["num_accepted_tokens"] > 0
    for name, total in spec.items():
        assert value(f"vllm:spec_decode_{name}_total") == total
    with_drafts = sum(sum(outcome.stats.steps_by_drafts[1:]) for outcome in outcomes)
    assert value("vllm:spec_decode_num_drafts_total") == with_drafts
    by_place = [value("vllm:spec_decode_num_accepted_tokens_per_pos_total", position=str(i)) for i in range(4)]
    assert by_place == [sum(outcome.stats.accepted_by_position[i] for outcome in outcomes) for i in range(4)]
    assert sum(by_place) == spec["num_accepted_tokens"]
    assert value("vllm:generation_tokens_total") == 9 + 10
    assert value("vllm:prompt_tokens_total") == sum(len(outcome.request.prompt) for outcome in outcomes)
    assert value("vllm:request_success_total", finished_reason="length") == 3
    steps = sum(outcome.stats.steps for outcome in outcomes)
    assert value("vllm:time_to_first_token_seconds_count") == 2
    # Where the reader is late, several steps are delivered at once.
    assert 0 < value("vllm:inter_token_latency_seconds_count") <= steps - 2
    assert value("vllm:e2e_request_latency_seconds_count") == 3
    assert value("vllm:e2e_request_latency_seconds_sum") > value("vllm:time_to_first_token_seconds_sum") > 0
    assert value("vllm:request_generation_tokens_sum") == 19


def test_answers_by_route_and_status(pair):
    """Also those that no route gave. A path is never a label: of those there is no end."""

    async def run():
        service = tiny_service(pair[2], rows=1, max_waiting=2, max_body_bytes=1000)
        body = {"model": NAME, "prompt": "x", "max_tokens": 2}
        transport = httpx.ASGITransport(create_app(service))
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
            for more in ({}, {}, {"n": 8}, {"n": 8}, {"n": 8}, {"color": "red"}, {"prompt": "x" * 1000}):
                await client.post("/v1/completions", json=body | more)
            for path in ("/v1/models/a", "/v1/models/b/c", "/v1/models/tiny", "/a", "/b", "/openapi.json", "/ready"):
                await client.get(path)
            await client.delete("/health")
            samples = parsed((await client.get("/metrics")).text)
        await service.lanes.close()
        return {key[1:]: value for key, value in samples.items() if key[0] == "specdec:answers_total"}

    counts = {
        ("/v1/completions", "200"): 2,
        ("/v1/completions", "429"): 3,
        ("/v1/completions", "400"): 1,
        ("/v1/completions", "413"): 1,
        ("/v1/models/{name}", "404"): 2,
        ("/v1/models/{name}", "200"): 1,
        ("none", "404"): 2,
        ("/openapi.json", "200"): 1,
        ("/ready", "200"): 1,
        ("/health", "405"): 1,
    }
    assert asyncio.run(run()) == {(("route", route), ("status", status)): n for (route, status), n in counts.items()}


def test_gauges_are_read_when_asked_for(within, service):
    async def run(client):
        lane = await service.lanes.get()
        ids = service.tokenizer(PROMPTS[0]).input_ids
        begun = [
            await DecodedText.begin(service.detokenizer, lane, Request(ids, 100, eos_token_id=[]), service.metrics)
            for _ in range(3)
        ]
        await anext(pieces := begun[0].pieces())
        during = await scrape(client)
        usage = lane.engine.usage
        await pieces.aclose()
        for text in (*begun, *begun):
            await text.close()
        while lane.engine.usage.live or lane.engine.usage.waiting:
            await asyncio.sleep(0.01)
        return during, await scrape(client), usage, len(ids)

    during, after, usage, length = within(run)
    ours = {"drafter": "model", "rule": "coupled"}
    assert during("vllm:num_requests_running") == 2 and during("vllm:num_requests_waiting") == 1
    assert during("specdec:rows", **ours) == usage.rows == 2
    assert during("specdec:cache_tokens_reserved", **ours) == 2 * (length + 100)
    assert during("vllm:kv_cache_usage_perc") == pytest.approx(2 * (length + 100) / usage.cache_tokens)
    assert during("specdec:num_drafts", **ours) == 4
    assert after("vllm:num_requests_running") == after("specdec:cache_tokens_reserved", **ours) == 0
    assert after("vllm:request_success_total", finished_reason="abort") == 3
    assert 0 < during("specdec:steps_total", **ours) <= after("specdec:steps_total", **ours)
    assert 0 < after("specdec:busy_ratio", **ours) <= 1 and after("specdec:drafter_dropped", **ours) == 0


def test_lanes_have_numbers_and_no_counts_are_shared(within, service):
    async def run(client):
        await decode(service, PROMPTS[0], 4)
        await decode(service, PROMPTS[0], 5, ("none", "token"))
        return await scrape(client)

    value = within(run)
    assert [value("vllm:generation_tokens_total", engine) for engine in ("0", "1")] == [4, 5]
    assert value("vllm:spec_decode_num_draft_tokens_total", "1") == 0
    assert value("specdec:steps_total", "1", drafter="none", rule="token") == 5


def test_what_vllms_benchmark_adds_up(within, service):
    """It adds up every line with a counter's name, so there may be no other lines with it."""

    async def run(client):
        before = (await client.get("/metrics")).text
        text = await decode(service, PROMPTS[0], 12)
        accept = {"accept": "application/openmetrics-text; version=1.0.0"}
        return before, (await client.get("/metrics")).text, await client.get("/metrics", headers=accept), text

    before, after, open_metrics, text = within(run)
    assert "vllm:" not in "".join(line for line in before.splitlines() if not line.startswith("#"))
    drafts = [line for line in after.splitlines() if line.startswith("vllm:spec_decode") and "num_drafts" in line]
    assert [float(line.split()[-1]) for line in drafts] == [sum(text.ended.stats.steps_by_drafts[1:])]
    assert "_created" not in after
    assert open_metrics.headers["content-type"].startswith("application/openmetrics-text")
    assert open_metrics.text.endswith("# EOF\n")


def test_steps_that_come_together_all_count(within, service):
    async def run(client):
        measured = service.metrics.begin(await service.lanes.get(), prompt_tokens=7)
        text = SimpleNamespace(reused=4)
        steps = [Output(text, [5, 6], [Producer.ACCEPTED, Producer.RECOVERED], drafted=n) for n in (2, 3)]
        measured.delivered(steps[:1])
        measured.delivered(steps)
        return await scrape(client)

    value = within(run)
    assert value("vllm:generation_tokens_total") == 6 and value("vllm:spec_decode_num_draft_tokens_total") == 2 + 2 + 3
    assert value("vllm:spec_decode_num_accepted_tokens_total") == 3 and value("vllm:prompt_tokens_total") == 7
    assert value("vllm:prefix_cache_queries_total") == 7 and value("vllm:prefix_cache_hits_total") == 4
    for name in ("inter_token_latency", "time_per_output_token"):  # one delivery after the first
        assert value(f"vllm:{name}_seconds_count") == 1


def test_a_step_that_fails_has_drafts_but_no_tokens(within, service):
    async def run(client):
        lane = await service.lanes.get()
        stats = Stats.empty(4)
        measured = service.metrics.begin(lane, prompt_tokens=7)
        stats.record(drafted=2, tested=2, accepted=1, emitted=2, draft_forwards=4)
        text = SimpleNamespace(reused=None)
        measured.delivered([Output(text, [5, 6], [Producer.ACCEPTED, Producer.RECOVERED], drafted=2)])
        stats.record(drafted=3, tested=0, accepted=0, emitted=0, draft_forwards=4)
        measured.ended(SimpleNamespace(stats=stats, prompt_log_probs=None), "error")
        return await scrape(client)

    value = within(run)
    assert value("vllm:spec_decode_num_drafts_total") == 2 and value("vllm:spec_decode_num_draft_tokens_total") == 5
    assert value("vllm:request_success_total", finished_reason="error") == 1

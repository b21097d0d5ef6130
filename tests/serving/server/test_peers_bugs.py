"""Bugs that other servers with multi-token steps had, as far as no other test here would find them. The names are those
of their issues: SGLang 31599 and 33758 (a stop string masked by max_tokens), vLLM 47616 (tokens and scores after a
stop), SGLang 37450 (usage that counts more than was made), TensorRT-LLM 19487 (requests without a seed that share
one)."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
from specdec.serving.server.app import create_app
from support.tiny_service import NAME, tiny_service

BODY: dict[str, Any] = {"model": NAME, "prompt": "x = ", "seed": 1, "max_tokens": 12, "logit_bias": {"0": -100}}


def test_stops_where_steps_have_many_tokens(pair):
    """The last token that is allowed completes the stop string; it ends in the middle of a step, or between two. The
    same text comes for each K, so a step ends everywhere."""

    async def main() -> None:
        service = tiny_service(pair[2])
        transport = httpx.ASGITransport(create_app(service))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:

            async def ask(**fields: Any) -> dict:
                answer = await client.post("/v1/completions", json={**BODY, "logprobs": 1, **fields})
                assert answer.status_code == 200, answer.text
                return answer.json()

            whole = (await ask())["choices"][0]
            starts, text = whole["logprobs"]["text_offset"], whole["text"]
            assert len(starts) == 12
            ends = [(n, starts[n] if n < 12 else len(text)) for n in range(2, 13)]
            checked = 0
            for n, end in ends:
                stop = text[max(end - 3, 0) : end]
                if end == starts[n - 1] or text.find(stop) + len(stop) != end:
                    continue  # it does not end in this token, or is found earlier
                checked += 1
                for num_drafts in (0, 1, 3):
                    told = await ask(stop=stop, max_tokens=n, num_drafts=num_drafts)
                    (choice,) = told["choices"]
                    assert (choice["text"], choice["finish_reason"]) == (text[: end - len(stop)], "stop")
                    assert told["usage"]["completion_tokens"] == n
                    kept = [start for start in starts if start < len(choice["text"])]
                    assert choice["logprobs"]["text_offset"] == kept
            assert checked > 5
            drawn = await asyncio.gather(*(ask(seed=None) for _ in range(8)))
            assert len({each["choices"][0]["specdec"]["seed"] for each in drawn}) == 8
            assert len({each["choices"][0]["text"] for each in drawn}) == 8
        await service.lanes.close()

    asyncio.run(main())


def test_usage_so_far_in_every_chunk(pair):
    """vLLM's stream_options.continuous_usage_stats, without which guidellm does not measure: it never falls, counts
    all choices, and ends with what the whole response says."""

    async def main() -> None:
        service = tiny_service(pair[2])
        transport = httpx.ASGITransport(create_app(service))
        options = {"include_usage": True, "continuous_usage_stats": True}
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            # Chunks of several steps are one where the reader is late, so there are many steps.
            body = {**BODY, "stream": True, "n": 2, "max_tokens": 40, "stream_options": options}
            answer = await client.post("/v1/completions", json=body)
        usages = [json.loads(event[6:])["usage"] for event in answer.text.split("\n\n")[:-2]]
        counts = [usage["completion_tokens"] for usage in usages]
        assert counts == sorted(counts) and counts[0] > 0 and len(set(counts)) > 4 and counts[-1] == 80
        assert all(u["total_tokens"] == u["prompt_tokens"] + u["completion_tokens"] for u in usages)
        await service.lanes.close()

    asyncio.run(main())

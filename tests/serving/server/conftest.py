"""A service over the embedded pair, and requests to it within the process."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator

import httpx
import pytest
from specdec import Scheduler, SpeculativeDecoder
from specdec.serving.server.app import create_app
from specdec.serving.server.lanes import Lanes
from specdec.serving.server.service import Service

Call = Callable[[httpx.AsyncClient], Awaitable]


@pytest.fixture
def service(pair) -> Iterator[Service]:
    target, draft, tokenizer = pair
    drafters = {"model": draft, "none": None}

    def make(drafter: str, rule: str) -> Scheduler:
        return Scheduler(SpeculativeDecoder(target, drafters[drafter], 4), rows=2, max_length=256, rule=rule)

    made = Service("embedded", tokenizer, Lanes(make, list(drafters), ["coupled", "token"]))
    yield made
    asyncio.run(made.lanes.close())


@pytest.fixture
def within(service) -> Callable[[Call], object]:
    """Runs ``call(client)`` in an event loop of its own."""

    def run(call: Call) -> object:
        async def main() -> object:
            transport = httpx.ASGITransport(create_app(service))
            async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
                return await asyncio.wait_for(call(client), 60)

        return asyncio.run(main())

    return run

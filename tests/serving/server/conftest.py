"""A service over the embedded pair, and requests to it within the process."""

from __future__ import annotations

import asyncio
import copy
import socket
import threading
from collections.abc import Awaitable, Callable, Iterator
from typing import NamedTuple

import httpx
import pytest
from specdec import Scheduler, SpeculativeDecoder
from specdec.drafters.model import model_drafter
from specdec.drafters.predicted import PredictedDrafter
from specdec.models.supported import cached_model
from specdec.serving.scheduler import Usage
from specdec.serving.server.app import create_app
from specdec.serving.server.lanes import Lanes
from specdec.serving.server.life_cycle import Server
from specdec.serving.server.server_settings import url_of
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


class Served(NamedTuple):
    """A server on a port of this machine, which runs in a thread of its own."""

    url: str
    service: Service
    scheduler: Callable[[str], Scheduler]  # another one, with the settings of the server's; argument: the rule

    def usage(self) -> Usage:
        """The load of all lanes together, of which there is one unless requests asked for others."""
        (lane,) = [lane for lane in self.service.lanes.running if lane.rule == "coupled"]
        return lane.engine.usage


@pytest.fixture(scope="session")
def served(pair) -> Iterator[Served]:
    """The embedded pair, with K = 4, so that texts are those of the engine alone; and with a chat template."""
    target, draft, tokenizer = pair
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.chat_template = "{% for m in messages %}# {{ m.role }}: {{ m.content }}\n{% endfor %}# assistant:"

    predicted = PredictedDrafter(model_drafter(draft, cached_model(target, "target")))

    def make(drafter: str, rule: str) -> Scheduler:
        return Scheduler(SpeculativeDecoder(target, predicted, 4), rows=8, max_length=128, rule=rule, max_waiting=64)

    service = Service("embedded", tokenizer, Lanes(make, ["model"], ["coupled", "token", "block"]))
    with socket.create_server(("127.0.0.1", 0)) as bound:
        server = Server(service, bound)
        thread = threading.Thread(target=lambda: asyncio.run(server.run_until_signal()))
        thread.start()
        yield Served(url_of(bound), service, lambda rule: make("model", rule))
        server.stop()
        thread.join()

"""``specdec serve``: an HTTP server with OpenAI's interface."""

from __future__ import annotations

from typing import TYPE_CHECKING

from . import drafting, models, options
from .drafters import nodes_of

if TYPE_CHECKING:
    from ..serving.scheduler import Scheduler
    from ..serving.server.service import Service


def serve(
    target: options.Target = None,
    adapter: options.Adapter = None,
    draft: options.Draft = None,
    drafter: options.Drafters = None,
    exit_layers: options.ExitLayers = None,
    num_drafts: options.NumDrafts = None,
    tree: options.Tree = None,
    rows: int = 8,
    host: str = "127.0.0.1",
    port: int = 8000,
    device: options.Device = None,
    dtype: options.Dtype = None,
) -> None:
    """Serves the target over HTTP, with OpenAI's interface, on this machine's loopback interface."""
    import uvicorn

    from ..serving.server.app import create_app

    service = make_service(
        target, adapter, draft, drafter or ["model"], exit_layers, num_drafts, tree, rows, device, dtype
    )
    uvicorn.run(create_app(service), host=host, port=port)


def make_service(
    target: str | None, adapter: str | None, draft: str | None, drafters: list[str], exit_layers: int | None,
    num_drafts: str | None, tree: int | None, rows: int, device: str | None, dtype: str | None,
) -> Service:  # fmt: skip
    """Loads the models and returns what ``create_app`` serves."""
    from ..decoder import SpeculativeDecoder
    from ..serving.scheduler import Scheduler
    from ..serving.server.lanes import Lanes
    from ..serving.server.service import Service

    drafting.check_drafters(drafters, target, draft, exit_layers, adapter, tree)
    with options.user_errors():
        loaded = models.load(target, draft, drafters, device, dtype, adapter)

    def make(name: str, rule: str) -> Scheduler:
        nodes = nodes_of(name, tree)
        made = loaded.drafter(name, exit_layers if name == "early-exit" else None)
        decoder = SpeculativeDecoder(loaded.target, made, drafting.read_num_drafts(num_drafts, nodes=nodes), tree=nodes)
        return Scheduler(decoder, rows=rows, rule=rule)

    rules = ["coupled", "token", "block"]
    name = "specdec-embedded" if target is None else target
    return Service(name, loaded.tokenizer, Lanes(make, drafters, rules), tail=tuple(loaded.tail))

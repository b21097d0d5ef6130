"""What ``specdec serve`` serves: its models, and the lanes in which requests are decoded."""

from __future__ import annotations

import asyncio
import json
import logging
import shlex
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from . import drafting, models
from .drafters import CHOICES, NO_TREES, nodes_of, parts_of
from .option_groups import option
from .terminal import remark
from .user_errors import refuse

if TYPE_CHECKING:
    from ..loop.draft_length import AdaptiveDrafts
    from ..serving.scheduler import Scheduler
    from ..serving.server.lanes import Lane
    from ..serving.server.server_settings import ServerSettings
    from ..serving.server.service import Service

EMBEDDED = ("model", "none", "lookup", "suffix", "eagle3", "medusa", "dflash")
RULES = ("coupled", "token", "block")


@dataclass(frozen=True)
class ServedDrafts:
    """Drafting"""

    drafter: list[str] | None = option(
        None,
        f"Repeatable: the first is the default, requests may ask for the others. {CHOICES}. Default: "
        "model; suffix for a target alone; with the embedded pair also none, lookup, suffix, eagle3, medusa, dflash.",
        metavar="NAME",
    )
    exit_layers: int | None = option(*drafting.EXIT_LAYERS)
    num_drafts: str = option(
        "auto",
        "K, drafted tokens a step; auto chooses it by load, down to 0 where no draft pays. With a tree: the most "
        "tokens of a path through it.",
        *drafting.K,
    )
    tree: int | None = option(None, drafting.TREE, metavar="N")
    rule: list[str] | None = option(
        None,
        "Repeatable, as --drafter: coupled (the text depends on target, prompt, settings and seed alone), token, "
        "block. Default: coupled; with the embedded pair also the others.",
        metavar="RULE",
    )


def make_service(
    at: models.ModelOptions,
    drafts: ServedDrafts,
    scheduling: Mapping[str, Any],
    settings: ServerSettings,
    name: str | None = None,
    response_template: Path | None = None,
) -> Service:
    """Loads the models and returns what ``create_app`` serves. Each pair of a drafter and a rule decodes in a lane with
    caches of its own, so for models that were named there is one, unless more were asked for.

    Args:
        scheduling: arguments of ``Scheduler``, for each lane.
        response_template: a file of JSON, see ``Dialect``.
    """
    from ..drafters.predicted import PredictedDrafter
    from ..drafters.suffix import SuffixMemories
    from ..serving.scheduler import Scheduler
    from ..serving.server.lanes import Lanes
    from ..serving.server.service import Service

    tree = drafts.tree
    embedded = [each for each in EMBEDDED if tree is None or each not in NO_TREES]
    drafters = drafts.drafter or (embedded if at.target is None else [drafting.default_drafter(at)])
    rules = drafts.rule or list(RULES[:1] if at.target is not None else RULES)
    for rule in rules:
        if rule not in RULES or rules.count(rule) > 1:
            refuse("--rule", ", ".join(rules), f"each once: {', '.join(RULES)}")
    drafting.check_drafters(drafters, at, drafts.exit_layers, tree)
    for rule in RULES:
        drafts_of(drafts.num_drafts, rule, tree)  # refuses what is no K before models are loaded
    template = None if response_template is None else read_template(response_template)
    loaded = models.load(at, drafters)
    memories = SuffixMemories(max_owners=max(1, len(settings.api_keys)))

    def make(drafter: str, rule: str) -> Scheduler:
        nodes = nodes_of(drafter, tree)
        layers = drafts.exit_layers if parts_of(drafter)[-1] == "early-exit" else None
        made = loaded.drafter(drafter, layers, memory=memories)
        if nodes is None:  # requests may have predictions
            made = PredictedDrafter(made)
        decoder = loaded.decoder(made, drafts_of(drafts.num_drafts, rule, nodes), nodes)
        scheduler = Scheduler(decoder, rule=rule, **scheduling)
        scheduler.warm_up()
        return scheduler

    default = "specdec-embedded" if at.target is None else Path(at.target).name or at.target
    lanes = Lanes(make, drafters, rules)
    service = Service(name or default, loaded.tokenizer, lanes, settings, tuple(loaded.tail), template)
    try:
        _ = service.dialect  # so that what is no response template is known now
    except ValueError as error:
        refuse("--response-template", f"one that cannot be used ({error})", "a response template of transformers")
    return service


def read_template(file: Path) -> dict[str, Any]:
    """The response template in a file, which may be a tokenizer's configuration. Refuses what is none."""
    try:
        told = json.loads(file.read_text("utf-8-sig"))
    except (OSError, ValueError) as error:
        refuse("--response-template", f"{str(file)!r} ({type(error).__name__})", "a readable file of JSON")
    template = told.get("response_template", told) if isinstance(told, dict) else None
    if not isinstance(template, dict):
        refuse("--response-template", f"{str(file)!r} without an object", "a file with a JSON object")
    return template


def drafts_of(given: str, rule: str, nodes: int | None) -> int | AdaptiveDrafts:
    """K of a lane. ``auto`` follows the load where no text depends on it; with other rules, sampled texts have a fixed
    K, so that a seed gives the same text among any neighbours."""
    fixed = given == "auto" and (nodes is not None or rule != "coupled")
    return drafting.read_num_drafts(None if fixed else given, nodes=nodes)


def run(service: Service, bound: socket.socket, as_json: bool) -> None:
    """Serves until a signal, and says what is served when it begins."""
    from ..serving.server.errors import ApiError
    from ..serving.server.life_cycle import Server
    from ..serving.server.server_settings import url_of

    async def main() -> None:
        try:
            lane = await service.lanes.get()  # so that what does not fit is known now
        except ApiError as error:
            raise ValueError(error.message) from error
        url = url_of(bound, service.settings.ssl_certfile is not None)
        await Server(service, bound, lambda: tell(service, lane, url, as_json)).run_until_signal()

    asyncio.run(main())


def tell(service: Service, lane: Lane, url: str, as_json: bool) -> None:
    """Prints what is served, where, and a command that works."""
    usage, lanes = lane.engine.usage, service.lanes
    facts = {
        "model": service.name,
        "url": url,
        "device": lane.device,
        "drafters": lanes.drafters,
        "rules": lanes.rules,
        "num_drafts": lane.most_drafts,
        "rows": usage.rows,
        "max_length": lane.max_length,
        "cache_tokens": usage.cache_tokens,
        "cache_bytes": lane.cache_bytes,
        "tools": service.dialect.with_tools is not None,
        "api_keys": len(service.settings.api_keys),
        "curl": curl(service, url),
    }
    if as_json:
        logging.getLogger(__name__).info("serving", extra={"facts": facts})
        return
    keys = service.settings.api_keys
    each = "" if len(lanes.drafters) * len(lanes.rules) == 1 else ", for each drafter and rule that is in use"
    lines = {
        "drafters": f"{', '.join(lanes.drafters)} (the first is the default), K up to {lane.most_drafts}",
        "rules": ", ".join(lanes.rules),
        "rows": f"{usage.rows} of up to {lane.max_length} tokens{each}",
        "tools": "yes, where the chat template has them" if facts["tools"] else "no",
        "cache": f"{usage.cache_tokens} tokens, {lane.cache_bytes / 1e6:.1f} MB{each}",
        "access": f"{len(keys)} API key{'s' * (len(keys) > 1)}" if keys else "from this machine, without a key",
    }
    remark(f"{service.name} on {lane.device}: {url}")
    for name, line in lines.items():
        remark(f"  {name:9}{line}")
    typer.echo(curl(service, url), err=True)  # on one line, to be copied


def curl(service: Service, url: str) -> str:
    """A command that asks for a text."""
    key = ['-H "Authorization: Bearer $SPECDEC_SERVE_API_KEY"'] if service.settings.api_keys else []
    asked = {"model": service.name, "prompt": "def read(self, size=-1):\n", "max_tokens": 32, "temperature": 0}
    body = json.dumps(asked)
    head = ["-H 'Content-Type: application/json'", *key]
    return " ".join(["curl", f"{url}/v1/completions", *head, "-d", shlex.quote(body)])

"""What the routes of a server share."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

from .lanes import Lanes
from .metrics import Metrics
from .settings import ServerSettings

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class Service:
    """A model that is served.

    Args:
        name: of the model, in requests and responses.
        tail: ids for which the tokenizer has no token, and which are never emitted.
        draining: set when the server takes no requests any more.
    """

    name: str
    tokenizer: PreTrainedTokenizerBase
    lanes: Lanes
    settings: ServerSettings = ServerSettings()
    tail: tuple[int, ...] = ()
    created: int = field(default_factory=lambda: int(time.time()))
    draining: asyncio.Event = field(default_factory=asyncio.Event)

    @cached_property
    def metrics(self) -> Metrics:
        return Metrics(self.name, self.lanes)

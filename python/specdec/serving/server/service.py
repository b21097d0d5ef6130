"""What the routes of a server share."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from .lanes import Lanes
from .settings import ServerSettings

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class Service:
    """A model that is served.

    Args:
        name: of the model, in requests and responses.
        settings: where it listens, and what it accepts.
        tail: ids for which the tokenizer has no token, and which are never emitted.
    """

    name: str
    tokenizer: PreTrainedTokenizerBase
    lanes: Lanes
    settings: ServerSettings = ServerSettings()
    tail: tuple[int, ...] = ()
    draining: threading.Event = field(default_factory=threading.Event)  # set: no requests are taken any more
    created: int = field(default_factory=lambda: int(time.time()))

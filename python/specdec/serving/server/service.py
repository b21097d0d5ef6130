"""What the routes of a server share."""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
import transformers
from transformers import PreTrainedTokenizerBase

from specdec_kernels import __version__

from ...detokenize import Detokenizer
from .dialect import Dialect
from .lanes import Lanes
from .metrics import Metrics
from .server_settings import ServerSettings
from .structured_output import Grammars
from .token_names import TokenBytes, TokenNames


@dataclass(frozen=True)
class Service:
    """A model that is served.

    Args:
        name: of the model, in requests and responses.
        settings: where it listens, and what it accepts.
        tail: ids for which the tokenizer has no token, and which are never emitted.
        response_template: how it writes reasoning and calls, see ``Dialect``.
    """

    name: str
    tokenizer: PreTrainedTokenizerBase
    lanes: Lanes
    settings: ServerSettings = ServerSettings()
    tail: tuple[int, ...] = ()
    response_template: Mapping[str, Any] | None = None
    draining: threading.Event = field(default_factory=threading.Event)
    created: int = field(default_factory=lambda: int(time.time()))

    @cached_property
    def metrics(self) -> Metrics:
        return Metrics(self.name, self.lanes)

    @cached_property
    def fingerprint(self) -> str:
        """OpenAI's ``system_fingerprint``: another one may give other texts for the same seeds."""
        versions = (self.name, __version__, torch.__version__, transformers.__version__)
        return "fp_" + hashlib.sha256(repr(versions).encode()).hexdigest()[:12]

    @cached_property
    def detokenizer(self) -> Detokenizer:
        return Detokenizer(self.tokenizer)

    @cached_property
    def grammars(self) -> Grammars:
        return Grammars(self.tokenizer)

    @cached_property
    def dialect(self) -> Dialect:
        return Dialect(self.tokenizer, self.response_template)

    @cached_property
    def names(self) -> TokenNames:
        return TokenNames(TokenBytes(self.tokenizer))

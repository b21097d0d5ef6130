"""The options by which a command finds somebody's server."""

from __future__ import annotations

import math
from dataclasses import dataclass

from .option_groups import option
from .user_errors import refuse

API_KEY = "SPECDEC_API_KEY"


@dataclass(frozen=True)
class ServerAddress:
    """Somebody's server"""

    url: str | None = option(None, "Its address.")
    model: str | None = option(None, "Its name at the server. Default: the first of /v1/models.")
    api_key: str | None = option(
        None, f"The server's. The environment's {API_KEY} hides it from the list of processes.", envvar=API_KEY
    )
    timeout: float = option(300.0, "Seconds that one answer, or a stream's next part, may take.")

    def __post_init__(self) -> None:
        if not 0 < self.timeout < math.inf:
            refuse("--timeout", self.timeout, "a finite number > 0")
        if self.url is None and self.model is not None:
            refuse("--model", "it without --url", "it with --url")

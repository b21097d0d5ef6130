"""What a server tells of its drafts: in an answer, or for everything that it has decoded, in its metrics.

Nothing here imports torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from ..server_connection import ServerConnection, ServerError

# vLLM's counters, which `specdec serve` has as well. Each engine has lines of its own.
_DRAFTED, _ACCEPTED = "vllm:spec_decode_num_draft_tokens_total", "vllm:spec_decode_num_accepted_tokens_total"
_TRIES = 20  # at metrics that still grow


class Drafts(NamedTuple):
    """Tokens that were drafted, and those of them that were accepted."""

    drafted: int
    accepted: int


def drafts_of_answer(events: Iterable[Mapping[str, Any]]) -> Drafts | None:
    """Those that the events of a streamed answer tell: ``metrics.speculative_decoding`` of vLLM and ``specdec serve``,
    or llama.cpp's ``timings``, which have ``draft_n`` and ``draft_n_accepted`` where something was drafted. None: they
    tell nothing."""
    for event in events:
        if isinstance(told := (event.get("metrics") or {}).get("speculative_decoding"), Mapping):
            return Drafts(int(told["num_draft_tokens"]), int(told["num_accepted_draft_tokens"]))
        if isinstance(told := event.get("timings"), Mapping):
            return Drafts(int(told.get("draft_n", 0)), int(told.get("draft_n_accepted", 0)))
    return None


def drafts_of_metrics(text: str) -> Drafts | None:
    """The sums over all engines in what Prometheus reads. None: there are no such counters."""
    found: dict[str, float] = {}
    for line in text.splitlines():
        name = line.partition("{")[0].partition(" ")[0]
        if name in (_DRAFTED, _ACCEPTED):
            found[name] = found.get(name, 0.0) + float(line.rsplit(" ", 1)[1])
    return Drafts(int(found[_DRAFTED]), int(found[_ACCEPTED])) if len(found) == 2 else None


class DraftMeter:
    """Reads a server's counters between two answers. Whatever else is asked of the server meanwhile is counted, too."""

    def __init__(self, server: ServerConnection):
        self._server = server
        self._last = self._read()

    @property
    def there(self) -> bool:
        return self._last is not None

    def since(self) -> Drafts | None:
        """What was counted since the last call, or since the beginning; None where there are no counters. An engine may
        count its last step only after the answer has gone out, so they are read until two readings are the same."""
        if self._last is None:
            return None
        before, now = self._last, self._read()
        for _ in range(_TRIES):
            last, now = now, self._read()
            if now is None or now == last:
                break
        if now is None:
            raise ServerError(self._server.url, "has no counters of drafts in /metrics any more")
        self._last = now
        return Drafts(now.drafted - before.drafted, now.accepted - before.accepted)

    def _read(self) -> Drafts | None:
        try:
            return drafts_of_metrics(self._server.text("/metrics"))
        except ServerError as error:
            if error.status is None:
                raise
            return None  # it has no metrics, or not for us

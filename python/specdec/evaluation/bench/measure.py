"""The results of one round of a cell: counts and times of its runs."""

from __future__ import annotations

import resource
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from ...stats import Stats
from ..contenders import Run

SAMPLE = 256  # of the times between pieces of text, at most so many are kept of a round


@dataclass(frozen=True)
class BenchPrompt:
    id: str
    category: str
    tokens: list[int]


def measured(runs: Sequence[Run], batches: Sequence[Sequence[BenchPrompt]], peak_memory: int | None) -> dict:
    """Returns a round of a cell, for JSON.

    - ``tokens_per_second``: new tokens over the time of all calls, the forwards over the prompts included.
    - ``time_to_first_token``: of each prompt, from the call.
    - ``inter_token``: times between two pieces of one text, where a piece has all tokens of a step; of many times, so
      many quantiles that their distribution is the same.
    - ``time_per_output_token``: time from the first piece to the last one, over the tokens after the first piece; None
      where no text has two pieces.
    - ``drafted_by_position``, ``accepted_by_position``, ``seconds_by_part``, ``draft_forwards``: of specdec's methods,
      as :class:`~specdec.stats.Stats` has them; else None.

    Args:
        runs: one for each batch of prompts.
        peak_memory: bytes, or None.
    """
    seconds, tokens = sum(run.seconds for run in runs), sum(run.emitted for run in runs)
    texts = [arrivals for run in runs for arrivals in run.arrivals if arrivals]
    gaps = [b.seconds - a.seconds for text in texts for a, b in zip(text, text[1:], strict=False)]
    troubles = [run.trouble for run in runs if run.trouble]
    later = sum(arrival.tokens for text in texts for arrival in text[1:])
    return {
        "seconds": seconds,
        "tokens": tokens,
        **{name: _total(runs, name) for name in ("steps", "drafted", "accepted", "tested")},
        "tokens_per_second": tokens / seconds,
        "time_to_first_token": [text[0].seconds for text in texts],
        "inter_token": quantiles(gaps, SAMPLE),
        "time_per_output_token": sum(text[-1].seconds - text[0].seconds for text in texts) / later if later else None,
        **_of_steps(runs),
        "draft_forwards": _total(runs, "draft_forwards"),
        "peak_memory": peak_memory,
        "by_prompt": [
            [[prompt.id for prompt in batch], run.seconds, run.emitted]
            for run, batch in zip(runs, batches, strict=True)
        ],
        **({"trouble": troubles[0]} if troubles else {}),
    }


def quantiles(values: Sequence[float], most: int) -> list[float]:
    """All values in their order if they are few, else ``most`` of the sorted ones at even distances, the smallest and
    the largest among them."""
    if len(values) <= most:
        return list(values)
    ordered = sorted(values)
    return [ordered[round(i * (len(ordered) - 1) / (most - 1))] for i in range(most)]


def _total(runs: Sequence[Run], name: str) -> int | None:
    values = [getattr(run, name) for run in runs]
    return None if None in values else sum(values)


def _of_steps(runs: Sequence[Run]) -> dict[str, object]:
    """What only specdec's methods say; else None."""
    if not all(run.stats for run in runs):
        return dict.fromkeys(("drafted_by_position", "accepted_by_position", "seconds_by_part"))
    stats = [stats for run in runs for stats in run.stats]
    whole = Stats.total(stats, max(len(each.drafted_by_position) for each in stats))
    parts = {part: sum(run.seconds_by_part[part] for run in runs) for part in runs[0].seconds_by_part}
    counts = {name: getattr(whole, name) for name in ("drafted_by_position", "accepted_by_position")}
    return {**counts, "seconds_by_part": parts}


class Peak:
    """The largest amount of memory in use since ``reset``: on a GPU what torch has allocated there; elsewhere what of
    the whole process was in memory, models and libraries included, at its high-water mark.

    Args:
        proc: of the process; Linux sets its mark back where it is asked to. Where nothing does, the mark is that of
            the process since it began.
    """

    def __init__(self, device: torch.device, proc: Path = Path("/proc/self")):
        self._device, self._proc = device, proc
        self.resets = device.type == "cuda" or self._reset()

    @property
    def what(self) -> str:
        """What is counted, in words."""
        if self._device.type == "cuda":
            return "most memory that torch had allocated on the GPU during a run of the cell"
        since = "during a run of the cell" if self.resets else "since the process began, the cells before included"
        return f"most memory of the whole process that was resident {since}"

    def reset(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
        elif self.resets:
            self._reset()

    def read(self) -> int:
        """Bytes."""
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._device)
        if self.resets:
            for line in (self._proc / "status").read_text().splitlines():
                if line.startswith("VmHWM:"):
                    return int(line.split()[1]) * 1024
        most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return most if sys.platform == "darwin" else most * 1024  # KiB, but on macOS bytes

    def _reset(self) -> bool:
        """Returns whether the mark was set back (proc(5): /proc/pid/clear_refs, 5)."""
        try:
            (self._proc / "clear_refs").write_text("5")
        except OSError:
            return False
        return True

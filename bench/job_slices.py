"""Jobs for a scheduler: requests out of Python's standard library, and slices of a run through them."""

from __future__ import annotations

import math
import random
import sysconfig
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from specdec import Outcome, Request, Scheduler
from specdec.result import End
from specdec.stats import Stats
from transformers import PreTrainedTokenizerBase

LINES = 60  # of a source file that a prompt is cut from


def skewed_lengths(count: int, least: int = 8, most: int = 256, median: float = 48.0, seed: int = 0) -> list[int]:
    """Log-normal, so that a few are many times the median, as lengths of answers are."""
    draw = random.Random(seed)
    return [min(max(round(draw.lognormvariate(math.log(median), 1.0)), least), most) for _ in range(count)]


def standard_library(tokenizer: PreTrainedTokenizerBase, lengths: Sequence[int], seed: int = 0) -> list[list[int]]:
    """Prompts of so many tokens, from anywhere in the modules that every machine has."""
    draw = random.Random(seed)
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    prompts: list[list[int]] = []
    while len(prompts) < len(lengths):
        lines = draw.choice(files).read_text(errors="replace").splitlines(True)
        first = draw.randrange(max(len(lines) - LINES, 1))
        ids = tokenizer("".join(lines[first : first + LINES])).input_ids[: lengths[len(prompts)]]
        if len(ids) == lengths[len(prompts)]:
            prompts.append(ids)
    return prompts


@dataclass
class Slice:
    """A part of a job."""

    seconds: float = 0.0
    tokens: int = 0
    steps: int = 0
    row_steps: float = 0.0  # live rows, summed over the steps
    rows: int = 1
    parts: dict[str, float] = field(default_factory=dict)  # seconds, as ``Stats.seconds`` has them

    @property
    def speed(self) -> float:
        return self.tokens / self.seconds

    @property
    def tau(self) -> float:
        return self.tokens / self.row_steps

    @property
    def busy(self) -> float:
        return self.row_steps / (self.steps * self.rows)

    @property
    def forwards(self) -> float:
        """Seconds in the models; prompts are not among them."""
        return sum(self.parts[name] for name in ("draft_forwards", "target_forwards", "replays"))


class Job:
    """Requests through one scheduler. A job may stop between two steps and go on later, so two can take turns.

    Args:
        whole_batches: as many requests as there are rows begin together, and the next ones when the last of these has
            ended.
    """

    def __init__(self, scheduler: Scheduler, requests: Iterable[Request], whole_batches: bool = False):
        self.scheduler, self.whole_batches = scheduler, whole_batches
        self.rows = scheduler.usage.rows
        self.texts: dict[object, list[int]] = {}  # by the request's ``id``
        self.stats: list[Stats] = []
        self._coming = deque(requests)

    @property
    def done(self) -> bool:
        return not self._coming and self.scheduler.idle

    def run(self, ended: int | None = None) -> Slice:
        """Goes on until so many more requests have ended; None: to the end.

        Raises:
            RuntimeError: a request ended in another way than with its length.
        """
        scheduler, stopwatch = self.scheduler, self.scheduler.batch.stopwatch
        part = Slice(rows=self.rows)
        stopwatch.lap("measuring")  # what others did meanwhile
        before, parts, begun = scheduler.usage, dict(stopwatch.seconds), time.perf_counter()
        goal = math.inf if ended is None else len(self.stats) + ended
        while not self.done and len(self.stats) < goal:
            self._feed()
            for update in scheduler.step():
                if not isinstance(update, Outcome):
                    part.tokens += len(update.tokens)
                elif update.end != End.LENGTH:
                    raise RuntimeError(f"request {update.request.id}: {update.end} {update.error or ''}")
                else:
                    self.texts[update.request.id] = update.tokens
                    self.stats.append(update.stats)
        part.seconds = time.perf_counter() - begun
        after = scheduler.usage
        part.steps = after.steps - before.steps
        part.row_steps = (after.steps * after.busy - before.steps * before.busy) * self.rows
        part.parts = {name: seconds - parts[name] for name, seconds in stopwatch.seconds.items()}
        return part

    def _feed(self) -> None:
        if self.whole_batches and not self.scheduler.idle:
            return
        waiting = self.scheduler.usage.waiting
        for _ in range(min(self.rows - waiting, len(self._coming))):
            self.scheduler.submit(self._coming.popleft())


def together(parts: Sequence[Slice]) -> Slice:
    """Slices as one."""
    whole = Slice(rows=parts[0].rows, parts=dict.fromkeys(parts[0].parts, 0.0))
    for part in parts:
        for name in ("seconds", "tokens", "steps", "row_steps"):
            setattr(whole, name, getattr(whole, name) + getattr(part, name))
        for name, seconds in part.parts.items():
            whole.parts[name] += seconds
    return whole


def synchronized(device: torch.device) -> float:
    """The time, when the device has nothing left to do."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()

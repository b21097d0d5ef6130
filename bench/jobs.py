"""Jobs for a scheduler: prompts, requests, and slices of a run through them."""

from __future__ import annotations

import inspect
import math
import random
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import rich
from rich.segment import Segment
from rich.table import Table
from specdec import Request, Scheduler, Stats
from specdec.result import FinishReason
from transformers import PreTrainedTokenizerBase

from specdec_kernels import SamplingParams

# Prompts are source code of rich, an installed package (MIT licence), which is not among what the embedded pair was
# trained on: Python's standard library.
LINES = 60  # of a source file that a prompt is cut from
# What is edited, the names that the edit replaces, and how many lines of the result the prompt shows.
EDITS: tuple[tuple[Callable, dict[str, str], int], ...] = (
    (Table._collapse_widths, {"widths": "sizes", "wrapable": "flexible"}, 8),
    (Segment.split_and_crop_lines, {"line": "row", "segment": "part"}, 8),
)


def editing() -> list[str]:
    """A function, and the beginning of the same with names replaced: most of what follows stands in the prompt."""
    prompts = []
    for function, names, lines in EDITS:
        before = after = inspect.getsource(function)
        for old, new in names.items():
            after = after.replace(old, new)
        prompts.append(f"{before}\n\n# The same, renamed.\n{''.join(after.splitlines(True)[:lines])}")
    return prompts


def skewed_lengths(count: int, least: int = 8, most: int = 256, median: float = 48.0, seed: int = 0) -> list[int]:
    """Log-normal, so that a few are many times the median, as lengths of answers are."""
    draw = random.Random(seed)
    return [min(max(round(draw.lognormvariate(math.log(median), 1.0)), least), most) for _ in range(count)]


def unseen_code(tokenizer: PreTrainedTokenizerBase, lengths: Sequence[int], seed: int = 0) -> list[list[int]]:
    """Prompts of so many tokens, from anywhere in the modules of rich."""
    draw = random.Random(seed)
    files = sorted(Path(rich.__file__).parent.glob("*.py"))
    prompts: list[list[int]] = []
    while len(prompts) < len(lengths):
        lines = draw.choice(files).read_text(encoding="utf-8").splitlines(True)
        first = draw.randrange(max(len(lines) - LINES, 1))
        ids = tokenizer("".join(lines[first : first + LINES])).input_ids[: lengths[len(prompts)]]
        if len(ids) == lengths[len(prompts)]:
            prompts.append(ids)
    return prompts


def fixed_length(prompts: Sequence[list[int]], lengths: Sequence[int], temperature: float) -> list[Request]:
    """Requests for exactly so many tokens each, without an end-of-sequence token."""
    params, pairs = SamplingParams(temperature=temperature), zip(prompts, lengths, strict=True)
    return [Request(p, n, params, seed=i, eos_token_id=[], id=i) for i, (p, n) in enumerate(pairs)]


@dataclass
class Slice:
    """A part of a job."""

    rows: int
    seconds: float = 0.0
    tokens: int = 0
    steps: int = 0
    row_steps: float = 0.0  # live rows, summed over the steps
    parts: dict[str, float] = field(default_factory=dict)  # seconds, as ``Stats.seconds`` has them

    def __add__(self, other: Slice) -> Slice:
        parts = {name: seconds + other.parts.get(name, 0.0) for name, seconds in self.parts.items()}
        numbers = (getattr(self, n) + getattr(other, n) for n in ("seconds", "tokens", "steps", "row_steps"))
        return Slice(self.rows, *numbers, parts)

    @property
    def speed(self) -> float:
        return self.tokens / self.seconds

    @property
    def busy(self) -> float:
        return self.row_steps / (self.steps * self.rows)

    @property
    def decode(self) -> float:
        """Seconds without those that read prompts."""
        return self.seconds - self.parts["prefill"]

    @property
    def forwards(self) -> float:
        """Seconds in the models, without those that read prompts."""
        return sum(self.parts[name] for name in ("draft_forwards", "target_forwards", "replays"))


class Job:
    """Requests through one scheduler. A job may stop between two steps and go on later, so two can take turns.

    Args:
        whole_batches: as many requests as there are rows begin together, and the next ones when the last of these has
            ended.
        load: how many requests the scheduler has at one time; None: always some that wait.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        requests: Iterable[Request],
        whole_batches: bool = False,
        load: int | None = None,
    ):
        self.scheduler, self.whole_batches, self.load = scheduler, whole_batches, load
        self.rows = scheduler.usage.rows
        self.texts: dict[object, list[int]] = {}  # by the request's ``id``
        self.stats: list[Stats] = []
        self._coming = deque(requests)

    @property
    def done(self) -> bool:
        return not self._coming and self.scheduler.idle

    @property
    def total(self) -> Stats:
        return Stats.total(self.stats, len(self.stats[0].drafted_by_position))

    def run(self, ended: int | None = None, seconds: float = math.inf) -> Slice:
        """Goes on until so many more requests have ended, or for so many seconds; by default to the end.

        Raises:
            RuntimeError: a request ended in another way than with its length.
        """
        scheduler, timer = self.scheduler, self.scheduler.batch.timer
        part = Slice(self.rows)
        timer.lap("loop")  # what others did meanwhile
        before, parts, begun = scheduler.usage, dict(timer.seconds), time.perf_counter()
        goal = math.inf if ended is None else len(self.stats) + ended
        while not self.done and len(self.stats) < goal and time.perf_counter() - begun < seconds:
            usage = scheduler.usage
            if scheduler.idle or not self.whole_batches:
                free = (self.rows if self.whole_batches else 2 * self.rows + 1) - usage.waiting
                if self.load is not None:
                    free = self.load - usage.live - usage.prefilling - usage.waiting
                for _ in range(min(free, len(self._coming))):
                    scheduler.submit(self._coming.popleft())
            for output in scheduler.step():
                part.tokens += len(output.tokens)
                sequence, reason = output.sequence, output.finish_reason
                if reason == FinishReason.LENGTH:
                    self.texts[sequence.request.id] = sequence.tokens
                    self.stats.append(sequence.stats)
                elif reason is not None:
                    raise RuntimeError(f"request {sequence.request.id}: {reason} {sequence.error or ''}")
        part.seconds = time.perf_counter() - begun
        after = scheduler.usage
        part.steps = after.steps - before.steps
        part.row_steps = (after.steps * after.busy - before.steps * before.busy) * self.rows
        part.parts = {name: seconds - parts[name] for name, seconds in timer.seconds.items()}
        return part

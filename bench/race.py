"""The runner of what decodes: ways to decode do the same requests at the same time, in turns of a tenth of a second.

The speed of a shared machine changes within seconds, so every way has its turn in each of them.
"""

from __future__ import annotations

import gc
import math
import random
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import report
import rich
from measure import PLAIN, in_turns, ratios, summary
from specdec import Request, Scheduler, SpeculativeDecoder, Stats, load_embedded_pair
from specdec.models.load.loading import Pair
from specdec.result import FinishReason
from transformers import PreTrainedTokenizerBase

from specdec_kernels import SamplingParams

TURN = 0.1  # seconds
LINES = 60  # of a source file that a prompt is cut from
PROMPT_TOKENS, NEW_TOKENS = 32, (32, 96)  # of the shortest and the longest text


# ---- What is asked for


def unseen_code(tokenizer: PreTrainedTokenizerBase, count: int, tokens: int = PROMPT_TOKENS) -> list[list[int]]:
    """Prompts of so many tokens, from anywhere in the modules of rich: an installed package (MIT licence), which is not
    among what the embedded pair was trained on, Python's standard library."""
    draw = random.Random(0)
    files = sorted(Path(rich.__file__).parent.glob("*.py"))
    prompts: list[list[int]] = []
    while len(prompts) < count:
        lines = draw.choice(files).read_text(encoding="utf-8").splitlines(True)
        first = draw.randrange(max(len(lines) - LINES, 1))
        ids = tokenizer("".join(lines[first : first + LINES])).input_ids[:tokens]
        if len(ids) == tokens:
            prompts.append(ids)
    return prompts


def spread_lengths(count: int, shortest: int, longest: int) -> list[int]:
    """Evenly spread numbers of new tokens, in an order that does not change. Texts of one length would favour plain
    decoding, with which alone all rows end in the same step, so that none of them is ever idle."""
    found = [shortest + round(i * (longest - shortest) / max(count - 1, 1)) for i in range(count)]
    random.Random(0).shuffle(found)
    return found


# ---- One way to decode


@dataclass(frozen=True)
class Contender:
    decoder: SpeculativeDecoder
    num_drafts: int | None = None  # that each of its requests asks for; None: as the decoder has it


@dataclass
class Slice:
    """What a contender did in some of its turns."""

    seconds: float = 0.0
    tokens: int = 0
    parts: dict[str, float] = field(default_factory=dict)  # seconds, as ``Stats.seconds`` has them

    def __add__(self, other: Slice) -> Slice:
        parts = {name: seconds + other.parts.get(name, 0.0) for name, seconds in self.parts.items()}
        return Slice(self.seconds + other.seconds, self.tokens + other.tokens, parts)


class Job:
    """Requests through one scheduler. A job may stop between two steps and go on later, so several can take turns.

    Args:
        load: how many requests the scheduler has at one time; None: always some that wait.
    """

    def __init__(self, scheduler: Scheduler, requests: Iterable[Request], load: int | None = None):
        self.scheduler, self.load = scheduler, load
        self.texts: dict[object, list[int]] = {}  # by the request's ``id``
        self.stats: list[Stats] = []
        self._coming = deque(requests)

    @property
    def done(self) -> bool:
        return not self._coming and self.scheduler.idle

    @property
    def total(self) -> Stats:
        return Stats.total(self.stats, len(self.stats[0].drafted_by_position))

    def run(self, seconds: float = math.inf) -> Slice:
        """Goes on for so many seconds; by default to the end.

        Raises:
            RuntimeError: a request ended in another way than with its length.
        """
        scheduler, timer = self.scheduler, self.scheduler.batch.timer
        timer.lap("loop")  # what others did meanwhile
        part, before, begun = Slice(), dict(timer.seconds), time.perf_counter()
        while not self.done and time.perf_counter() - begun < seconds:
            usage = scheduler.usage
            there = usage.live + usage.prefilling + usage.waiting
            free = 2 * usage.rows + 1 - usage.waiting if self.load is None else self.load - there
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
        part.parts = {name: spent - before[name] for name, spent in timer.seconds.items()}
        return part


# ---- The race


def race(
    contenders: Mapping[str, Contender], requests: Sequence[Request], rows: int, rounds: int, rule: str,
    load: int | None = None,
) -> dict[str, dict[str, object]]:  # fmt: skip
    """Each contender does all requests once a round. One more round comes first: it warms up, and an adaptive K learns
    step times and acceptance in it. Those of ``PLAIN`` are what the others are compared with.

    Returns:
        for each contender summaries of tokens a second and of its ratio to plain decoding by round; tau, alpha, steps
        by K and the learned costs of steps; ``texts_as_plain``, the share of texts that are those of plain decoding
        (forwards of other shapes round differently); and ``parts``, the seconds of a token by part of the loop.

    Raises:
        RuntimeError: a greedy text is not that of plain decoding.
    """
    longest = max(len(r.prompt) + r.max_new_tokens for r in requests)
    schedulers = {n: Scheduler(c.decoder, rows=rows, max_length=longest, rule=rule) for n, c in contenders.items()}
    asked = {n: [r if c.num_drafts is None else replace(r, num_drafts=c.num_drafts) for r in requests]
             for n, c in contenders.items()}  # fmt: skip
    slices: dict[str, list[Slice]] = {name: [] for name in contenders}
    jobs: dict[str, Job] = {}
    gc.collect()  # of all that was imported takes 0.3 s, which would fall into somebody's turn
    for _ in range(1 + rounds):
        jobs = {name: Job(scheduler, asked[name], load) for name, scheduler in schedulers.items()}
        ran = dict.fromkeys(jobs, Slice())
        while unfinished := [name for name, job in jobs.items() if not job.done]:
            for name in in_turns(unfinished, len(unfinished)):
                ran[name] = jobs[name].run(TURN) + ran[name]
        for name, of_round in ran.items():
            slices[name].append(of_round)
            if jobs[name].texts != jobs[PLAIN].texts and all(r.params.temperature == 0 for r in requests):
                raise RuntimeError(f"{name}: a greedy text differs from that of plain decoding")
    texts = jobs[PLAIN].texts
    speeds = {name: [s.tokens / s.seconds for s in ran[1:]] for name, ran in slices.items()}
    return {
        name: {
            "tokens_per_second": summary(speeds[name]),
            "times_plain": ratios(speeds[name], speeds[PLAIN]),
            "tau": (total := jobs[name].total).tau,
            "alpha": total.alpha,
            "steps_by_drafts": total.steps_by_drafts,
            "step_costs": contenders[name].decoder.costs_of(rows),
            "texts_as_plain": statistics.mean(jobs[name].texts[i] == text for i, text in texts.items()),
            "parts": {p: statistics.median(s.parts[p] / s.tokens for s in slices[name][1:]) for p in ran[name].parts},
        }
        for name in contenders
    }


# ---- Cases as data


@dataclass(frozen=True)
class Case:
    """A row of the results: so many requests through schedulers with so many rows."""

    rows: int
    temperature: float
    count: int
    load: int | None = None


def run_cases(
    results: report.Report, cases: Iterable[Case], contenders: Callable[[Pair], Mapping[str, Contender]],
    rounds: int, rule: str, new_tokens: tuple[int, int] = NEW_TOKENS,
) -> None:  # fmt: skip
    """Races new contenders over the embedded pair in each case. Texts have exactly their length."""
    pair = load_embedded_pair(device=results.device)
    for case in cases:
        prompts, lengths = unseen_code(pair[2], case.count), spread_lengths(case.count, *new_tokens)
        params, pairs = SamplingParams(case.temperature), zip(prompts, lengths, strict=True)
        requests = [Request(p, n, params, seed=i, eos_token_id=[], id=i) for i, (p, n) in enumerate(pairs)]
        found = race(contenders(pair), requests, case.rows, rounds, rule, case.load)
        about: dict[str, object] = {"rows": case.rows, "temperature": case.temperature} | (
            {} if case.load is None else {"load": case.load}
        )
        about |= {"prompts": case.count, "prompt_tokens": PROMPT_TOKENS, "new_tokens": new_tokens}
        results.add(about | {"methods": found})
        lines = [{"method": name, **method} for name, method in found.items()]
        title = ", ".join(f"{name} {value}" for name, value in about.items())
        results.show(title, lines, ("method", "tokens_per_second", "times_plain", "tau"))
    results.finish()

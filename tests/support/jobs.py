"""Runs jobs in tests: input files, the command, and a scheduler that decodes nothing."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from specdec import Request, SequenceState
from specdec.cli import models
from specdec.result import FinishReason, Producer
from specdec.stats import Stats

from .commands import invoke

PROMPTS = [{"id": f"p{i}", "prompt": f"x{i} = {'y' * i}"} for i in range(12)]
TOKENS = 6  # in a text, unless its limit is lower


class FakeScheduler:
    """A text depends on prompt and settings alone, and the order in which texts end on ``order`` alone."""

    order = 0
    drafter_error: str | None = None
    made: list[FakeScheduler] = []

    def __init__(self, decoder, *, rows: int = 8, **options: object):
        self.decoder, self.rows, self.options = decoder, rows, options
        self.requests: list[Request] = []
        self.usage = SimpleNamespace(busy=0.75)
        self.closed = False
        type(self).made.append(self)

    def run(self, requests: Iterable[Request]) -> Iterator[SequenceState]:
        drawn, rows, rng = iter(requests), [], random.Random(self.order)
        while True:
            while len(rows) < self.rows and (request := next(drawn, None)) is not None:
                self.requests.append(request)
                rows.append(request)
            if not rows:
                return
            request = rows.pop(rng.randrange(len(rows)))
            yield outcome(request, len(self.requests))

    def close(self) -> None:
        self.closed = True


def outcome(request: Request, number: int = 0) -> SequenceState:
    stats = Stats.empty(2)
    stats.seconds["total"] = random.random()  # differs from run to run, and must not be written
    stats.draft_forwards = number
    if not request.prompt:
        error = "prompt: got no token, allowed: at least one token"
        return SequenceState.refused(request, ValueError(error))
    known = random.Random(repr((request.prompt, request.seed, request.params)))
    tokens = [known.randrange(300, 4000) for _ in range(min(TOKENS, request.max_new_tokens))]
    for _ in tokens:
        stats.record(2, 1, 0, 1, number)
    ended = SequenceState(number, request, list(request.prompt), [], stats=stats, finish_reason=FinishReason.LENGTH)
    ended.text += tokens
    ended.produced_by += [Producer.RECOVERED] * len(tokens)
    return ended


def write_prompts(path: Path, lines: Iterable[object]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def job(input_file: object, output: object, *options: object):
    return invoke("generate", "--batch-file", input_file, "--output", output, *options)


def finished(input_file: object, output: Path, *options: object, exit_code: int = 0) -> list[bytes]:
    """The job's lines, sorted."""
    result = job(input_file, output, *options)
    assert result.exit_code == exit_code, result.output
    assert result.stdout == ""
    return sorted(output.read_bytes().splitlines(keepends=True))


def job_refused(*args: object) -> str:
    """The error message of a job that is refused, in one line."""
    result = job(*args)
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    return " ".join(result.stderr.partition("Error: ")[2].split())


def use_fake(monkeypatch: pytest.MonkeyPatch, pair: tuple) -> type[FakeScheduler]:
    """Gives the command a scheduler that decodes nothing, and the embedded pair that is loaded already."""
    monkeypatch.setattr("specdec.serving.scheduler.Scheduler", FakeScheduler)
    monkeypatch.setattr(FakeScheduler, "made", [])
    monkeypatch.setattr(FakeScheduler, "order", 0)
    monkeypatch.setattr(models, "load", lambda *_: models.Models(*pair, None))
    return FakeScheduler

"""The process in which grammars are tried before another one compiles them.

llguidance can overflow its stack, or take gigabytes and minutes, within every limit that it has. So a small process
reads the vocabulary once, and forks for each grammar: what the fork does to itself ends the fork, by limits that the
kernel keeps even if everybody else has ended. Lines of JSON come in, one for each grammar, and go out, one for each
verdict. It imports no torch, so it starts in a tenth of a second. It ends when its standard input does.
"""

from __future__ import annotations

import json
import os
import select
import signal
import sys
import threading
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from .grammar_fork import TOO_DEEP, TOO_MUCH, held, limit, verdict
from .grammar_limits import LANES, Lane

if TYPE_CHECKING:
    from llguidance import LLTokenizer


@dataclass
class _Trial:
    asked: dict[str, Any]
    pid: int
    answers: int  # a pipe's end
    held: int  # bytes, before it began


@dataclass
class _Lane:
    """One grammar at a time. All begin in the first lane, and what takes longer begins again in the next one, so that
    such grammars hold up each other and nobody else."""

    limits: Lane
    waiting: deque[dict[str, Any]] = field(default_factory=deque)
    running: _Trial | None = None


def main() -> None:
    """Reads and answers until standard input ends."""
    chunks = []
    while b"\n" not in (chunk := os.read(0, 1 << 20)):  # not through a file, which would read on
        if not chunk:
            return
        chunks.append(chunk)
    first, _, unread = chunk.partition(b"\n")
    vocabulary = None
    if given := json.loads(b"".join((*chunks, first))):
        from llguidance import LLTokenizer

        vocabulary = LLTokenizer(given["tokenizer"], n_vocab=given["vocab_size"], eos_token=given["eos"])
    _Trials(vocabulary).serve(unread)


class _Trials:
    def __init__(self, vocabulary: LLTokenizer | None):
        import llguidance  # noqa: F401  # once, here, and not in each fork

        self._vocabulary = vocabulary
        self._lanes = [_Lane(limits) for limits in (LANES[:1] if vocabulary is None else LANES)]

    def serve(self, unread: bytes) -> None:
        while True:
            *lines, unread = unread.split(b"\n")
            for line in lines:
                self._take(json.loads(line))
            for lane in self._lanes:
                if lane.running is None and lane.waiting:
                    self._begin(lane)
            running = {lane.running.answers: lane for lane in self._lanes if lane.running is not None}
            ready, _, _ = select.select([0, *running], [], [])
            for answers in ready:
                if answers in running:
                    self._end(running[answers])
            if 0 in ready:
                came = os.read(0, 1 << 20)
                if not came:
                    return self._stop()
                unread += came

    def _take(self, asked: dict[str, Any]) -> None:
        if "grammar" in asked:
            return self._lanes[0].waiting.append(asked)
        for lane in self._lanes:  # those who asked have left
            lane.waiting = deque(other for other in lane.waiting if other["id"] != asked["id"])
            if lane.running is not None and lane.running.asked["id"] == asked["id"]:
                os.kill(lane.running.pid, signal.SIGKILL)

    def _begin(self, lane: _Lane) -> None:
        asked, (answers, mine), before = lane.waiting.popleft(), os.pipe(), held()
        if pid := os.fork():
            os.close(mine)
            lane.running = _Trial(asked, pid, answers, before.resident)
            return
        try:
            limit(lane.limits, before.mapped)
            told: list[str] = []
            thread = threading.Thread(target=lambda: told.append(verdict(self._vocabulary, asked["grammar"])))
            thread.start()
            thread.join()
            os.write(mine, json.dumps(told[0][:1000]).encode())
        finally:
            os._exit(0)

    def _end(self, lane: _Lane) -> None:
        trial, lane.running = lane.running, None
        assert trial is not None
        with open(trial.answers, "rb") as pipe:
            answer = pipe.read()
        _, status, used = os.wait4(trial.pid, 0)
        killer = os.WTERMSIG(status) if os.WIFSIGNALED(status) else None
        if killer == signal.SIGPROF and lane is not self._lanes[-1]:
            self._lanes[self._lanes.index(lane) + 1].waiting.append(trial.asked)
            return
        words = json.loads(answer) if answer else TOO_MUCH.get(killer or 0, TOO_DEEP)
        told = {"id": trial.asked["id"], "words": words, "limit": words in (*TOO_MUCH.values(), TOO_DEEP)}
        told |= {"seconds": used.ru_utime + used.ru_stime, "bytes": max(0, (used.ru_maxrss << 10) - trial.held)}
        sys.stdout.write(json.dumps({**told, "final": killer != signal.SIGALRM}) + "\n")
        sys.stdout.flush()

    def _stop(self) -> None:
        for lane in self._lanes:
            if lane.running is not None:
                os.kill(lane.running.pid, signal.SIGKILL)

"""Rounds in which methods take turns, and the search for the fastest setting of each in short ones."""

from __future__ import annotations

import math
from collections.abc import Sequence, Sized
from typing import Protocol, TypeVar

from .contenders import Contender, Prompt
from .work_counter import Work

Asked = TypeVar("Asked", bound=Sized)
Done = TypeVar("Done")
_Taken = TypeVar("_Taken", contravariant=True)
_Made = TypeVar("_Made", covariant=True)


class Player(Protocol[_Taken, _Made]):
    """Takes its turns in a round: a :class:`~specdec.evaluation.contenders.Contender`, or what asks more of one."""

    def run(self, batch: _Taken, seed: int, /) -> _Made: ...


def play_round(
    methods: Sequence[Player[Asked, Done]], batches: Sequence[Asked], seed: int, work: Work, first: int = 0
) -> list[list[Done]]:
    """Returns what was done by method and batch. The methods take turns batch by batch, so that whatever else the
    machine does slows all of them alike, and another one begins each time, so that none always comes after the same.

    Args:
        seed: of the first prompt; the next one has the next.
        first: the place of the method that begins with the first batch.
    """
    runs: list[list[Done]] = [[] for _ in methods]
    for i, batch in enumerate(batches):
        for turn in range(len(methods)):
            at = (first + i + turn) % len(methods)
            runs[at].append(methods[at].run(batch, seed))
            work.did_one()
        seed += len(batch)
    return runs


def fastest(
    groups: Sequence[Sequence[Contender]], prompts: Sequence[Prompt], seed: int, work: Work
) -> list[tuple[int, dict[str, float] | None]]:
    """Finds the fastest method of each group by successive halving (Jamieson and Talwalkar, arXiv 1502.07943): all
    methods play a round, the slower half of each group drops out, and so on until each group has one left. The methods
    of all groups take turns, and the best time of each prompt counts.

    Args:
        groups: the same method with different settings, at least one in each group.
        prompts: at least one. A prompt has the same seed in every round, so a method's text is the same.
        work: is told of every run, ``runs_to_halve`` of them for each prompt.

    Returns:
        For each group the index of the fastest, and the tokens per second of each by its setting; None instead of
        these where the group has only one, which is not run.
    """
    best = {method: [math.inf] * len(prompts) for group in groups for method in group}
    emitted = dict.fromkeys(best, 0)

    def speed(method: Contender) -> float:
        return emitted[method] / sum(best[method])

    left = [list(group) for group in groups]
    while racing := [method for group in left if len(group) > 1 for method in group]:
        for method, runs in zip(racing, play_round(racing, [[prompt] for prompt in prompts], seed, work), strict=True):
            best[method] = [min(known, run.seconds) for known, run in zip(best[method], runs, strict=True)]
            emitted[method] = sum(run.emitted for run in runs)
        left = [
            sorted(group, key=speed, reverse=True)[: _half(len(group))] if len(group) > 1 else group for group in left
        ]
    found: list[tuple[int, dict[str, float] | None]] = []
    for group, (winner,) in zip(groups, left, strict=True):
        speeds = (
            {str(next(iter(method.setting.values()))): speed(method) for method in group} if len(group) > 1 else None
        )
        found.append((group.index(winner), speeds))
    return found


def runs_to_halve(size: int) -> int:
    """How many runs ``fastest`` makes for each prompt in a group of ``size`` methods."""
    return 0 if size == 1 else size + runs_to_halve(_half(size))


def _half(size: int) -> int:
    return (size + 1) // 2

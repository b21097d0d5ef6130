"""Measures the cells of a grid in turns, round by round."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from transformers import PreTrainedModel

from ...checks import refuse
from ...drafters.protocol import Drafter
from ...loop.draft_length import AdaptiveDrafts
from ..contenders import CompareSettings, Contender, Run, SpecdecMethod, TransformersMethod
from ..near_ties import Judge
from ..rounds import Player, play_round
from ..work_counter import Tell, Work
from .grid import ASSISTED, PLAIN, TRANSFORMERS, BenchCell, Grid, Setting
from .measure import BenchPrompt, Peak, measured

Batch = Sequence[BenchPrompt]


class Timed(Protocol):
    """What a cell did with a batch: a run, or several."""

    @property
    def seconds(self) -> float: ...
    @property
    def emitted(self) -> int: ...


OnRun = Callable[[BenchCell, int, Batch, Timed], None]


@dataclass(frozen=True)
class BenchSettings:
    """
    Attributes:
        repeats: rounds of each setting.
        warm_up: prompts that each cell continues before the first round; they do not count.
        seconds_limit: no round begins that would probably end after so many seconds; None: no limit. Each run of the
            command measures one round at least.
    """

    max_new_tokens: int = 64
    repeats: int = 5
    warm_up: int = 1
    seed: int = 0
    seconds_limit: float | None = None


class Session:
    """
    Args:
        make: returns what runs a cell.
        prompts: at least one.
        done: rounds that were measured before, as (setting's name, round).
        clock: seconds.
    """

    def __init__(
        self,
        target: PreTrainedModel,
        make: Callable[[BenchCell], Contender],
        grid: Grid,
        prompts: Sequence[BenchPrompt],
        settings: BenchSettings,
        done: Sequence[tuple[str, int]] = (),
        clock: Callable[[], float] = time.monotonic,
    ):
        self._grid, self._settings = grid, settings
        self.prompts = list(prompts)
        self._clock, self._began, self._judge = clock, clock(), Judge(target)
        self.device, self.peak = target.device, Peak(target.device)
        units = [(s, r) for r in range(settings.repeats) for s in grid.settings() if (s.name, r) not in {*done}]
        self.units: list[tuple[Setting, int]] = units
        left = {setting for setting, _ in units}
        self._methods = {c: make(c) for setting in grid.settings() if setting in left for c in grid.cells(setting)}
        self._seconds: dict[Setting, float] = {}  # that a round takes, as far as is known

    @property
    def cells(self) -> int:
        """How many are measured."""
        return len(self._methods)

    @property
    def what(self) -> list | dict:
        """For JSON: all that makes the texts of one session comparable to those of another, but for models and grid."""
        return [[p.id, p.category, p.tokens] for p in self.prompts]

    @property
    def positions(self) -> int | None:
        """That a prompt and its text have in all methods; None: as many as there is memory for."""
        limits = [m.decoder.max_length for m in self._methods.values() if isinstance(m, SpecdecMethod)]
        return min((n for n in limits if n is not None), default=None)

    def fit(self, cut: bool) -> None:
        """Refuses prompts that leave no room for the new tokens, or with ``cut`` takes as many of their last tokens as
        fit. Raises ValueError naming ``input_ids``."""
        most, new = self.positions, self._settings.max_new_tokens
        for i, prompt in enumerate(self.prompts):
            if most is None or len(prompt.tokens) + new <= most:
                continue
            if not cut or most <= new:
                given = f"prompt {prompt.id!r} of {len(prompt.tokens)} tokens, and {new} new ones"
                allowed = f"{most} tokens in all, the positions of the models"
                refuse("input_ids", given, f"{allowed}; --cut-prompts cuts prompts at their beginning")
            self.prompts[i] = dataclasses.replace(prompt, tokens=prompt.tokens[new - most :])

    @property
    def seconds(self) -> float | None:
        """How long the rounds will take that begin in time, as far as ``warm_up`` tells; None: it ran nothing."""
        if not self._seconds:
            return None
        whole = 0.0
        for i, (setting, _) in enumerate(self.units):
            if i > 0 and self._too_late(setting, whole):
                break
            whole += self._seconds[setting]
        return whole

    def warm_up(self, tell: Tell) -> None:
        """Runs every cell a few times, and learns how long rounds will take. Texts may end early and prompts be long,
        so the cells of a setting begin with prompts from all over the set: together they take what its mean takes."""
        count = self._settings.warm_up
        if count == 0:
            return
        work = Work(tell, len(self._methods) * count)
        work.begin("warming up")
        for setting in dict.fromkeys(setting for setting, _ in self.units):
            batches, cells, seconds = self._batches(setting.batch), self._grid.cells(setting), 0.0
            full = [batch for batch in batches if len(batch) == setting.batch] or batches
            for number, cell in enumerate(cells):
                method, first = self._methods[cell], number * len(full) // len(cells)
                player = self._player(method)
                for i in range(count):
                    started = self._clock()  # the first run compiles, and fills caches
                    player.run(full[(first + i) % len(full)], self._settings.seed)
                    took = self._clock() - started
                    work.did_one()
                seconds += took
                if isinstance(method, SpecdecMethod):
                    self._settle(method, [[prompt.tokens for prompt in batch] for batch in batches])
            self._seconds[setting] = seconds * len(batches)

    def rounds(self, tell: Tell, on_run: OnRun | None = None) -> Iterator[dict]:
        """Measures round after round, and yields each as it ends, for JSON: "setting", "round", "greedy": whether the
        texts were compared, "cells": their measurements by id, and "differences" of texts from transformers' that were
        not seen before."""
        runs = {
            setting: len(self._batches(setting.batch)) * len(self._grid.cells(setting)) for setting, _ in self.units
        }
        work = Work(tell, sum(runs[setting] for setting, _ in self.units))
        for i, (setting, number) in enumerate(self.units):
            started = self._clock()
            if i > 0 and self._too_late(setting):
                return
            work.begin(f"round {number + 1} of {self._settings.repeats}, {setting.name}")
            yield self._round(setting, number, work, on_run)
            self._seconds[setting] = self._clock() - started

    def _too_late(self, setting: Setting, later: float = 0.0) -> bool:
        """Whether a round that began so many seconds from now would probably end after the limit."""
        limit = self._settings.seconds_limit
        ends = self._clock() - self._began + later + self._seconds.get(setting, 0.0)
        return limit is not None and ends > limit

    def _round(self, setting: Setting, number: int, work: Work, on_run: OnRun | None) -> dict:
        cells, batches = self._grid.cells(setting), self._batches(setting.batch)
        watched = [_Watched(self._player(self._methods[cell]), self.peak) for cell in cells]
        seed = self._settings.seed + number * len(self.prompts)
        played = play_round(watched, batches, seed, work, number)
        if on_run is not None:
            for i, batch in enumerate(batches):
                for cell, runs in zip(cells, played, strict=True):
                    on_run(cell, number, batch, runs[i])
        greedy = setting.temperature == 0
        return {
            "setting": setting.name,
            "round": number,
            "greedy": greedy,
            "cells": {
                cell.id: self._measured(runs, batches, max(method.peaks))
                for cell, method, runs in zip(cells, watched, played, strict=True)
            },
            "differences": self._differences(cells, batches, played) if greedy else [],
        }

    def _batches(self, size: int) -> list[Batch]:
        return [list(self.prompts[i : i + size]) for i in range(0, len(self.prompts), size)]

    # What a suite has otherwise, whose prompts are conversations.

    def _player(self, method: Contender) -> Player[Batch, Any]:
        return _Prompted(method)

    def _settle(self, method: SpecdecMethod, batches: Sequence[list[list[int]]]) -> None:
        method.settle(batches, self._settings.seed)

    def _measured(self, runs: Sequence[Any], batches: Sequence[Batch], peak_memory: int) -> dict:
        return measured(runs, batches, peak_memory)

    def _differences(
        self, cells: Sequence[BenchCell], batches: Sequence[Batch], played: Sequence[Sequence[Any]]
    ) -> list[dict]:
        """Between greedy texts and those of transformers' plain decoding, the first time that they are seen."""
        places = {prompt.id: i for i, prompt in enumerate(self.prompts)}
        at = next(i for i, cell in enumerate(cells) if cell.method == TRANSFORMERS)
        found = []
        for cell, runs in zip(cells, played, strict=True):
            for batch, plain, run in zip(batches, played[at], runs, strict=True):
                for prompt, first, second in zip(batch, plain.texts, run.texts, strict=True):
                    names = (cells[at].id, cell.id)
                    difference = self._judge.explain_once(prompt.tokens, first, second, names, places[prompt.id])
                    if difference is not None:
                        found.append({**dataclasses.asdict(difference), "prompt_id": prompt.id})
        return found


class _Prompted:
    """A method that continues prompts."""

    def __init__(self, method: Contender):
        self._method = method

    def run(self, batch: Batch, seed: int) -> Run:
        return self._method.run([prompt.tokens for prompt in batch], seed)


class _Watched:
    """What plays, with its memory watched."""

    def __init__(self, player: Player[Batch, Any], peak: Peak):
        self._player, self._peak = player, peak
        self.peaks: list[int] = []

    def run(self, batch: Batch, seed: int) -> Any:
        self._peak.reset()
        done = self._player.run(batch, seed)
        self.peaks.append(self._peak.read())
        return done


@dataclass
class Maker:
    """Makes methods of cells.

    Attributes:
        drafter: returns the drafter of a name. It is asked once for each name.
        assistant: for transformers' assisted generation.
    """

    target: PreTrainedModel
    drafter: Callable[[str], Drafter | None]
    assistant: PreTrainedModel | Literal["lookup"] | None
    max_new_tokens: int
    _drafters: dict[str, Drafter | None] = field(default_factory=dict)

    def make(self, cell: BenchCell) -> Contender:
        s = cell.setting
        settings = CompareSettings(self.max_new_tokens, s.temperature, rule=cell.rule, **s.filters)
        if cell.method == TRANSFORMERS:
            return TransformersMethod(self.target, None, settings)
        if cell.method == ASSISTED:
            number = cell.num_drafts if isinstance(cell.num_drafts, int) else None
            return TransformersMethod(self.target, self.assistant, settings, number)
        if cell.method == PLAIN:
            return SpecdecMethod(self.target, None, 0, settings)
        if cell.method not in self._drafters:
            self._drafters[cell.method] = self.drafter(cell.method)
        k = cell.num_drafts if isinstance(cell.num_drafts, int) else AdaptiveDrafts()
        made = SpecdecMethod(self.target, self._drafters[cell.method], k, settings, cell.tree)
        made.decoder.read_rule(cell.rule)  # refuses a rule that these drafts do not know, before anything runs
        return made

"""Measures specdec and transformers with the same models, prompts and settings, in turns within one process."""

from __future__ import annotations

import dataclasses
import os
import platform
import shlex
import statistics
import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
import transformers
from transformers import PreTrainedModel

from ..checks import refuse
from ..drafters.protocol import Drafter
from ..loop.draft_length import AdaptiveDrafts
from .contenders import OURS, CompareSettings, Contender, Prompt, Run, SpecdecMethod, TransformersMethod, assists
from .machine import cpu_name
from .near_ties import Difference, Judge
from .rounds import fastest, play_round, runs_to_halve
from .work_counter import Tell, Work, silent

# Numbers of drafts a step that are tried, by transformers and by specdec, where the caller chose none.
CANDIDATES = (1, 2, 3, 4, 6, 8)
PATHS = (2, 4, 6, 8)  # and of a tree, the most nodes of a path
# They are tried with this many prompts, and this many tokens after each.
FEW_PROMPTS, SHORT_TEXT = 4, 32


@dataclass(frozen=True)
class Spread:
    """One number for each round. Other work on the machine shows in single rounds, but hardly in the median."""

    per_round: list[float]

    def to_dict(self) -> dict:
        values = self.per_round
        return {"median": statistics.median(values), "min": min(values), "max": max(values), "per_round": values}


@dataclass(frozen=True)
class Measurement:
    """What one method did: ``rounds[r][i]`` continued prompt i in round r."""

    name: str
    setting: dict[str, int | str]
    swept: dict[str, float] | None  # setting -> tokens/s, where several were tried
    rounds: list[list[Run]]

    @property
    def seconds(self) -> Spread:
        """For all prompts together, in each round."""
        return Spread([sum(run.seconds for run in runs) for runs in self.rounds])

    @property
    def tokens_per_second(self) -> Spread:
        totals = zip(self.rounds, self.seconds.per_round, strict=True)
        return Spread([sum(run.emitted for run in runs) / seconds for runs, seconds in totals])

    def to_dict(self) -> dict:
        runs = [run for runs in self.rounds for run in runs]

        def total(name: str) -> float | None:
            values = [getattr(run, name) for run in runs]
            return None if None in values else sum(values)

        def ratio(part: float | None, whole: float | None) -> float | None:
            return part / whole if part is not None and whole else None

        seconds, speed = self.seconds.to_dict(), self.tokens_per_second.to_dict()
        result = {
            "name": self.name,
            **self.setting,
            "tokens_per_second": speed["median"],
            "seconds": seconds["median"],
            "acceptance_rate": ratio(total("accepted"), total("drafted")),
            "alpha": ratio(total("accepted"), total("tested")),
            "tau": ratio(total("emitted"), total("steps")),
            "loop_fraction": ratio(total("own_seconds"), total("seconds")),
            "spread": {"seconds": seconds, "tokens_per_second": speed},
        }
        return result | ({"swept": self.swept} if self.swept else {})


@dataclass(frozen=True)
class Comparison:
    measurements: list[Measurement]
    differences: list[Difference]  # between greedy texts and those of ``plain``
    greedy_equal: bool | None  # whether specdec and ``plain`` agree; None where the temperature is not 0
    environment: dict[str, object]

    def ratio(self, other: str, ours: str = OURS) -> Spread:
        """How many times faster specdec is, round by round."""
        by_name = {m.name: m.tokens_per_second.per_round for m in self.measurements}
        return Spread([a / b for a, b in zip(by_name[ours], by_name[other], strict=True)])

    @property
    def ratios_of(self) -> list[tuple[str, str]]:
        """What is compared with what: our methods with the others, and trees with chains."""
        names = [m.name for m in self.measurements]
        ours = [name for name in names if name.startswith(OURS)]
        pairs = [(mine, other) for mine in ours for other in names if other not in ours]
        return pairs + [(mine, OURS) for mine in ours if mine != OURS]

    @property
    def ours(self) -> list[Difference]:
        """The differences of our methods."""
        return [d for d in self.differences if _is_ours(d)]

    def to_dict(self) -> dict:
        return {
            "methods": [m.to_dict() for m in self.measurements],
            "ratios": {f"{ours}/{other}": self.ratio(other, ours).to_dict() for ours, other in self.ratios_of},
            "greedy_equal": self.greedy_equal,
            "differences": [dataclasses.asdict(d) for d in self.differences],
            "environment": self.environment,
        }


def compare(
    target: PreTrainedModel,
    draft: PreTrainedModel | Drafter | None,
    prompts: Sequence[Prompt],
    settings: CompareSettings | None = None,
    progress: Tell = silent,
    assistant: PreTrainedModel | Literal["lookup"] | None = None,
) -> Comparison:
    """Continues every prompt, one at a time, with the target alone (``plain``), with transformers' assisted
    generation (``assisted``) and with specdec, in turns, ``repeats`` rounds.

    Before that all methods warm up, and K is chosen in short rounds (:func:`specdec.evaluation.rounds.fastest`): for
    ``assisted`` the fastest of CANDIDATES and of transformers' default, for ``specdec`` the fastest of CANDIDATES and
    of a K that adapts, by the step times of the warm-up. If ``settings.num_drafts`` is a number, both have this K. If
    it is ``AdaptiveDrafts``, ``assisted`` has transformers' default. In both cases no other K is tried. With
    ``settings.tree`` there is also ``specdec-tree``, whose longest path is chosen in the same way.

    Args:
        target: on the device of ``draft``, where that is a model.
        draft: for specdec, as ``SpeculativeDecoder`` takes it.
        prompts: lists of token ids, at least one.
        settings: None is ``CompareSettings()``.
        progress: called with how many texts there are of how many, and of what kind the next ones are.
        assistant: for transformers: a model, or its prompt lookup. None: ``draft`` if that is a model; if it is not,
            ``assisted`` is left out. So it is, with a warning, for a target that transformers does not assist.

    Raises:
        ValueError: as ``SpeculativeDecoder``; also where ``prompts`` is empty.
    """
    settings = settings or CompareSettings()
    if not prompts:
        refuse("prompts", "none", "at least one")
    groups = _contenders(target, draft, settings, assistant)
    plain, few = TransformersMethod(target, None, settings), prompts[:FEW_PROMPTS]
    ours = [m for group in groups for m in group if isinstance(m, SpecdecMethod) and m.name == OURS]
    short = [[method.shortened(SHORT_TEXT) for method in methods] for methods in groups]
    halving = len(few) * sum(map(runs_to_halve, map(len, groups)))
    work = Work(progress, 3 + len(groups) + halving + settings.repeats * len(prompts) * (1 + len(groups)))
    work.begin("warming up")
    longest = [[max(prompts, key=len)]]
    first: list[Contender] = [ours[0], plain.shortened(SHORT_TEXT)]
    play_round(first, longest, settings.seed, work)  # refuses prompts that do not fit
    play_round([methods[0] for methods in short], longest, settings.seed, work)
    for method in ours:
        method.settle(longest, settings.seed)
    work.did_one()
    work.begin("looking for the best numbers of drafts")
    found = fastest(short, few, settings.seed, work)
    chosen: list[tuple[Contender, dict[str, float] | None]] = [(plain, None)]
    chosen += [(methods[best], swept) for methods, (best, swept) in zip(groups, found, strict=True)]

    methods, rounds, alone = [method for method, _ in chosen], [], [[prompt] for prompt in prompts]
    for r in range(settings.repeats):
        work.begin(f"round {r + 1} of {settings.repeats}")
        rounds.append(play_round(methods, alone, settings.seed + r * len(prompts), work, r))
    measurements = [
        Measurement(m.name, m.setting, swept, [by_method[i] for by_method in rounds])
        for i, (m, swept) in enumerate(chosen)
    ]
    greedy = settings.temperature == 0
    judge = Judge(target, settings.repetition_penalty)
    differences = _differences(measurements, prompts, judge) if greedy else []
    equal = not any(map(_is_ours, differences))
    return Comparison(measurements, differences, equal if greedy else None, environment(target))


def _contenders(
    target: PreTrainedModel,
    draft: PreTrainedModel | Drafter | None,
    settings: CompareSettings,
    assistant: PreTrainedModel | Literal["lookup"] | None,
) -> list[Sequence[Contender]]:
    """The methods of which one each is measured beside ``plain``: those of transformers, ours, and our trees."""
    asked = settings.num_drafts
    groups: list[Sequence[Contender]] = []
    if assistant is None and isinstance(draft, PreTrainedModel):
        assistant = draft
    if assistant is not None and assists(target, lambda told: warnings.warn(told, RuntimeWarning, 3)):
        numbers = (None,) if isinstance(asked, AdaptiveDrafts) else (*CANDIDATES, None) if asked is None else (asked,)
        groups.append([TransformersMethod(target, assistant, settings, k) for k in numbers])
    lengths = (*CANDIDATES, AdaptiveDrafts()) if asked is None else (asked,)
    groups.append([SpecdecMethod(target, draft, k, settings) for k in lengths])
    if settings.tree is not None:
        depths = PATHS if asked is None else (asked,)
        groups.append([SpecdecMethod(target, draft, k, settings, settings.tree) for k in depths])
    return groups


def _is_ours(difference: Difference) -> bool:
    return any(name.startswith(OURS) for name in difference.methods)


def _differences(measurements: Sequence[Measurement], prompts: Sequence[Prompt], judge: Judge) -> list[Difference]:
    """Every place where a method's text differs from that of ``plain`` in any round, once."""
    plain = measurements[0]
    found = [
        judge.explain_once(prompts[i], a.texts[0], b.texts[0], (plain.name, other.name), i)
        for other in measurements[1:]
        for ours, theirs in zip(plain.rounds, other.rounds, strict=True)
        for i, (a, b) in enumerate(zip(ours, theirs, strict=True))
    ]
    return [difference for difference in found if difference is not None]


def environment(target: PreTrainedModel) -> dict[str, object]:
    """What the numbers depend on besides the code."""
    cuda = target.device.type == "cuda"
    return {
        "cpu": cpu_name(),
        "cpu_count": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name(target.device) if cuda else None,
        "device": str(target.device),
        "dtype": str(target.dtype).removeprefix("torch."),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "command": shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]),
    }

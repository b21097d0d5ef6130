"""The results of a benchmark: the contents of results.json."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence

from ..theory_table import rows_of
from .grid import PLAIN, TRANSFORMERS, Cell, Grid
from .verdicts import quartiles, ratios, summary, verdict

FORMAT = "specdec bench 1"


def results(header: Mapping, grid: Grid, rounds: Sequence[Mapping]) -> dict:
    """
    Args:
        header: what holds for all rounds: environment, models, settings and prompts.
        rounds: as :class:`~specdec.evaluation.bench.session.Session` returns them.

    Returns:
        As docs/bench.md describes it. Cells without a round are left out.
    """
    by_setting = {setting: [r for r in rounds if r["setting"] == setting.name] for setting in grid.settings()}
    cells, verdicts = [], []
    for setting, played in by_setting.items():
        if not played:
            continue
        of_setting = grid.cells(setting)
        by_id = {cell.id: [r["cells"][cell.id] for r in played] for cell in of_setting}
        speeds = {name: [each["tokens_per_second"] for each in of_cell] for name, of_cell in by_id.items()}
        cells += [_cell(cell, of_setting, by_id[cell.id], speeds) for cell in of_setting]
        verdicts.append(verdict(setting, of_setting, speeds))
    predictions = {row.cell: row.predicted for row in rows_of(cells)}
    for cell in cells:
        cell["predicted"] = predictions.get(cell["id"])
    differences: list[dict] = []
    for each in (each for r in rounds for each in r["differences"]):
        if each not in differences:  # a run that goes on does not know which were found before
            differences.append(each)
    greedy = any(r["greedy"] for r in rounds)
    ours = {cell.id for cell in grid.all_cells() if cell.ours}
    return {
        "format": FORMAT,
        **{name: header[name] for name in ("environment", "models", "settings", "prompts")},
        "cells": cells,
        "verdicts": verdicts,
        "greedy": {
            "equal": not any(ours & {*each["methods"]} for each in differences) if greedy else None,
            "differences": differences,
        },
        "samples": [each for r in rounds for each in r["samples"]],
    }


def _cell(
    cell: Cell, of_setting: Sequence[Cell], rounds: Sequence[Mapping], speeds: Mapping[str, Sequence[float]]
) -> dict:
    own = speeds[cell.id]
    baselines = {c.method: ratios(own, speeds[c.id]) for c in of_setting if c.method in (PLAIN, TRANSFORMERS)}
    first, gaps = (_joined(rounds, name) for name in ("time_to_first_token", "inter_token"))
    per_token = [r["time_per_output_token"] for r in rounds if r["time_per_output_token"] is not None]
    memory = [r["peak_memory"] for r in rounds if r["peak_memory"] is not None]
    return {
        **cell.to_dict(),
        "rounds": list(rounds),
        "tokens_per_second": {**_spread(own), "min": min(own), "max": max(own)},
        "time_to_first_token": _tail(first),
        "time_per_output_token": _spread(per_token) if per_token else None,
        "inter_token": _tail(gaps),
        "acceptance_rate": _ratio(rounds, "accepted", "drafted"),
        "alpha": _ratio(rounds, "accepted", "tested"),
        "tau": _ratio(rounds, "tokens", "steps"),
        "accepted_by_position": _accepted(rounds),
        "shares": _shares(rounds),
        "peak_memory": max(memory, default=None),
        "speedup": {
            "over_plain": summary(baselines[PLAIN]),
            "over_transformers": summary(baselines[TRANSFORMERS]),
        },
    }


def _spread(values: Sequence[float]) -> dict:
    return {"median": statistics.median(values), "quartiles": quartiles(values)}


def _joined(rounds: Sequence[Mapping], name: str) -> list[float]:
    return [value for r in rounds for value in r[name]]


def _tail(values: Sequence[float]) -> dict | None:
    if not values:
        return None
    return {"median": statistics.median(values), "p99": sorted(values)[math.ceil(0.99 * len(values)) - 1]}


def _total(rounds: Sequence[Mapping], name: str) -> int | None:
    values = [r[name] for r in rounds]
    return None if None in values else sum(values)


def _ratio(rounds: Sequence[Mapping], part: str, whole: str) -> float | None:
    a, b = _total(rounds, part), _total(rounds, whole)
    return a / b if a is not None and b else None


def _accepted(rounds: Sequence[Mapping]) -> list[float] | None:
    """Of the steps that drafted so many, the fraction in which the first, the second, ... draft was accepted."""
    if any(r["drafted_by_position"] is None for r in rounds):
        return None
    drafted, accepted = (_by_position(rounds, f"{name}_by_position") for name in ("drafted", "accepted"))
    return [a / d for a, d in zip(accepted, drafted, strict=True) if d] or None


def _by_position(rounds: Sequence[Mapping], name: str) -> list[int]:
    longest = max(len(r[name]) for r in rounds)
    return [sum(r[name][i] for r in rounds if i < len(r[name])) for i in range(longest)]


def _shares(rounds: Sequence[Mapping]) -> dict[str, float] | None:
    """Of the seconds of steps, prompts left out; None where they are not known: on a GPU, a step is one graph, or its
    parts are not waited for."""
    if any(r["seconds_by_part"] is None for r in rounds):
        return None
    names = {"draft": "draft_forwards", "target": "target_forwards", "kernels": "kernels", "loop": "loop"}
    seconds = {name: sum(r["seconds_by_part"][part] for r in rounds) for name, part in names.items()}
    whole = sum(seconds.values())
    return {name: value / whole for name, value in seconds.items()} if whole else None

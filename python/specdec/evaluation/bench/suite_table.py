"""The table of a suite: of each group of questions and each method, mean accepted tokens, speed, and speed-ups.

It is made of answers, so that a run and the files of several runs count alike. Nothing here imports torch."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from ...checks import refuse, shown
from .answers import Answers, Choice, answer_lines, read_answers
from .grid import PLAIN, TRANSFORMERS, BenchCell, Grid
from .suites import OVERALL, SUITES
from .verdicts import ratios, summary


def table(methods: Sequence[Answers], baselines: Mapping[str, Answers], texts: Answers | None) -> list[dict]:
    """
    Args:
        methods: at least one, all with the same questions as the baselines and of their suite.
        baselines: by the names of the speed-ups over them.
        texts: with which those of all others are compared; None: they are not.

    Returns:
        A row for each group and method: "group", "method", "questions", "mean_accepted", "tokens_per_second",
        "speedup" by baseline, and "equal": how many questions have the same texts in all turns and choices.

        The speed of a round is the mean of its questions' speeds, and a speed-up the ratio of two such means within a
        round, as in Spec-Bench's evaluation/speed.py; what is said of several rounds is
        :func:`~specdec.evaluation.bench.verdicts.summary`.

    Raises:
        ValueError: names ``results``: two have other questions, or are of other suites.
    """
    _check_alike([*methods, *baselines.values()])
    suite, categories = SUITES[methods[0].suite], methods[0].categories
    rows = []
    for group in suite.groups(categories.values()):
        ids = [key for key, category in categories.items() if group in (OVERALL, suite.group(category))]
        for method in methods:
            steps = [_steps(method.choices[key]) for key in ids]
            speeds = _speeds(method, ids)
            rows.append(
                {
                    "group": group,
                    "method": method.name,
                    "questions": len(ids),
                    "mean_accepted": suite.mean_accepted(steps),
                    "tokens_per_second": {"median": statistics.median(speeds), "min": min(speeds), "max": max(speeds)},
                    "speedup": {name: _speedup(speeds, _speeds(other, ids)) for name, other in baselines.items()},
                    "equal": None if texts is None else sum(_same(method, texts, key) for key in ids),
                }
            )
    return rows


def _steps(choices: Sequence[Choice]) -> tuple[int, int]:
    """Tokens and steps of a question in all rounds."""
    counted = [choice.counted for choice in choices]
    return sum(tokens for tokens, _ in counted), sum(steps for _, steps in counted)


def _speeds(answers: Answers, ids: Sequence[str | int]) -> list[float]:
    """Of each round."""
    return [statistics.mean(answers.choices[key][r].speed for key in ids) for r in range(answers.rounds)]


def _speedup(speeds: Sequence[float], of_baseline: Sequence[float]) -> dict:
    """Of the rounds that both have."""
    both = min(len(speeds), len(of_baseline))
    return {**summary(ratios(speeds[:both], of_baseline[:both])), "rounds": both}


def _same(first: Answers, second: Answers, key: str | int) -> bool:
    return all(a.turns == b.turns for a, b in zip(first.choices[key], second.choices[key], strict=False))


def _check_alike(all_answers: Sequence[Answers]) -> None:
    first = all_answers[0]
    for other in all_answers[1:]:
        if other.suite != first.suite:
            refuse("results", f"{first.name} of {first.suite} and {other.name} of {other.suite}", "one suite")
        if unlike := sorted(first.categories.items() ^ other.categories.items(), key=str):
            given = f"{first.name} and {other.name} with other questions, such as {shown(unlike[0][0])}"
            refuse("results", given, "answers to the same questions")


def suite_results(header: Mapping[str, Any], grid: Grid, rounds: Sequence[Mapping]) -> dict:
    """What results.json has of a suite: what the header says of it, a table of each setting, and which questions had a
    turn that was not asked, for want of positions."""
    of, tables, unasked = header["suite"], [], set[str]()
    turns = {question["id"]: question["turns"] for question in of["questions"]}
    for setting in grid.settings():
        if not (played := [r for r in rounds if r["setting"] == setting.name]):
            continue
        cells = grid.cells(setting)
        by_cell = {cell: read_answers(_lines(header, played, cell), cell.id, cell.id) for cell in cells}
        baselines = {f"over_{name}": next(a for c, a in by_cell.items() if c.method == name) for name in _BASELINES}
        texts = baselines[f"over_{TRANSFORMERS}"] if setting.temperature == 0 else None
        rows = table([*by_cell.values()], baselines, texts)
        tables.append({"temperature": setting.temperature, "batch": setting.batch, **setting.filters, "rows": rows})
        for answers in by_cell.values():
            for key, choices in answers.choices.items():
                if any(len(choice.turns) < turns[key] for choice in choices):
                    unasked.add(str(key))
    return {**of, "tables": tables, "unasked": sorted(unasked)}


_BASELINES = (PLAIN, TRANSFORMERS)


def answer_files(header: Mapping[str, Any], grid: Grid, rounds: Sequence[Mapping]) -> dict[BenchCell, list[dict]]:
    """The lines of the answer file of each cell with a round."""
    found: dict[BenchCell, list[dict]] = {}
    for setting in grid.settings():
        if played := [r for r in rounds if r["setting"] == setting.name]:
            found |= {cell: _lines(header, played, cell) for cell in grid.cells(setting)}
    return found


def _lines(header: Mapping[str, Any], played: Sequence[Mapping], cell: BenchCell) -> list[dict]:
    return answer_lines(played, cell.id, header["suite"]["name"], header["models"]["target"]["name"])

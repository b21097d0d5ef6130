"""Few of the cases of a test that has the product of many values: all pairs are there, and of tests that take long all
values. Of tests that take long and have but one argument it is one case, another one after some commits. The others are
nightly, but for those of files that import what was changed."""

from __future__ import annotations

import json
import zlib
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import combinations
from pathlib import Path

import pytest

from . import ROOT

CASES = 8  # of a test: all run if there are not more
KILLERS = ROOT / "tests" / "mutations" / "results.json"


def cover(cases: Sequence[Mapping[str, object]], kept: Iterable[int] = (), together: int = 2) -> set[int]:
    """Numbers of cases that have all values, so many ``together``, that arguments have in any case; with those that
    are ``kept`` anyway. Values are the same if they are one object, as those of a product are."""
    met = [{*combinations(sorted((name, id(value)) for name, value in case.items()), together)} for case in cases]
    chosen = {*kept}
    left = set().union(*met).difference(*(met[i] for i in chosen))
    while left:
        best = max(range(len(cases)), key=lambda i: len(met[i] & left))
        chosen.add(best)
        left -= met[best]
    return chosen


def mark(
    items: Iterable[pytest.Item], apart: Collection[str], dear: Collection[str], reached: Collection[Path], turn: int
) -> None:
    """Marks as ``nightly`` what is left over; of tests that are ``dear``, the case whose ``turn`` it is stays. So do
    cases that killed a mutant, and those of files that are ``reached``; those with a marker ``apart`` do not count."""
    tests: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        marked = any(item.get_closest_marker(name) for name in apart)
        if hasattr(item, "callspec") and not marked and item.path not in reached:
            tests[item.nodeid.partition("[")[0]].append(item)
    killers = {found["test"] for found in json.loads(KILLERS.read_text())["mutants"].values()}
    for test, cases in tests.items():
        chosen = {i for i, item in enumerate(cases) if item.nodeid in killers}
        values, together = [item.callspec.params for item in cases], 1 if test in dear else 2
        if test in dear:
            chosen.add((zlib.crc32(test.encode()) + turn) % len(cases))
        elif len(cases) <= CASES or len(values[0]) <= together:
            continue
        if len(values[0]) > together:
            chosen = cover(values, chosen, together)
        for i, item in enumerate(cases):
            if i not in chosen:
                item.add_marker(pytest.mark.nightly)

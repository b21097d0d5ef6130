"""Few of the cases of a test that has the product of many values: all pairs are there, and of tests that take long all
values. The whole product is nightly."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import combinations

import pytest

from . import ROOT

CASES = 8  # of a test, and of one that takes long LONG: all run if there are not more
LONG = 3
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


def mark(items: Iterable[pytest.Item], apart: Collection[str], dear: Collection[str]) -> None:
    """Marks as ``nightly`` what is left over; of tests that are ``dear``, one case of every value stays. Cases that
    killed a mutant stay; those with a marker ``apart`` do not count."""
    tests: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if hasattr(item, "callspec") and not any(item.get_closest_marker(name) for name in apart):
            tests[item.nodeid.partition("[")[0]].append(item)
    killers = {found["test"] for found in json.loads(KILLERS.read_text())["mutants"].values()}
    for test, cases in tests.items():
        together = 1 if test in dear else 2
        if len(cases) <= (LONG if together == 1 else CASES) or len(cases[0].callspec.params) <= together:
            continue
        kept = [i for i, item in enumerate(cases) if item.nodeid in killers]
        chosen = cover([item.callspec.params for item in cases], kept, together)
        for i, item in enumerate(cases):
            if i not in chosen:
                item.add_marker(pytest.mark.nightly)

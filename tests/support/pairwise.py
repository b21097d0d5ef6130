"""Few of the cases of a test that has the product of many values: all pairs are there, the whole product is nightly."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import combinations

import pytest

from . import ROOT

ARGUMENTS, CASES = 3, 12  # of tests with fewer arguments, or not more cases, all run
KILLERS = ROOT / "tests" / "mutations" / "results.json"


def cover(cases: Sequence[Mapping[str, object]], kept: Iterable[int] = ()) -> set[int]:
    """Numbers of cases that have every pair of values that two arguments have in any case; with those that are
    ``kept`` anyway. Values are the same if they are one object, as those of a product are."""
    pairs = [{*combinations(sorted((name, id(value)) for name, value in case.items()), 2)} for case in cases]
    chosen = {*kept}
    left = set().union(*pairs).difference(*(pairs[i] for i in chosen))
    while left:
        best = max(range(len(cases)), key=lambda i: len(pairs[i] & left))
        chosen.add(best)
        left -= pairs[best]
    return chosen


def mark(items: Iterable[pytest.Item], apart: Collection[str]) -> None:
    """Marks as ``nightly`` what is left over. Cases that killed a mutant stay; those with a marker ``apart`` do not
    count."""
    tests: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if hasattr(item, "callspec") and not any(item.get_closest_marker(name) for name in apart):
            tests[item.nodeid.partition("[")[0]].append(item)
    killers = {found["test"] for found in json.loads(KILLERS.read_text())["mutants"].values()}
    for cases in tests.values():
        if len(cases) <= CASES or len(cases[0].callspec.params) < ARGUMENTS:
            continue
        kept = [i for i, item in enumerate(cases) if item.nodeid in killers]
        chosen = cover([item.callspec.params for item in cases], kept)
        for i, item in enumerate(cases):
            if i not in chosen:
                item.add_marker(pytest.mark.nightly)

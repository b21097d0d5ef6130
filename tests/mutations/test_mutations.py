"""The list and the record of the mutation gate are in order: ``python -m tests.mutations`` runs it."""

from __future__ import annotations

import re
import shlex

import pytest

from mutations import MUTATIONS
from mutations.mutation import ROOT
from mutations.results import DOCUMENT, Results


def test_there_are_many_and_names_are_unique():
    assert 220 <= len(MUTATIONS) <= 370  # each of them costs everybody who changes its line
    assert len({mutation.name for mutation in MUTATIONS}) == len(MUTATIONS)


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_it_applies(mutation):
    """Its old text occurs once in its file, and the tests that are to see it exist."""
    text = (ROOT / mutation.file).read_text()
    assert mutation.applied(text) != text
    tests = [argument.split("::") for argument in shlex.split(mutation.first) if argument.startswith("tests/")]
    assert tests
    for file, *names in tests:
        there = (ROOT / file).read_text()
        assert all(re.search(rf"^(def|class) {name.split('[')[0]}\b", there, re.MULTILINE) for name in names)


def test_every_mutation_was_killed_and_the_documentation_says_so():
    results = Results()
    assert set(results.verdicts) == {mutation.name for mutation in MUTATIONS}
    assert not [name for name, verdict in results.verdicts.items() if not verdict["verdict"].startswith("killed")]
    assert results.line() in (ROOT / DOCUMENT).read_text().splitlines()

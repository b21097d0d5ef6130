"""The list and the record of the mutation gate are in order: ``python -m tests.mutations`` runs it."""

from __future__ import annotations

import functools
import re
import shlex

from mutations import MUTATIONS
from mutations.mutation import ROOT
from mutations.results import DOCUMENT, Results


def test_there_are_many_and_names_are_unique():
    assert 220 <= len(MUTATIONS) <= 380  # each of them costs everybody who changes its line
    assert len({mutation.name for mutation in MUTATIONS}) == len(MUTATIONS)


def test_they_apply():
    """Each old text occurs once in its file, and the tests that are to see it exist."""
    read = functools.cache(lambda file: (ROOT / file).read_text())
    wrong = []
    for mutation in MUTATIONS:
        try:
            applied = mutation.applied(read(mutation.file)) != read(mutation.file)
        except ValueError:
            applied = False
        tests = [argument.split("::") for argument in shlex.split(mutation.first) if argument.startswith("tests/")]
        there = all(
            re.search(rf"^(def|class) {name.split('[')[0]}\b", read(file), re.MULTILINE)
            for file, *names in tests
            for name in names
        )
        if not (applied and tests and there):
            wrong.append(mutation.name)
    assert not wrong


def test_every_mutation_was_killed_and_the_documentation_says_so():
    results = Results()
    assert set(results.verdicts) == {mutation.name for mutation in MUTATIONS}
    assert not [name for name, verdict in results.verdicts.items() if not verdict["verdict"].startswith("killed")]
    assert results.line() in (ROOT / DOCUMENT).read_text().splitlines()

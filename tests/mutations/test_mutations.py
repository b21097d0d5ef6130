"""The list of the mutation gate is in order: ``python -m tests.mutations`` runs it."""

from __future__ import annotations

import shlex

import pytest

from mutations import MUTATIONS
from mutations.mutation import ROOT


def test_there_are_many_and_names_are_unique():
    assert len(MUTATIONS) >= 40
    assert len({mutation.name for mutation in MUTATIONS}) == len(MUTATIONS)


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_it_applies(mutation):
    """Its old text occurs once in its file, and the tests that are tried first exist."""
    text = (ROOT / mutation.file).read_text()
    assert mutation.applied(text) != text
    files = [argument for argument in shlex.split(mutation.first) if argument.startswith("tests/")]
    assert files and all((ROOT / file).is_file() for file in files)

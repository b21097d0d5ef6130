"""The docstrings of public names, from which the API reference is built: nothing is missing or leads nowhere, and their
examples run as they stand."""

from __future__ import annotations

import doctest
import importlib
import importlib.util
import sys

import pytest
import specdec
from support.api_reference import reference

import specdec_kernels

DOCUMENTED = {
    path: value for name in reference.MODULES for path, value, _ in reference.documented(importlib.import_module(name))
}
FINDER = doctest.DocTestFinder(recurse=False)
EXAMPLES = {
    path: test
    for path, value in DOCUMENTED.items()
    if ">>>" in (value.__doc__ or "")
    for test in FINDER.find(value, path, globs={}, extraglobs={})
}
# They load a pair, or change it; the others share one.
THEIR_OWN = {"specdec.load_embedded_pair", "specdec.load_pair", "specdec.chat_prompt"}
SHOWN = """
    specdec.AdaptiveDrafts specdec.EarlyExitDrafter specdec.Engine specdec.GenerationResult
    specdec.PromptLookupDrafter specdec.Request specdec.Rollout specdec.SamplingParams specdec.Scheduler
    specdec.SpeculativeDecoder specdec.SpeculativeDecoder.generate specdec.Stats specdec.StopStrings
    specdec.SuffixDrafter specdec.chat_prompt specdec.drafters.predicted.PredictedDrafter
    specdec.load_embedded_head specdec.load_embedded_pair specdec.load_head specdec.load_model specdec.load_pair
    specdec.speculate specdec_kernels.draft_children specdec_kernels.draft_step
    specdec_kernels.speculative_step specdec_kernels.verify_tree
""".split()


@pytest.mark.parametrize("path", sorted(EXAMPLES))
def test_an_example_runs(path, pair, monkeypatch):
    if path not in THEIR_OWN:
        monkeypatch.setattr("specdec.load_embedded_pair", lambda: pair, raising=False)
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    printed: list[str] = []
    failed, tried = runner.run(EXAMPLES[path], out=printed.append)
    assert tried > 0 and failed == 0, "".join(printed)


def test_what_users_call_has_examples():
    assert set(SHOWN) <= set(EXAMPLES)


@pytest.mark.parametrize("name", reference.MODULES)
def test_docstrings_are_complete_and_right(name):
    assert reference.faults(importlib.import_module(name)) == []


def test_comments_of_fields_are_in_the_reference():
    found = reference.comments(specdec.GenerationResult)
    assert found["sequences"].startswith("[B, prompt + new] int64: ")
    assert found["log_probs"].startswith("Of ``tokens``, ")
    assert "produced_by" not in found
    assert reference.comments(specdec.FinishReason)["LENGTH"] == "it has ``max_new_tokens`` new tokens"


def test_every_public_name_is_in_the_reference():
    public = {*specdec.__all__, *specdec_kernels.__all__}
    assert public <= {
        name for module in reference.MODULES for name in reference.public_names(importlib.import_module(module))
    }
    for path in (
        "specdec.drafters.Drafter.start",
        "specdec.drafters.DraftSession.propose",
        "specdec.loop.step.AcceptRule.verify",
    ):
        assert path in DOCUMENTED


FAULTY = {
    "no docstring": "def f(x): pass",
    "no argument y": 'def f(x):\n    """Takes x.\n\n    Args:\n        x, y: numbers.\n    """',
    "no attribute size": 'class f:\n    """Has a size.\n\n    Attributes:\n        size: of it.\n    """',
    "Absent leads nowhere": 'def f(x):\n    """As :class:`~specdec.Absent`, or ``Absent``."""',
    "specdec.absent.f leads nowhere": 'def f(x):\n    """As ``specdec.absent.f``."""',
    "Stats.absent leads nowhere": 'from specdec import Stats\ndef f(x):\n    """As ``Stats.absent``."""',
}


@pytest.mark.parametrize("fault", FAULTY)
def test_faults_are_found(fault, monkeypatch, tmp_path):
    path = tmp_path / "faulty.py"
    path.write_text('"""A module."""\n__all__ = ["f"]\n' + FAULTY[fault])
    spec = importlib.util.spec_from_file_location("faulty", path)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "faulty", module)
    spec.loader.exec_module(module)
    found = reference.faults(module)
    assert found and all(line.startswith("faulty.f: ") for line in found)
    assert any(line.endswith(fault) for line in found)

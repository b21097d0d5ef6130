"""The drafter of docs/drafters.md runs as it stands there, and does what the page says."""

from __future__ import annotations

import logging
import re

import pytest
import torch
from specdec import Scheduler, SpeculativeDecoder
from specdec.drafters import Drafter
from specdec.loop.request import Request
from support import ROOT

PAGE = (ROOT / "docs" / "drafters.md").read_text(encoding="utf-8")
DRAFTER, USE = re.findall(r"^```python\n(.*?)^```$", PAGE, flags=re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def names() -> dict:
    found: dict = {}
    exec(compile(DRAFTER, "docs/drafters.md, the drafter", "exec"), found)
    return found


def test_it_is_about_20_lines():
    assert len(DRAFTER.splitlines()) <= 22


def test_the_page_runs_as_it_stands(names, pair, monkeypatch, capsys):
    monkeypatch.setattr("specdec.load_embedded_pair", lambda: pair, raising=False)
    exec(compile(USE, "docs/drafters.md, its use", "exec"), names)
    stats = names["result"].stats
    assert capsys.readouterr().out == (
        f"{stats.tau:.2f} tokens a step, {stats.accepted} of {stats.drafted} drafts accepted\n"
    )
    assert stats.tau > 1.2 and names["result"].drafter_error is None


def test_it_proposes_what_followed_the_last_two_tokens(names):
    after = names["after"]
    assert after([1, 2, 9, 1, 2, 3, 4, 1, 2], 4) == [3, 4, 1, 2]
    assert after([1, 2, 3, 4, 1, 2], 1) == [3]
    assert after([5, 5, 5], 4) == [5]
    assert after([1, 2, 3], 4) == after([1], 4) == after([1, 2, 3, 1, 2], 0) == []


def test_sequences_may_come_and_go(names, pair):
    target, _, tokenizer = pair
    prompts = tokenizer(["x = [1, 2, 1, 2,", "import os", "y = [3, 3, 3,"]).input_ids
    plain = SpeculativeDecoder(target, None, 0).generate(prompts, max_new_tokens=24).tokens
    scheduler = Scheduler(SpeculativeDecoder(target, names["LookBack"](), num_drafts=4), rows=2, max_length=64)
    ended = list(scheduler.run(Request(prompt, max_new_tokens=24, id=i) for i, prompt in enumerate(prompts)))
    assert {s.request.id: s.tokens for s in ended} == dict(enumerate(plain))
    assert sum(s.stats.accepted for s in ended) > 0 and scheduler.drafter_error is None


def test_one_that_raises_is_dropped_with_its_error_in_the_log(names, pair, caplog):
    class Raises(names["LookBackSession"]):
        def propose(self, step):
            if step.index == 2:
                raise RuntimeError("no more ideas")
            return super().propose(step)

    class Failing(Drafter):
        def start(self, batch):
            return Raises()

    target, _, tokenizer = pair
    prompts = tokenizer(["x = [1, 2, 3, 1, 2, 3,"]).input_ids
    decoder = SpeculativeDecoder(target, Failing(), num_drafts=4)
    with caplog.at_level(logging.WARNING, "specdec.drafters.guard"):
        result = decoder.generate(prompts, max_new_tokens=16)
    assert result.tokens == SpeculativeDecoder(target, None, 0).generate(prompts, max_new_tokens=16).tokens
    assert result.drafter_error == "RuntimeError: no more ideas" and result.stats.steps_by_drafts[0] > 0
    (record,) = caplog.records
    assert record.name == "specdec.drafters.guard" and str(record.exc_info[1]) == "no more ideas"
    # The next batch starts a new session, which drafts until its own third step.
    again = decoder.generate(prompts, max_new_tokens=16)
    assert torch.equal(again.sequences, result.sequences) and again.stats.drafted == result.stats.drafted > 0

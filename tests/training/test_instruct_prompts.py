"""The prompts of which a target's own texts are made: many, of all kinds, the same for a seed, and none of those that
drafts are judged by."""

from __future__ import annotations

from collections import Counter
from itertools import islice

import pytest
from specdec.jobs.prompt_sets import evaluation_texts
from specdec.training.instruct_prompts import BEGINNING, KINDS, instruct_prompts


@pytest.fixture(scope="module")
def prompts():
    return list(islice(instruct_prompts(), 6000))


def test_thousands_of_all_kinds_each_once(prompts):
    assert Counter(kind for kind, _ in prompts) == dict.fromkeys(KINDS, 400)
    assert len({str(messages) for _, messages in prompts}) == 6000


def test_conversations_begin_and_end_with_the_user(prompts):
    for kind, messages in prompts:
        assert [m["role"] for m in messages] == [("user", "assistant")[i % 2] for i in range(len(messages))]
        assert messages[-1]["role"] == "user" and (len(messages) > 1) == (kind == "turns")


def test_nothing_of_the_grammar_is_left_in_them(prompts):
    for _, messages in prompts:
        for message in messages:
            text = message["content"]
            assert text.strip() and not any(
                mark in text for mark in ("\\n", ">>>", " | ", "{topic", "{name2", "{{", "}}")
            ), text


def test_a_name_stands_for_one_thing_in_a_prompt():
    words = [m[0]["content"] for kind, m in islice(instruct_prompts(3), 3000) if kind == "explain"]
    compared = [text.removeprefix("Compare ").split(".")[0].split(" with ") for text in words if "Compare " in text]
    assert len(compared) > 5 and all(a != b for a, b in compared)


def test_a_seed_decides(prompts):
    assert list(islice(instruct_prompts(), 30)) == prompts[:30] != list(islice(instruct_prompts(1), 30))


def test_none_of_those_that_drafts_are_judged_by(prompts):
    said = {m["content"].strip() for _, messages in prompts for m in messages}
    assert not said & {text.strip() for text in evaluation_texts()}


def test_beginnings_for_a_target_that_does_not_chat():
    found = list(islice(instruct_prompts(chat=False), 500))
    assert {kind for kind, _ in found} == {BEGINNING} and len({m[0]["content"] for _, m in found}) == 500

"""The sets of prompts that come with the package."""

from __future__ import annotations

from collections import Counter

import pytest
from specdec.jobs.prompt_sets import INSTRUCT, NAMES, evaluation_texts, prompt_set
from specdec.jobs.questions import choose
from specdec.training.texts import SHORTEST, split

TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<a>"
GENERAL = ("question", "list", "essay", "poem", "summary", "rewriting", "code", "code editing", "translation")


@pytest.mark.parametrize(
    "name, categories, each",
    [("instruct", INSTRUCT, 6), ("general", (*GENERAL, "arithmetic", "JSON", "chat"), 4)],
)
def test_several_prompts_of_each_category(pair, name, categories, each):
    """All different, and short enough for small models."""
    found = prompt_set(name)
    assert [*Counter(q.category for q in found).items()] == [(category, each) for category in categories]
    assert len({q.prompt for q in found}) == len({q.id for q in found}) == len(found)
    assert max(len(q.tokens(pair[2])) for q in found) < 640


def test_texts_to_work_on_are_of_realistic_length():
    """Drafts are copied out of them, so their length decides what lookup is worth."""
    for question in choose(prompt_set("instruct"), ("edit", "extract", "summarise"), None):
        assert 80 <= len(question.prompt.split()) <= 220, question.id


def test_conversations(pair, monkeypatch):
    """Transcripts without a chat template, and its text with one."""
    transcript = choose(prompt_set("instruct"), ["turns"], 1)[0]
    assert transcript.prompt.startswith("User: I would like to grow") and not transcript.chat
    assert transcript.prompt.endswith("\nAssistant:") and transcript.prompt.count("\nAssistant: ") == 2
    monkeypatch.setattr(pair[2], "chat_template", TEMPLATE)
    explain, *_, said = choose(prompt_set("instruct", pair[2]), ["explain", "turns"], None)
    assert said.chat and said.prompt.startswith("<user>Explain to me what an index") and said.prompt.endswith("<a>")
    assert not explain.chat and explain.as_message(pair[2]).prompt == f"<user>{explain.prompt}<a>"


def test_no_text_with_an_evaluation_prompt_is_trained_on():
    """Nor one with what a user says in a conversation."""
    texts = evaluation_texts()
    long = [text for text in texts if len(text.strip()) >= SHORTEST]
    assert len(long) > 100 and split([f"### {text} ###" for text in long], texts).known == len({*long})
    assert {q.prompt for name in NAMES for q in prompt_set(name) if q.category != "turns"} <= {*texts}


def test_a_set_that_is_not_there():
    with pytest.raises(ValueError, match="prompt_set: got 'codes', allowed: instruct, general, code"):
        prompt_set("codes")

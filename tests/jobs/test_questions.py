"""Files of questions: prompts with a category, and the formats of Spec-Bench and SPEED-Bench."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from specdec.jobs.input import InputError
from specdec.jobs.questions import PLACEHOLDER, Question, read_questions
from support import ROOT

TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<a>"
SPEC_BENCH = {
    "question_id": 81,
    "category": "writing",
    "turns": ["Write a letter.", "Now shorten it."],
    "reference": [],
}
SPEED_BENCH = {
    **{"question_id": "8c2f", "category": "coding", "sub_category": "python", "turns": ["Sort a list."]},
    **{"source": "here", "src_id": "1", "difficulty": "easy", "multiturn": False},
}


def written(path: Path, *rows: object, name: str = "questions.jsonl") -> Path:
    file = path / name
    file.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return file


def test_all_formats(tmp_path):
    own = {"id": "a", "prompt": "x = ", "category": "code"}
    assert read_questions(written(tmp_path, own, SPEC_BENCH, SPEED_BENCH, {"prompt": "y"}, "", '"alone"')) == [
        Question("a", 0, "x = ", category="code"),
        Question(81, 1, "Write a letter.", category="writing"),
        Question("8c2f", 2, "Sort a list.", category="coding"),
        Question(3, 3, "y"),
        Question(4, 4, "alone"),
    ]
    assert read_questions(written(tmp_path, "one", "two", name="q.txt"))[1] == Question(1, 1, "two")


@pytest.mark.parametrize(
    ("row", "told"),
    (
        ({"prompt": ""}, "prompt: got an empty prompt"),
        ({"id": 1}, "prompt: got none, allowed: a text"),
        (
            {"prompt": "x", "max_new_tokens": 5},
            "keys: got 'max_new_tokens', allowed: id, prompt, messages, cat",
        ),
        ({"prompt": "x", "category": 5}, "category: got 5, allowed: a text"),
        ({"turns": []}, r"turns: got \[\], allowed: a list of texts"),
        ({"turns": [""]}, "turns: got '', allowed: a text"),
        ({"turns": "x"}, "turns: got 'x', allowed: a list"),
        ({"question_id": 1.5, "turns": ["x"]}, "question_id: got 1.5, allowed: a string or an integer"),
        ({"turns": [PLACEHOLDER]}, "turns: got a placeholder, allowed: the text"),
        ({"turns": ["\ud800"]}, "turns: got .*, allowed: text without lone surrogates"),
        ("{", "got '{', allowed: a JSON string or"),
        ({"id": "a", "prompt": "again"}, "id: got 'a', which line 1 has"),
    ),
)
def test_a_line_that_is_not_right_is_named(tmp_path, row, told):
    file = written(tmp_path, {"id": "a", "prompt": "x"}, "", row)
    with pytest.raises(InputError, match=f"line 3 of .*questions.jsonl': {told}"):
        read_questions(file)


def test_no_question(tmp_path):
    with pytest.raises(InputError, match="without a prompt"):
        read_questions(written(tmp_path, ""))


def test_a_question_as_a_users_message(pair, monkeypatch):
    tokenizer = pair[2]
    question = Question("a", 0, "Hello", category="chat")
    assert question.tokens(tokenizer) == tokenizer("Hello").input_ids
    with pytest.raises(ValueError, match="messages: got messages for a tokenizer without a chat template"):
        question.as_message(tokenizer)
    monkeypatch.setattr(tokenizer, "chat_template", TEMPLATE)
    said = question.as_message(tokenizer)
    assert said == Question("a", 0, "<user>Hello<a>", chat=True, category="chat") and said.as_message(tokenizer) is said
    assert said.tokens(tokenizer) == tokenizer("<user>Hello<a>", add_special_tokens=False).input_ids


def test_the_seven_prompts():
    found = read_questions(ROOT / "examples" / "seven_prompts.jsonl")
    assert len(found) == len({q.category for q in found}) == 7

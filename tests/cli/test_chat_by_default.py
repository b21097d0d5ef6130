"""Where the target's tokenizer has a chat template, prompts are a user's messages unless it is told otherwise."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from specdec.cli import given_prompts
from specdec.cli.models import ModelOptions
from specdec.jobs.prompt_sets import INSTRUCT
from support.commands import invoke, refused, run

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<answer>{% endif %}"
)
SHORT = ("--max-new-tokens", 8)
TOLD = "prompts are messages for the target's chat template; --no-chat continues them as they stand"


@pytest.fixture
def template(pair, monkeypatch) -> None:
    """The embedded tokenizer has one."""
    monkeypatch.setattr(pair[2], "chat_template", TEMPLATE)
    monkeypatch.setattr("specdec.models.load.loading.load_tokenizer", lambda *_: pair[2])


def given(*, at: ModelOptions | None = None, prompts: list[str] | None = None, **options: object) -> list:
    return given_prompts.MeasuredPrompts(**options).questions(prompts, at or ModelOptions())


# ---- generate


def test_the_answer_alone_is_printed(template):
    """It continues what the template makes of the prompt, of which nothing is shown."""
    chat = run("generate", "x = 1", *SHORT)
    whole = run("generate", "--no-chat", "<user>x = 1<answer>", *SHORT)
    assert whole.stdout == f"<user>x = 1<answer>{chat.stdout}" and TOLD in chat.stderr and TOLD not in whole.stderr
    asked = run("generate", "--chat", "x = 1", *SHORT)
    assert asked.stdout == chat.stdout and TOLD not in asked.stderr


def test_a_system_message(template):
    told = run("generate", "x = 1", "--system", "y = 2", *SHORT)
    whole = run("generate", "--no-chat", "<system>y = 2<user>x = 1<answer>", *SHORT)
    assert whole.stdout == f"<system>y = 2<user>x = 1<answer>{told.stdout}" and TOLD not in told.stderr


def test_several_answers_and_json(template):
    answers = run("generate", "x = 1", "--num-return-sequences", 2, *SHORT).stdout
    assert answers.startswith("--- 1 of 2 ---\n") and "<user>" not in answers
    row = json.loads(run("generate", "x = 1", "--json", *SHORT).stdout)
    assert answers.startswith(f"--- 1 of 2 ---\n{row['text']}\n--- 2")


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (("--chat", "x"), "--chat: got --chat for a target without a chat template, allowed: --no-chat, or a target"),
        (("--system", "y", "x"), "--system: got a text for a target without a chat template, allowed: none there"),
        (("--system", "y", "--no-chat", "x"), "--no-chat / --system: got both, allowed: one of the two"),
        (("--chat", "--batch-file", __file__), "--chat / --no-chat / --system: got one of them with --batch-file"),
    ],
)
def test_what_is_refused(monkeypatch, options, told):
    monkeypatch.setattr("specdec.cli.models.load", lambda *_: pytest.fail("loaded"))
    assert told in refused("generate", *options)


# ---- commands that measure


def test_the_default_prompts(template, pair, monkeypatch):
    """One of each category: of a chat the instruct set through the template, of other targets the general one, and
    for the embedded pair code."""
    chat = given()
    assert [q.category for q in chat] == [*INSTRUCT] and all(q.chat for q in chat)
    assert chat[0].prompt.startswith("<user>Why does bread") and chat[-1].prompt.count("<assistant>") == 2
    assert [q.chat for q in given(chat=False)] == [False] * 4
    named = given(chat=False, prompt_set="instruct", category=["turns"], per_category=2)
    assert [(q.id, q.prompt[:6]) for q in named] == [("turns-1", "User: "), ("turns-2", "User: ")]
    monkeypatch.setattr(pair[2], "chat_template", None)
    assert [q.prompt[:9] for q in given()] == ["import os", "class Err", "    def _", "    def r"]
    assert len(given(at=ModelOptions(target="a folder"))) == 12


def test_prompts_of_a_user_are_messages(template, tmp_path: Path, capsys):
    """As they are in a file, whose conversations stay what they are."""
    (only,) = given(prompts=["x = 1"])
    assert (only.prompt, only.chat) == ("<user>x = 1<answer>", True) and TOLD in capsys.readouterr().err
    file = tmp_path / "prompts.jsonl"
    said = {"messages": [{"role": "system", "content": "a"}, {"role": "user", "content": "b"}]}
    file.write_text(json.dumps({"prompt": "x"}) + "\n" + json.dumps(said) + "\n")
    assert [q.prompt for q in given(batch_file=file, chat=True)] == ["<user>x<answer>", "<system>a<user>b<answer>"]
    assert [q.prompt for q in given(batch_file=file, chat=False)] == ["x", "<system>a<user>b<answer>"]
    assert capsys.readouterr().err == ""


def test_a_set_is_named(monkeypatch):
    monkeypatch.setattr("specdec.cli.models.load", lambda *_: pytest.fail("loaded"))
    for command in ("compare", "bench", "verify", "advise"):
        told = refused(command, "--prompt-set", "codes")
        assert told.startswith("Invalid value for --prompt-set: got 'codes', allowed: instruct, general, code")
    told = refused("compare", "x", "--prompt-set", "code")
    assert told == "Invalid value for PROMPT / --batch-file / --prompt-set: got several, allowed: at most one of them"


def test_compare_shows_the_answer_alone(template, folders, monkeypatch):
    quick = ("--max-new-tokens", 2, "--repeats", 1, "-k", 1)
    assert "<user>" not in run("compare", "x", *quick).stdout
    assert "<user>x<answer>" in run("compare", "<user>x<answer>", "--no-chat", *quick).stdout


def test_verify_as_a_chat(template):
    quick = ("--check", "greedy", "--rule", "token", "-k", 1, "--batch-size", 1, "--max-new-tokens", 2, "--json")
    found = invoke("verify", "x", "--drafter", "lookup", *quick)
    assert found.exit_code == 0 and TOLD in found.stderr

"""Chat messages as a prompt: rendered by the tokenizer's own template, or refused."""

from __future__ import annotations

import pytest
from specdec import chat_prompt

TEMPLATE = (
    "{% if messages[0].role == 'system' and messages[0].content == 'no' %}{{ raise_exception('no system') }}{% endif %}"
    "<|pad|>{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<a>{% endif %}"
)
HELLO = {"role": "user", "content": "hello"}


@pytest.fixture
def tokenizer(pair, monkeypatch):
    monkeypatch.setattr(pair[2], "chat_template", TEMPLATE)
    return pair[2]


def test_it_is_the_text_of_the_template(tokenizer):
    messages = [{"role": "system", "content": "be brief"}, HELLO, {"role": "assistant", "content": "é"}, HELLO]
    text = "<|pad|><system>be brief\n<user>hello\n<assistant>é\n<user>hello\n<a>"
    assert chat_prompt(tokenizer, messages) == tokenizer(text, add_special_tokens=False).input_ids
    assert chat_prompt(tokenizer, messages)[0] == tokenizer.pad_token_id
    theirs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=False)
    assert chat_prompt(tokenizer, tuple(messages)) == theirs


@pytest.mark.parametrize(
    "messages, message",
    [
        (
            "hello",
            'got \'hello\', allowed: a list of {"role": system or developer or user or assistant, "content": a te',
        ),
        ([], "got [], allowed: a list of"),
        (None, "got None, allowed: a list of"),
        (["hello"], "got 'hello' as message 0, allowed: a list of"),
        ([HELLO, {"role": "user"}], "got {'role': 'user'} as message 1, allowed: a list of"),
        ([{**HELLO, "name": "x"}], "as message 0, allowed: a list of"),
        ([{**HELLO, "role": "usr"}], "got {'role': 'usr', 'content': 'hello'} as message 0, allowed: a list of"),
        ([{**HELLO, "role": ["user"]}], "as message 0, allowed: a list of"),
        ([{**HELLO, "content": [{"type": "text", "text": "x"}]}], "as message 0, allowed: a list of"),
        ([{**HELLO, "content": "\ud800"}], "got '\\ud800' in message 0, allowed: text without lone surrogates"),
        ([{"role": "system", "content": "no"}], "which the chat template refuses (no system), allowed: what it takes"),
    ],
)
def test_other_messages_are_refused(tokenizer, messages, message):
    with pytest.raises(ValueError) as caught:
        chat_prompt(tokenizer, messages)
    assert str(caught.value).startswith("messages: got ") and message in str(caught.value)


def test_a_tokenizer_without_a_template_is_named(pair):
    with pytest.raises(ValueError) as caught:
        chat_prompt(pair[2], [HELLO])
    name = f"{type(pair[2]).__name__} of {pair[2].name_or_path!r}"
    assert str(caught.value) == (
        f"messages: got messages for a tokenizer without a chat template ({name}), allowed: a prompt, as text"
    )


def test_a_template_that_makes_nothing_is_refused(pair, monkeypatch):
    monkeypatch.setattr(pair[2], "chat_template", "{# nothing #}")
    with pytest.raises(ValueError, match="of which the chat template makes no text"):
        chat_prompt(pair[2], [HELLO])

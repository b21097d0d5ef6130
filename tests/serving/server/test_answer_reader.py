"""An answer is read in the same way however its text is divided, and as transformers reads it whole."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from specdec.detokenize import IncrementalText
from specdec.serving.server.answer_reader import AnswerReader
from specdec.serving.server.dialect import Dialect
from support.chatml import TEMPLATE, chatml
from transformers.utils.chat_parsing import parse_response

XML_TEMPLATE = TEMPLATE.replace(
    "Call them with <tool_call></tool_call>.", "<tool_call><function=f></function></tool_call>"
)
LLAMA_TEMPLATE = """{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>

{{ m.content }}<|eot_id|>{% endfor %}{# {"name": ..., "parameters": ...} #}<|start_header_id|>assistant<|end_header_id|>

"""
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "f",
            "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "string"}}},
        },
    }
]
JSON_CALL = '{"name": "f", "arguments": {"a": 1, "b": "€ </tool_call"}}'
XML_ARGUMENTS = "<parameter=a>\n1\n</parameter>\n<parameter=b>\nx\ny\n</parameter>"
XML_CALL = f"<tool_call>\n<function=f>\n{XML_ARGUMENTS}\n</function>\n</tool_call>"
THOUGHT = "<think>\n a\n\nb \n</think>\n\n"
PARTS = {
    TEMPLATE: [
        THOUGHT,
        f"<tool_call>{JSON_CALL}</tool_call>",
        "<tool_call>{]</tool_call>",
        '<tool_call>{"<a"]</tool_call>',
        "<tool_call>",
        "</tool",
        "<|im_end|>",
    ],
    XML_TEMPLATE: [THOUGHT, XML_CALL, "<tool_call>\n<func", "<tool_call>\n<function=f>\n<parameter=a>", "</think>"],
    LLAMA_TEMPLATE: [
        "<|python_tag|>",
        JSON_CALL.replace("arguments", "parameters"),
        "{",
        '{"a": 1}',
        "<|eot_id|>",
        "x",
    ],
}


def reader(tokenizer: Any, prompt: str, tools: bool = True) -> AnswerReader:
    dialect = Dialect(tokenizer)
    form = dialect.with_tools if tools else dialect.plain
    assert form is not None
    return form.reader(prompt, TOOLS if tools else [])


def told(of: AnswerReader, pieces: list[str]) -> tuple[str, str, list]:
    """What the deltas are together, which is what the reader has in the end."""
    deltas = [*map(of.push, pieces), of.finish()]
    content, reasoning = ("".join(getattr(delta, name) for delta in deltas) for name in ("content", "reasoning"))
    calls = [(call.name, json.loads(call.arguments)) for delta in deltas for call in delta.calls]
    assert (content, reasoning, len(calls)) == (of.content, of.reasoning, len(of.calls))
    return content, reasoning, calls


@pytest.mark.parametrize("template", PARTS)
@settings(max_examples=150, deadline=None)
@given(st.data())
def test_pieces_of_any_length(pair, template, data):
    tokenizer = chatml(pair[2], template)
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "x"}], add_generation_prompt=True, tokenize=False
    )
    prompt += data.draw(st.sampled_from(["", "<think>\n", "\n"])) if template != LLAMA_TEMPLATE else ""
    texts = st.sampled_from([*PARTS[template], " ", "\n", "Hello", "é", "<"])
    text = "".join(data.draw(st.lists(texts, max_size=8)))
    ends = sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=len(text))))
    pieces = [text[a:b] for a, b in zip([0, *ends], [*ends, len(text)], strict=True)]
    tools = data.draw(st.booleans())
    if not tools and template == LLAMA_TEMPLATE:
        assert Dialect(tokenizer).plain is None
        return
    whole = told(reader(tokenizer, prompt, tools), [text])
    assert told(reader(tokenizer, prompt, tools), pieces) == whole
    assert told(reader(tokenizer, prompt, tools), [*text]) == whole
    form = Dialect(tokenizer).with_tools if tools else Dialect(tokenizer).plain
    theirs = parse_response(text, dict(form.template), prefix=prompt, tools=TOOLS)
    values = theirs.get("tool_calls", [])
    functions = [
        v.get("function", v) for v in (values if isinstance(values, list) else [values]) if isinstance(v, dict)
    ]
    assert whole[2] == [(f["name"], f.get("arguments", f.get("parameters"))) for f in functions if "name" in f]


def test_forms(pair):
    """What each form makes of a call, of text around it, and of what is none."""

    def read(template: str, text: str, prompt: str = "<|im_start|>assistant\n") -> tuple[str, str, list]:
        return told(reader(chatml(pair[2], template), prompt), [text])

    called = [("f", {"a": 1, "b": "€ </tool_call"})]
    assert read(TEMPLATE, f"{THOUGHT}Look.\n<tool_call>\n{JSON_CALL}\n</tool_call>\n ") == ("Look.", "a\n\nb", called)
    for marked in ("</tool_call>", "<tool_call>", 'a \\" </tool_call>\n<tool_call>', "</think><|im_end|>"):
        value = marked.replace("\n", "\\n")
        call = f'<tool_call>\n{{"name": "f", "arguments": {{"b": "{value}", "{value}": "<"}}}}\n</tool_call>'
        key = json.loads(f'"{value}"')
        assert read(TEMPLATE, f"Look.\n{call}\n{call}") == ("Look.", "", [("f", {"b": key, key: "<"})] * 2)
    # A string that does not end in its line is none, and hides no end.
    broken = '<tool_call>{"name": "f", "b": "x </tool_call> y\n}}'
    assert read(TEMPLATE, f"{broken}</tool_call>\n<tool_call>{JSON_CALL}</tool_call>") == (
        f"{broken.removeprefix('<tool_call>')}",
        "",
        called,
    )
    assert read(TEMPLATE, "a\n<tool_call>[]</tool_call>\n b") == ("a\n[]\n b", "", [])
    opened = "<|im_start|>assistant\n<think>\nSo"
    assert read(TEMPLATE, " be it</think>Yes", opened) == ("Yes", " be it", [])
    assert read(TEMPLATE, "<think>a</think>b<think>c", "") == ("b", "ac", [])
    assert read(XML_TEMPLATE, f"Look.{XML_CALL}") == ("Look.", "", [("f", {"a": 1, "b": "x\ny"})])
    llama = "<|start_header_id|>assistant<|end_header_id|>\n\n"
    plain = '{"name": "f", "parameters": {"a": 1}}'
    for text in (plain, f"<|python_tag|>{plain}", f"\n{plain} "):
        assert read(LLAMA_TEMPLATE, text, llama) == ("", "", [("f", {"a": 1})])
    for text in ('{"a": 1}', "{oh", f"So: {plain}", "[1]"):
        assert read(LLAMA_TEMPLATE, text, llama) == (text, "", [])


def test_special_tokens(pair):
    """Those that a form names have a text, others have none, also in the middle of a text."""
    tokenizer = chatml(pair[2], LLAMA_TEMPLATE)
    tokenizer.add_tokens(["<|python_tag|>", "<|eot_id|>"], special_tokens=True)
    form = Dialect(tokenizer).with_tools
    text = '<|python_tag|>{"name": "f", <|im_end|>"parameters": {}}<|eot_id|>'
    ids = tokenizer(text, add_special_tokens=False).input_ids
    incremental = IncrementalText(form.detokenizer, tokenizer("x").input_ids)
    shown = [incremental.push([token]) for token in ids]
    assert "".join(shown) + incremental.finish() == '<|python_tag|>{"name": "f", "parameters": {}}'
    assert told(form.reader("", TOOLS), shown) == ("", "", [("f", {})])


def test_response_templates(pair):
    """That of the tokenizer is taken; what is none, or has fields that no answer has, is refused by name."""
    tokenizer = chatml(pair[2], "{{ messages[0].content }}")
    assert Dialect(tokenizer).plain is None and Dialect(tokenizer).with_tools is None
    thought = {"open": "[", "close": "]", "repeats": True, "join": "\n"}
    tokenizer.response_template = {"start_anchor": "A:", "fields": {"content": {}, "thinking": thought}}
    dialect = Dialect(tokenizer)
    assert dialect.with_tools is None
    assert told(dialect.plain.reader("A:", []), ["[a ] b [ ][ c]d"]) == ("b d", "a\nc", [])
    kept = {"content": {"content_args": {"strip": False}}, "tool_calls": {"open": "CALL", "content": "json"}}
    dialect = Dialect(tokenizer, {"start_anchor": "A:", "fields": kept})
    assert dialect.plain is None
    assert told(dialect.with_tools.reader("A:", []), [" a ", "\n"]) == (" a \n", "", [])
    for fields, message in (
        ({}, "response_template: "),
        ({"content": {}, "audio": {"open": "x"}}, "response_template: got a field 'audio'"),
        ({"content": {"content": "json"}}, "response_template: got a field 'content'"),
        ({"content": {"open_pattern": "("}}, "response_template: .*regex"),
    ):
        with pytest.raises(ValueError, match=message):
            Dialect(tokenizer, {"start_anchor": "A:", "fields": fields})
    with pytest.raises(ValueError, match="response_template: "):
        Dialect(tokenizer, {"fields": {"content": {}}})

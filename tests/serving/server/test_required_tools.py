"""Calls of tools that a grammar makes, by the ``openai`` client: each parses and fits its schema, whatever the model
would say. The model is random, so all that is right of its texts is the grammar's."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from typing import Any, Literal

import jsonschema
import openai
import pytest
from pydantic import BaseModel, Field
from specdec import Scheduler, SpeculativeDecoder
from specdec.drafters.model import model_drafter
from specdec.drafters.predicted import PredictedDrafter
from specdec.drafters.prompt_lookup import PromptLookupDrafter
from specdec.models.supported import cached_model
from specdec.serving.server.call_grammar import CallForm, CallGrammar, call_form
from specdec.serving.server.errors import ApiError
from specdec.serving.server.lanes import Lanes
from specdec.serving.server.plan import Plan
from specdec.serving.server.service import Service
from specdec.serving.server.tools import Reading
from support.chatml import NAME, TEMPLATE, chatml, say, scripted_service, serving
from support.grammars import SCHEMAS, an_object
from transformers import AddedToken

MARKS = ["<tool_call>", "</tool_call>", "<think>", "</think>"]
LLAMA = """{%- if tools %}Give {"name": n, "parameters": p} of {{ tools | tojson }}
{% endif %}{%- for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>

{{ m.content }}{% endfor %}<|start_header_id|>assistant<|end_header_id|>

"""
XML = TEMPLATE.replace("Call them with", "<function=")
ASKED = [{"role": "user", "content": "How is it in Köln?"}]


def tool(name: str, schema: dict | None, **more: Any) -> dict:
    return {"type": "function", "function": {"name": name, "parameters": schema, **more}}


SMALL = {"type": "integer", "minimum": 0, "maximum": 99}  # a random model would write digits without end
POINT = an_object(x=SMALL, y=SMALL)
TOOLS = [
    tool("find", SCHEMAS["nested"]),
    tool("find_all", SCHEMAS["enum"]),
    tool("line", {**SCHEMAS["references"], "$defs": {"point": POINT}}),
    tool("now", None),
]
SCHEMA_OF = {t["function"]["name"]: t["function"]["parameters"] for t in TOOLS}


def calls_of(choice: Any, schemas: dict[str, dict | None] | None = None) -> list[str]:
    """The names of the calls of a choice; all of them fit."""
    names = []
    for call in choice.message.tool_calls or []:
        schema = (schemas or SCHEMA_OF)[call.function.name]
        arguments = json.loads(call.function.arguments)
        jsonschema.validate(arguments, schema or {"type": "object", "maxProperties": 0})
        names.append(call.function.name)
    return names


class Chat:
    def __init__(self, url: str):
        self.client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)

    def ask(self, **fields: Any) -> Any:
        """A choice, of which a stream tells the same."""
        fields = {"messages": ASKED, "seed": 1, "temperature": 1, "max_tokens": 300, **fields}
        (choice,) = self.client.chat.completions.create(model=NAME, **fields).choices
        parts = [c.choices[0] for c in self.client.chat.completions.create(model=NAME, stream=True, **fields)]
        calls = [call.function for part in parts for call in part.delta.tool_calls or []]
        told = [call.function for call in choice.message.tool_calls or []]
        assert [(c.name, c.arguments) for c in calls] == [(c.name, c.arguments) for c in told]
        assert "".join(part.delta.content or "" for part in parts) == (choice.message.content or "")
        assert parts[-1].finish_reason == choice.finish_reason
        return choice

    def refused(self, param: str, **fields: Any) -> str:
        with pytest.raises(openai.BadRequestError) as caught:
            self.client.chat.completions.create(model=NAME, messages=ASKED, **fields)
        assert caught.value.param == param
        return str(caught.value.message)


KINDS = ["text", "tokens", "special tokens"]  # what marks of calls and of reasoning are in a tokenizer


def tokenizer_of(pair: Any, kind: str, template: str = TEMPLATE) -> Any:
    tokenizer = chatml(pair[2], template)
    if kind == "tokens":
        tokenizer.add_tokens([AddedToken(mark, special=False) for mark in MARKS])
    if kind == "special tokens":
        tokenizer.add_special_tokens({"extra_special_tokens": MARKS})
    return tokenizer


@pytest.fixture(scope="module", params=KINDS)
def chat(pair, request) -> Iterator[Chat]:
    """A random model without reasoning, which it would not end."""
    tokenizer = tokenizer_of(pair, request.param, TEMPLATE.replace("think>", "thought>"))
    with serving(scripted_service(tokenizer)) as url:
        yield Chat(url)


@pytest.mark.parametrize("temperature", [0, 1])
def test_a_call_is_required(chat, temperature):
    """One, or as many as the model likes; those that ``max_tokens`` leaves whole."""
    for seed in range(3):
        asked = {"tools": TOOLS, "tool_choice": "required", "temperature": temperature, "seed": seed}
        one = chat.ask(parallel_tool_calls=False, **asked)
        assert one.finish_reason == "tool_calls" and one.message.content is None
        several = chat.ask(**asked)
        assert calls_of(one) == calls_of(several)[:1]
        if several.finish_reason == "tool_calls":
            assert several.message.content is None


def test_calls_repeat(chat):
    found = {len(calls_of(chat.ask(tools=TOOLS, tool_choice="required", seed=seed))) for seed in range(8)}
    assert max(found) > 1


@pytest.mark.parametrize("temperature", [0, 1])
@pytest.mark.parametrize("name", SCHEMA_OF)
def test_a_tool_is_named(chat, temperature, name):
    """``find`` and ``find_all`` begin alike. The prompt has all tools."""
    choice = {"type": "function", "function": {"name": name}}
    asked = {"tools": TOOLS, "temperature": temperature, "parallel_tool_calls": False}
    answer = chat.ask(tool_choice=choice, **asked)
    assert calls_of(answer) == [name] and answer.finish_reason == "tool_calls" and answer.message.content is None


CALL = '<tool_call>\n{"name": "find_all", "arguments": {"colour": "red", "size": 2}}\n</tool_call>'
WRONG = CALL.replace("red", "pink")
THOUGHT = "<think>\nIn <tool_call>?\n</think>"
REQUIRED = {"tools": TOOLS, "tool_choice": "required"}
STRICT = {"tools": [tool("find_all", SCHEMAS["enum"], strict=True), tool("now", None)]}
NOW = '<tool_call>{"name": "now", "arguments": {"zone": [1]}}</tool_call>'


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("fields", "think", "allowed", "refused"),
    [
        (REQUIRED, None, [CALL, CALL + CALL, f"{THOUGHT}\n\n{CALL}"], ["Hm.", f"Hm.{CALL}", WRONG, f"{THOUGHT}\nHm"]),
        (REQUIRED, True, [f"{THOUGHT[7:]}{CALL}\n{CALL}", f"</think>{CALL}"], [f"Hm.</think>{WRONG}", "</think>Hm."]),
        (REQUIRED, False, [CALL], [f"{THOUGHT}\n{CALL}", "Hm."]),
        (STRICT, None, ["", "Hm. <tool", f"Hm. {CALL}\n{NOW} Well."], [f"Hm. {WRONG}", f"{CALL}{WRONG}"]),
        (STRICT, True, [f"Hm.</think>Well. {CALL}"], [f"Hm.</think>Well. {WRONG}"]),
    ],
    ids=["required", "thought begun", "thought ended", "strict", "strict, thought begun"],
)
def test_what_may_be_said(pair, monkeypatch, kind, fields, think, allowed, refused):
    """The model says what we want, one token a time, and fails where the grammar does not allow it."""
    tokenizer = tokenizer_of(pair, kind)
    said = dict(enumerate([*allowed, *refused]))
    if kind != "text":  # the token of another mark is not allowed in a thought
        said = {seed: text.replace("<tool_call>?", "<tool_ call>?") for seed, text in said.items()}
    say(monkeypatch, tokenizer, said)
    asked = {**fields, "extra_body": {} if think is None else {"chat_template_kwargs": {"think": think}}}
    with serving(scripted_service(tokenizer)) as url:
        chat = Chat(url)
        for seed, text in list(said.items())[: len(allowed)]:
            choice = chat.ask(seed=seed, **asked)
            after = text.rpartition("</think>")[2]
            assert len(choice.message.tool_calls or []) == after.count("</tool_call>")
        for seed in range(len(allowed), len(said)):
            with pytest.raises(openai.BadRequestError, match="its grammar allows no token"):
                chat.ask(seed=seed, **asked)


@pytest.mark.parametrize("fields", [REQUIRED, STRICT], ids=["required", "strict"])
def test_calls_of_llama(pair, monkeypatch, fields):
    """An answer is one JSON object, or no call. Strict functions leave all other texts, but what is read as a call."""
    call = CALL[12:-13].replace("arguments", "parameters")
    wrong = [call.replace("red", "pink"), call + call, f"<|python_tag|>{call}"]
    texts = ["Hm. {", "<b>", ""]
    allowed, refused = ([call], wrong + texts) if fields == REQUIRED else ([call, *texts], wrong)
    tokenizer = chatml(pair[2], LLAMA)
    said = dict(enumerate([*allowed, *refused]))
    say(monkeypatch, tokenizer, said)
    with serving(scripted_service(tokenizer)) as url:
        chat = Chat(url)
        for seed in range(len(said)):
            if seed < len(allowed):
                assert len(calls_of(chat.ask(seed=seed, **fields))) == (said[seed] == call)
            else:
                with pytest.raises(openai.BadRequestError, match="its grammar allows no token"):
                    chat.ask(seed=seed, **fields)
        for seed in range(len(said), len(said) + 3):
            assert fields == STRICT or len(calls_of(chat.ask(seed=seed, **fields))) == 1


class Place(BaseModel):
    """A place on a map."""

    name: str = Field(max_length=8)
    kind: Literal["town", "river"]
    at: list[int] = Field(max_length=0)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "Place"}}])
def test_the_client_parses_arguments_into_a_model(chat, choice):
    tools = [openai.pydantic_function_tool(Place)]
    asked = {"model": NAME, "messages": ASKED, "tools": tools, "tool_choice": choice, "max_tokens": 300}
    for seed in range(2):
        answer = chat.client.chat.completions.parse(parallel_tool_calls=False, seed=seed, **asked)
        (call,) = answer.choices[0].message.tool_calls
        assert isinstance(call.function.parsed_arguments, Place)
    with chat.client.chat.completions.stream(parallel_tool_calls=False, seed=0, **asked) as stream:
        (call,) = stream.get_final_completion().choices[0].message.tool_calls
    assert isinstance(call.function.parsed_arguments, Place)


def test_drafters_change_nothing(pair):
    """Rule coupled: the calls are those of plain decoding, token for token, whatever drafts."""
    target, draft, tokenizer = pair
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.chat_template = TEMPLATE.replace("think>", "thought>")
    made = PredictedDrafter(model_drafter(draft, cached_model(target, "target")))
    drafters = {"none": None, "model": draft, "predicted": made, "prompt lookup": PromptLookupDrafter()}

    def make(drafter: str, rule: str) -> Scheduler:
        return Scheduler(SpeculativeDecoder(target, drafters[drafter], 4), rows=2, max_length=1024, rule=rule)

    lanes = Lanes(make, list(drafters), ["coupled"])
    with serving(Service(NAME, tokenizer, lanes)) as url:
        chat = Chat(url)
        for temperature in (0, 1):
            asked = {**REQUIRED, "temperature": temperature, "parallel_tool_calls": False}
            said = [chat.ask(extra_body={"drafter": name}, **asked) for name in drafters]
            arguments = [choice.message.tool_calls[0].function.arguments for choice in said]
            assert all(len(calls_of(choice)) == 1 for choice in said) and len({*arguments}) == 1


def test_what_cannot_be_is_refused_by_name(chat, pair):
    named = {"type": "function", "function": {"name": "finds"}}
    assert "without tools, allowed: none or auto" in chat.refused("tool_choice", tool_choice="required")
    assert "got 'finds', allowed: find, find_all" in chat.refused("tool_choice", tools=TOOLS, tool_choice=named)
    for choice in ("any", {"type": "allowed_tools", "allowed_tools": {}}):
        assert "allowed: none, auto, required, or" in chat.refused("tool_choice", tools=TOOLS, tool_choice=choice)
    unique = tool("f", {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}, strict=True)
    for choice in ("required", "auto"):
        assert "uniqueItems" in chat.refused("tools", tools=[unique], tool_choice=choice)
        assert "object" in chat.refused("tools", tools=[tool("f", {"type": "string"}, strict=True)], tool_choice=choice)
    assert "min_tokens" in chat.refused("min_tokens", extra_body={"min_tokens": 3}, **REQUIRED)
    formed = {"response_format": {"type": "json_object"}, "tools": TOOLS}
    assert "tool_choice none" in chat.refused("response_format", **formed)
    chosen = {"extra_body": {"structured_outputs": {"choice": ["a"]}}, "tools": TOOLS}
    assert "tool_choice none" in chat.refused("structured_outputs", **chosen)
    assert chat.ask(tool_choice="none", **chosen).message.content == "a"
    with serving(scripted_service(chatml(pair[2], XML))) as url:
        chat = Chat(url)
        assert "not JSON between two marks" in chat.refused("tool_choice", **REQUIRED)
        assert "not JSON between two marks" in chat.refused("tools", **STRICT)


def test_what_the_engine_refuses_of_the_grammar_is_told_of_tools():
    reading = Reading(None, None, calls=CallGrammar(CallForm(None, "x"), [], True, True, None, False, {}))
    plan = Plan(None, [], [], [], "messages", reading)
    told = plan.renamed(ApiError(400, "grammar: got one with tree=4", "invalid_value", "grammar"))
    assert (told.param, told.message) == ("tools", "tools: got one with tree=4")


@pytest.mark.parametrize(
    ("field", "marks"),
    [
        ({"open": "<a>", "close": "<b>", "content": "json"}, ("<a>", "<b>")),
        ({"open_pattern": r"\s*<tool_call>", "close": "<b>", "content": "json"}, ("<tool_call>", "<b>")),
        ({"open_pattern": r"<a>call:(?P<name>\w+)", "close": "<b>", "content": "json"}, None),
        ({"open": "<a>", "close": "<b>", "content": "json", "content_args": {"unquoted_keys": True}}, None),
        ({"open": "<a>", "close": "<b>", "content": "json", "transform": {"type": "{content}"}}, None),
        ({"open": "<a>", "close": "<b>", "content": "xml-inline"}, None),
        ({"open": "<a>", "content": "json"}, None),
    ],
)
def test_forms_of_response_templates(field, marks):
    form = call_form(field)
    assert (form and form.marks) == marks

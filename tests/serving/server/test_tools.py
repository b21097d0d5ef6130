"""Tools and reasoning as clients of the ``openai`` package see them, streamed and not. The model says what we want."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from support.chatml import NAME, TEMPLATE, chatml, say, saying, scripted_service, serving

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a town.",
        "parameters": {"type": "object", "properties": {"town": {"type": "string"}}, "required": ["town"]},
    },
}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"town": "Köln"}}\n</tool_call>'
SAYS = {
    1: f"<think>\nI must look.\n</think>\n\nLet me see.\n{CALL}\n<|im_end|>",
    2: "It is mild.<|im_end|>",
    3: f"{CALL}\n{CALL.replace('Köln', 'Bonn')}",
    4: '<tool_call>{"name": weather}</tool_call>',
    5: "Not <|im_end|>shown",
    6: CALL.replace("Köln", "a </tool_call> b") + CALL,
}
ASKED = [{"role": "user", "content": "How is it in Köln?"}]


class Chat:
    """Asks a server that says what SAYS has for a seed, whole and streamed, and checks that both tell the same."""

    def __init__(self, url: str, service: Any):
        self.service = service
        self.client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)

    def create(self, seed: int, **fields: Any) -> Any:
        predicted = {"type": "content", "content": SAYS[seed]}  # so that steps have several tokens
        extra = fields.pop("extra_body", {})
        fields = {"messages": ASKED, "seed": seed, "temperature": 0, "prediction": predicted, **fields}
        return self.client.chat.completions.create(model=NAME, extra_body=extra, **fields)

    def ask(self, seed: int, **fields: Any) -> Any:
        whole = self.create(seed, **fields)
        told = [c.model_dump(exclude_unset=True) for c in self.create(seed, stream=True, **fields)]
        for choice in whole.choices:
            parts = [part for chunk in told for part in chunk["choices"] if part["index"] == choice.index]
            deltas = [part["delta"] for part in parts]
            message = choice.message
            for name in ("content", "reasoning", "reasoning_content"):
                joined = "".join(delta.get(name) or "" for delta in deltas)
                assert joined == (getattr(message, name, None) or "")
            calls = [call for delta in deltas for call in delta.get("tool_calls", [])]
            assert [call.pop("index") for call in calls] == [*range(len(calls))]
            assert [call["function"] for call in calls] == [c.function.model_dump() for c in message.tool_calls or []]
            assert all(call["type"] == "function" and call["id"].startswith("call_") for call in calls)
            assert [part["finish_reason"] for part in parts] == [None] * (len(parts) - 1) + [choice.finish_reason]
        return whole

    def refused(self, param: str, seed: int = 2, **fields: Any) -> str:
        with pytest.raises(openai.BadRequestError) as caught:
            self.create(seed, **fields)
        assert caught.value.param == param
        return str(caught.value.message)


@pytest.fixture
def chat(pair, monkeypatch) -> Iterator[Chat]:
    with saying(monkeypatch, pair[2], SAYS) as (url, service):
        yield Chat(url, service)


def test_the_end_of_a_call_is_none_inside_of_its_strings(chat):
    for fields in ({}, {"parallel_tool_calls": False}):
        choice = chat.ask(6, tools=[WEATHER], **fields).choices[0]
        towns = [json.loads(call.function.arguments)["town"] for call in choice.message.tool_calls]
        assert towns == ["a </tool_call> b", "Köln"][: None if not fields else 1] and not choice.message.content


@pytest.mark.parametrize("arguments", ["", " \n"])
def test_a_call_without_arguments_may_have_an_empty_text(chat, arguments):
    """As clients send it for functions that take none. The chat template gets an object."""
    call = {"id": "c", "type": "function", "function": {"name": "weather", "arguments": arguments}}
    said = [{"role": "assistant", "content": None, "tool_calls": [call]}]
    said.append({"role": "tool", "tool_call_id": "c", "content": "mild"})
    answer = chat.create(2, messages=[*ASKED, *said], tools=[WEATHER])
    call["function"]["arguments"] = "{}"
    assert answer.usage.prompt_tokens == chat.create(2, messages=[*ASKED, *said], tools=[WEATHER]).usage.prompt_tokens
    call["function"]["arguments"] = "["
    assert "a JSON object" in chat.refused(
        "messages[1].tool_calls[0].function.arguments", messages=[*ASKED, *said], tools=[WEATHER]
    )


def test_a_round_trip(chat):
    """The model calls a tool, is told the result, and answers. The prompt has arguments as an object, and reasoning."""
    answer = chat.ask(1, tools=[WEATHER])
    (choice,) = answer.choices
    message = choice.message
    assert (choice.finish_reason, message.content, message.reasoning) == ("tool_calls", "Let me see.", "I must look.")
    assert message.reasoning_content == message.reasoning
    (call,) = message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("weather", {"town": "Köln"})
    tokenizer = chat.service.tokenizer
    thought = len(tokenizer("I must look.", add_special_tokens=False).input_ids)
    assert answer.usage.completion_tokens_details.reasoning_tokens == thought
    assert choice.specdec["stats"]["steps"] < answer.usage.completion_tokens / 2

    result = {"role": "tool", "tool_call_id": call.id, "content": [{"type": "text", "text": "mild"}]}
    messages = [*ASKED, message.model_dump(), result]
    after = chat.ask(2, tools=[WEATHER], messages=messages)
    assert (after.choices[0].message.content, after.choices[0].finish_reason) == ("It is mild.", "stop")
    assert after.choices[0].message.tool_calls is None
    said = {"role": "assistant", "content": "Let me see.", "reasoning_content": "I must look."}
    said["tool_calls"] = [{"function": {"name": "weather", "arguments": {"town": "Köln"}}}]
    rendered = [*ASKED, said, {"role": "tool", "content": "mild"}]
    expected = tokenizer.apply_chat_template(rendered, tools=[WEATHER], add_generation_prompt=True, tokenize=False)
    assert '{"town": "Köln"}' in expected and "<think>I must look.</think>" in expected
    assert after.usage.prompt_tokens == len(tokenizer(expected, add_special_tokens=False).input_ids)


def test_a_call_alone(chat):
    """Its content is null. Without ``parallel_tool_calls`` the text ends with the first one."""
    both = chat.ask(3, tools=[WEATHER]).choices[0]
    assert both.message.content is None and both.finish_reason == "tool_calls"
    towns = [json.loads(call.function.arguments)["town"] for call in both.message.tool_calls]
    assert towns == ["Köln", "Bonn"] and len({call.id for call in both.message.tool_calls}) == 2
    one = chat.ask(3, tools=[WEATHER], parallel_tool_calls=False)
    (call,) = one.choices[0].message.tool_calls
    assert json.loads(call.function.arguments) == {"town": "Köln"} and one.choices[0].finish_reason == "tool_calls"
    tokens = chat.service.tokenizer(CALL, add_special_tokens=False).input_ids
    assert one.usage.completion_tokens == len(tokens)
    stopped = chat.ask(3, tools=[WEATHER], parallel_tool_calls=False, stop=["weather"]).choices[0]
    assert stopped.message.tool_calls is None and stopped.finish_reason == "stop"
    assert len(chat.ask(3, tools=[WEATHER], n=2).choices[0].message.tool_calls) == 2


def test_what_is_no_call(chat):
    """JSON that is none is content, as is a call that ``max_tokens`` cuts, and one without tools."""
    assert chat.ask(4, tools=[WEATHER]).choices[0].message.content == '{"name": weather}'
    cut = chat.ask(3, tools=[WEATHER], max_tokens=20).choices[0]
    assert cut.finish_reason == "length" and cut.message.tool_calls is None
    assert '{"name": "weather"'.startswith(cut.message.content[:10]) and cut.message.content
    for fields in ({}, {"tools": []}, {"tools": [WEATHER], "tool_choice": "none"}):
        choice = chat.ask(3, **fields).choices[0]
        assert choice.message.content == SAYS[3] and choice.message.tool_calls is None
        assert choice.finish_reason == "stop"
    without, none, auto = (chat.ask(2, **fields).usage.prompt_tokens for fields in ({}, fields, {"tools": [WEATHER]}))
    assert without == none < auto
    assert chat.ask(2, tools=[WEATHER], tool_choice="auto").usage.prompt_tokens == auto


def test_special_tokens_and_details(chat):
    """Special tokens that no form names are not shown; log-probabilities and steps have every token."""
    extra = {"specdec": {"steps": True}}
    answer = chat.ask(5, tools=[WEATHER], logprobs=True, extra_body=extra)
    (choice,) = answer.choices
    assert choice.message.content == "Not shown"
    assert len(choice.logprobs.content) == answer.usage.completion_tokens
    assert sum(len(step["tokens"]) for step in choice.specdec["steps"]) == answer.usage.completion_tokens


def test_variables_of_the_template(chat):
    """``chat_template_kwargs`` reach the template, which here may open or close the thinking in the prompt."""
    thinking = {"chat_template_kwargs": {"think": True}}
    closed = {"chat_template_kwargs": {"think": False}}
    assert chat.ask(2, extra_body=thinking).choices[0].message.reasoning == "It is mild."
    assert chat.ask(2, extra_body=thinking).choices[0].message.content == ""
    assert chat.ask(2, extra_body=closed).choices[0].message.content == "It is mild."
    for name in ("enable_thinking", "tools", "messages", "chat_template", "tokenize", "answered", "a b", ""):
        told = chat.refused("chat_template_kwargs", extra_body={"chat_template_kwargs": {name: True}})
        assert repr(name) in told


def test_tools_that_are_none(chat):
    chat.refused("tools[0].type", tools=[{"type": "custom", "custom": {"name": "x"}}])
    chat.refused("tools[0].function.name", tools=[{"type": "function", "function": {"name": "a b"}}])


@pytest.mark.parametrize(
    ("template", "told"),
    [
        (TEMPLATE.replace("tools", "unknown"), "its chat template ignores them"),
        (TEMPLATE.replace("tool_call>", "call>"), "how it writes calls is not known"),
    ],
)
def test_models_without_tools(pair, monkeypatch, template, told):
    tokenizer = chatml(pair[2], template)
    say(monkeypatch, tokenizer, SAYS)
    with serving(scripted_service(tokenizer)) as url:
        chat = Chat(url, None)
        assert told in chat.refused("tools", tools=[WEATHER])
        assert chat.ask(1).choices[0].message.reasoning == "I must look."


def test_a_response_template_is_given(pair, monkeypatch):
    """It is taken instead of what the chat template shows. A text that it cannot read fails by name."""
    call = {"open": "CALL", "close": "END", "content": "json", "content_args": {"allow_non_json": False}}
    template = {"start_anchor": "assistant\n", "fields": {"content": {}, "tool_calls": call}}
    tokenizer = chatml(pair[2])
    texts = {1: 'CALL{"name": "f"}END <think>', 2: "CALL{END"}
    say(monkeypatch, tokenizer, texts)
    with serving(scripted_service(tokenizer, response_template=template)) as url:
        chat = Chat(url, None)
        choice = chat.ask(1, tools=[WEATHER]).choices[0]
        assert (choice.message.content, choice.message.tool_calls[0].function.arguments) == ("<think>", "{}")
        with pytest.raises(openai.InternalServerError) as caught:
            chat.create(2, tools=[WEATHER])
        assert caught.value.code == "unreadable_answer"
        with pytest.raises(openai.APIError, match="response template cannot read it"):
            list(chat.create(2, tools=[WEATHER], stream=True))

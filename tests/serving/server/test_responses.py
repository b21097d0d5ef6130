"""``/v1/responses`` as clients of the ``openai`` package see it, whole and streamed: a chat's answers, as items."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel, Field
from specdec.serving.server.answer_reader import Call, Delta
from specdec.serving.server.response_answer import Output
from support.chatml import NAME, chatml, say, saying, scripted_service, serving

WEATHER = {
    "type": "function",
    "name": "weather",
    "description": "The weather of a town.",
    "parameters": {"type": "object", "properties": {"town": {"type": "string"}}, "required": ["town"]},
    "strict": None,
}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"town": "Köln"}}\n</tool_call>'
SAYS = {
    1: f"<think>\nI must look.\n</think>\n\nLet me see.\n{CALL}\n<|im_end|>",
    2: "It is mild.<|im_end|>",
    3: f"{CALL}\n{CALL.replace('Köln', 'Bonn')}",
    4: "<|im_end|>",
}
QUESTION = "How is it in Köln?"


class Client:
    """Asks a server that says what SAYS has for a seed, whole and streamed, and checks that both tell the same."""

    def __init__(self, url: str, service: Any):
        self.service = service
        self.client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)

    def create(self, seed: int, **fields: Any) -> Any:
        predicted = {"type": "content", "content": SAYS[seed]}  # so that steps have several tokens
        extra = {"seed": seed, "prediction": predicted, **fields.pop("extra_body", {})}
        return self.client.responses.create(
            model=NAME, extra_body=extra, **{"input": QUESTION, "temperature": 0, **fields}
        )

    def ask(self, seed: int, **fields: Any) -> Any:
        whole = self.create(seed, **fields)
        events = [event.model_dump(exclude_unset=True) for event in self.create(seed, stream=True, **fields)]
        assert [event["sequence_number"] for event in events] == [*range(len(events))]
        first, second, *between, last = events
        assert (first["type"], second["type"]) == ("response.created", "response.in_progress")
        assert first["response"]["output"] == second["response"]["output"] == []
        assert last["type"] == f"response.{whole.status}" and last["response"]["status"] == whole.status
        streamed = last["response"]
        assert replayed(between) == streamed["output"]
        assert without_ids(streamed["output"]) == without_ids(whole.model_dump(exclude_unset=True)["output"])
        assert streamed["usage"] == whole.usage.model_dump(exclude_unset=True)
        assert {event["response"]["id"] for event in (first, second, last)} == {streamed["id"]}
        return whole

    def refused(self, param: str, **fields: Any) -> str:
        messages = []
        for stream in (False, True):
            with pytest.raises(openai.BadRequestError) as caught:
                self.create(2, stream=stream, **fields)
            assert caught.value.param == param
            messages.append(str(caught.value.message))
        assert messages[0] == messages[1]
        return messages[0]


def replayed(events: list[dict]) -> list[dict]:
    """The items of which the events tell, each put together from its parts."""
    items: list[dict] = []
    for event in events:
        kind, index = event["type"].removeprefix("response."), event["output_index"]
        if kind == "output_item.added":
            assert index == len(items) and event["item"]["status"] == "in_progress"
            assert not event["item"].get("content") and not event["item"].get("arguments")
            items.append(event["item"])
            continue
        item = items[index]
        assert index == len(items) - 1 and event.get("item_id", item["id"]) == item["id"]
        if kind == "content_part.added":
            item["content"].append(event["part"])
        elif kind in ("output_text.delta", "reasoning_text.delta"):
            assert event["delta"] or not item["content"][0]["text"]
            item["content"][event["content_index"]]["text"] += event["delta"]
        elif kind in ("output_text.done", "reasoning_text.done"):
            assert item["content"][event["content_index"]]["text"] == event["text"]
        elif kind == "content_part.done":
            assert item["content"][event["content_index"]] == event["part"]
        elif kind == "function_call_arguments.delta":
            item["arguments"] += event["delta"]
        elif kind == "function_call_arguments.done":
            assert item["arguments"] == event["arguments"]
        else:
            assert kind == "output_item.done"
            item["status"] = event["item"]["status"]
            assert item == event["item"]
    assert all(item["status"] != "in_progress" for item in items)
    return items


def without_ids(items: list[dict]) -> list[dict]:
    return [{name: value for name, value in item.items() if name not in ("id", "call_id")} for item in items]


@pytest.fixture
def client(pair, monkeypatch) -> Iterator[Client]:
    with saying(monkeypatch, pair[2], SAYS) as (url, service):
        yield Client(url, service)


def test_a_text(client):
    answer = client.ask(2, instructions="Be brief.", max_output_tokens=99, user="me")
    assert (answer.output_text, answer.status, answer.error) == ("It is mild.", "completed", None)
    (item,) = answer.output
    assert (item.type, item.role, item.status, item.content[0].type) == (
        "message",
        "assistant",
        "completed",
        "output_text",
    )
    assert (answer.instructions, answer.max_output_tokens, answer.model, answer.store) == ("Be brief.", 99, NAME, False)
    tokenizer = client.service.tokenizer
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": QUESTION}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    used = answer.usage
    assert used.input_tokens == len(tokenizer(prompt, add_special_tokens=False).input_ids)
    assert (
        used.total_tokens == used.input_tokens + used.output_tokens and used.output_tokens_details.reasoning_tokens == 0
    )
    assert answer.specdec["stats"]["steps"] < used.output_tokens and "speculative_decoding" in answer.metrics
    assert client.ask(4).output_text == ""


def test_a_round_trip_with_a_tool(client):
    """What the model thinks, says and calls comes back as items, and is one message of the next prompt."""
    answer = client.ask(1, tools=[WEATHER])
    thought, said, called = answer.output
    assert (thought.type, said.type, called.type) == ("reasoning", "message", "function_call")
    assert (thought.content[0].text, said.content[0].text) == ("I must look.", "Let me see.")
    assert (called.name, json.loads(called.arguments)) == ("weather", {"town": "Köln"})
    assert called.call_id.startswith("call_") and called.id != called.call_id
    assert answer.usage.output_tokens_details.reasoning_tokens > 0
    assert answer.tools[0].name == "weather" and answer.parallel_tool_calls and answer.tool_choice == "auto"

    question = {"role": "user", "content": [{"type": "input_text", "text": QUESTION}]}
    result = {"type": "function_call_output", "call_id": called.call_id, "output": "mild"}
    items = [question, *(item.model_dump(exclude_unset=True) for item in answer.output), result]
    after = client.ask(2, tools=[WEATHER], input=items)
    assert after.output_text == "It is mild."
    message = {"role": "assistant", "content": "Let me see.", "reasoning_content": "I must look."}
    message["tool_calls"] = [{"function": {"name": "weather", "arguments": {"town": "Köln"}}}]
    rendered = [{"role": "user", "content": QUESTION}, message, {"role": "tool", "content": "mild"}]
    tool = {"type": "function", "function": {name: WEATHER[name] for name in ("name", "description", "parameters")}}
    tokenizer = client.service.tokenizer
    prompt = tokenizer.apply_chat_template(rendered, tools=[tool], add_generation_prompt=True, tokenize=False)
    assert after.usage.input_tokens == len(tokenizer(prompt, add_special_tokens=False).input_ids)


def test_items_of_several_answers_are_several_messages(client):
    """Two answers one after the other, as after a call whose result the client gave, and two calls at once."""
    call = {"type": "function_call", "call_id": "a", "name": "weather", "arguments": "{}"}
    result = {"type": "function_call_output", "call_id": "a", "output": [{"type": "input_text", "text": "mild"}]}
    items = [
        {"role": "user", "content": QUESTION},
        {"role": "assistant", "content": "One."},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Two."}]},
        call,
        {**call, "call_id": "b"},
        result,
        {**result, "call_id": "b"},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]},
        {"role": "developer", "content": "Go on."},
    ]
    calls = [{"function": {"name": "weather", "arguments": {}}}] * 2
    rendered = [
        {"role": "user", "content": QUESTION},
        {"role": "assistant", "content": "One."},
        {"role": "assistant", "content": "Two.", "tool_calls": calls},
        *([{"role": "tool", "content": "mild"}] * 2),
        {"role": "assistant", "content": "", "reasoning_content": "Hm."},
        {"role": "developer", "content": "Go on."},
    ]
    tokenizer = client.service.tokenizer
    prompt = tokenizer.apply_chat_template(rendered, add_generation_prompt=True, tokenize=False)
    assert client.ask(2, input=items).usage.input_tokens == len(tokenizer(prompt, add_special_tokens=False).input_ids)


def test_calls_alone_and_required_ones(client):
    both = client.ask(3, tools=[WEATHER])
    assert [json.loads(item.arguments)["town"] for item in both.output] == ["Köln", "Bonn"]
    one = client.ask(3, tools=[WEATHER], parallel_tool_calls=False)
    assert len(one.output) == 1 and not one.parallel_tool_calls
    none = client.ask(3, tools=[WEATHER], tool_choice="none")
    assert [item.type for item in none.output] == ["message"] and none.tool_choice == "none"
    for choice in ("required", {"type": "function", "name": "weather"}):
        (item,) = client.ask(3, tools=[WEATHER], tool_choice=choice, parallel_tool_calls=False).output
        assert (item.type, item.name) == ("function_call", "weather")


def test_a_text_that_is_cut(client):
    cut = client.ask(1, tools=[WEATHER], max_output_tokens=6)
    assert (cut.status, cut.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert [item.status for item in cut.output] == ["incomplete"] and cut.usage.output_tokens == 6


@pytest.mark.parametrize(
    ("param", "fields", "told"),
    [
        ("previous_response_id", {"previous_response_id": "resp_1"}, "allowed: null"),
        ("store", {"store": True}, "allowed: null or False"),
        ("background", {"background": True}, "allowed: null or False"),
        ("reasoning", {"reasoning": {"effort": "low"}}, "allowed: null"),
        ("text.verbosity", {"text": {"verbosity": "low"}}, "'medium'"),
        ("text", {"text": {"format": {"type": "json_schema", "name": "x"}}}, "without a schema"),
        ("tools[0].type", {"tools": [{"type": "web_search", "name": "x"}]}, "'function'"),
        ("tools[0].name", {"tools": [{**WEATHER, "name": "a b"}]}, "pattern"),
        ("tool_choice", {"tool_choice": "required"}, "without tools"),
        ("tool_choice", {"tools": [WEATHER], "tool_choice": {"type": "function", "name": "x"}}, "weather"),
        ("input", {"max_output_tokens": 10**6}, "1000000"),
        ("max_tokens", {"extra_body": {"max_tokens": 5}}, "not supported here"),
        ("input", {"input": []}, "at least 1"),
        ("input", {"input": "word " * 3000}, "tokens"),
        ("input[0]", {"input": [{"type": "item_reference", "id": "x"}]}, "allowed: an item of type message"),
        ("input[0]", {"input": ["text"]}, "allowed: an item of type message"),
        ("input[0].message.role", {"input": [{"role": "tool", "content": "x"}]}, "'user'"),
        (
            "input[0].function_call.arguments",
            {"input": [{"type": "function_call", "call_id": "a", "name": "f", "arguments": "{"}]},
            "a JSON object, as text",
        ),
        (
            "input[0].message.content",
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
            "input_text",
        ),
    ],
)
def test_what_is_refused(client, param, fields, told):
    assert told in client.refused(param, **fields)


class Point(BaseModel):
    name: str = Field(max_length=6)
    colour: Literal["red", "blue"]


def test_the_client_parses_answers_into_a_model(served):
    own = {"model": "embedded", "input": "Write a loop.", "max_output_tokens": 100, "temperature": 0}
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client:
        parsed = client.responses.parse(text_format=Point, **own)
        assert isinstance(parsed.output_parsed, Point) and parsed.text.format.type == "json_schema"
        with client.responses.stream(text_format=Point, **own) as stream:
            deltas = [event.delta for event in stream if event.type == "response.output_text.delta"]
            final = stream.get_final_response()
        assert final.output_parsed == parsed.output_parsed and "".join(deltas) == final.output_text
        plain = client.responses.create(text={"format": {"type": "text"}}, **own)
        messages = [{"role": "user", "content": "Write a loop."}]
        chat = client.chat.completions.create(
            model="embedded", messages=messages, max_completion_tokens=100, temperature=0
        )
        assert plain.output_text == chat.choices[0].message.content


def test_a_text_that_fails(pair, monkeypatch):
    """By an error before anything is told; in a stream by its last event, with what was written before."""
    call = {"open": "CALL", "close": "END", "content": "json", "content_args": {"allow_non_json": False}}
    template = {"start_anchor": "assistant\n", "fields": {"content": {}, "tool_calls": call}}
    tokenizer = chatml(pair[2])
    monkeypatch.setitem(SAYS, 5, "Let me see. CALL{END")
    say(monkeypatch, tokenizer, SAYS)
    with serving(scripted_service(tokenizer, response_template=template)) as url:
        client = Client(url, None)
        with pytest.raises(openai.InternalServerError) as caught:
            client.create(5, tools=[WEATHER])
        assert caught.value.code == "unreadable_answer"
        *_, last = client.create(5, tools=[WEATHER], stream=True)
    assert (last.type, last.response.status) == ("response.failed", "failed")
    assert last.response.error.code == "server_error" and "response template" in last.response.error.message
    assert last.response.output[0].content[0].text.startswith("Let me see.")


class Scripted:
    """Reads what it is told to read."""

    def __init__(self, deltas: list[Delta]):
        self._deltas = iter(deltas)

    def push(self, text: str) -> Delta:
        return next(self._deltas)

    def finish(self) -> Delta:
        return next(self._deltas, Delta())


CALLED = Call("call_1", "f", '{"a": 1}')


@pytest.mark.parametrize(
    ("deltas", "kinds"),
    [
        ([Delta("a"), Delta("b"), Delta("c")], ["message"]),
        ([Delta("", "a"), Delta("b", "c"), Delta()], ["reasoning", "message"]),
        ([Delta("a"), Delta("", "b"), Delta("c")], ["message", "reasoning", "message"]),
        ([Delta("a", "", (CALLED, CALLED)), Delta("b")], ["message", "function_call", "function_call", "message"]),
        ([Delta(), Delta()], ["message"]),
        ([Delta("", "", (CALLED,)), Delta()], ["function_call"]),
    ],
)
def test_items_are_in_the_order_in_which_they_came(deltas, kinds):
    output = Output(Scripted(deltas))
    events = [*itertools.chain(*[[*output.push("")] for _ in deltas[:-1]], output.finish("incomplete"))]
    assert [item["type"] for item in output.items] == kinds and replayed(events) == output.items
    text = "".join(item["content"][0]["text"] for item in output.items if item["type"] == "message")
    assert text == "".join(delta.content for delta in deltas)
    last = "completed" if kinds[-1] == "function_call" else "incomplete"
    assert [item["status"] for item in output.items] == ["completed"] * (len(kinds) - 1) + [last]

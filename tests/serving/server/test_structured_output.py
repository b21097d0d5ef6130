"""Texts of a form that a request asks for, by the ``openai`` client and by hand: what is enforced, and what is refused
in which words."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Literal

import httpx
import jsonschema
import openai
import pytest
from pydantic import BaseModel, Field
from support.failing_grammars import let_objects_fail
from support.grammars import SCHEMAS
from support.hostile_grammars import HOSTILE

PROMPT = "class Stack:\n    def push(self, item):"
MESSAGES = [{"role": "user", "content": "Write a loop."}]
ASKED = {"model": "embedded", "prompt": PROMPT, "max_tokens": 64, "seed": 5}


def gathered(served, calls) -> list:
    """What ``calls``, each of an asynchronous client, return; all of them run at one time."""

    async def main() -> list:
        async with openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as made:
            return await asyncio.gather(*(call(made) for call in calls))

    return asyncio.run(main())


class Point(BaseModel):
    name: str = Field(max_length=6)
    colour: Literal["red", "blue"]
    place: list[bool] = Field(min_length=1, max_length=2)


def test_the_client_parses_answers_into_a_model(served):
    def parse(temperature: float):
        own = {"messages": MESSAGES, "max_completion_tokens": 110, "seed": 5, "temperature": temperature}
        return lambda client: client.chat.completions.parse(model="embedded", response_format=Point, **own)

    for completion in gathered(served, [parse(t) for t in (0.0, 0.7, 1.0)]):
        (choice,) = completion.choices
        assert isinstance(choice.message.parsed, Point) and choice.finish_reason == "stop"


def test_each_kind_is_enforced_beside_free_texts(served):
    """In one batch: a schema, any object, a regex, choices, a grammar and none; a stream tells the same."""
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMAS["enum"], "strict": True}}
    asked: list[dict] = [
        {"response_format": schema},
        {"extra_body": {"structured_outputs": {"json": SCHEMAS["array"]}}},
        {"extra_body": {"structured_outputs": {"regex": "[0-9]{3}-[a-z]{2}"}}},
        {"extra_body": {"structured_outputs": {"choice": ["left", "right"]}}},
        {"extra_body": {"structured_outputs": {"grammar": 'start: "<" /[a-c]{2}/ ">"'}}},
        {"response_format": {"type": "text"}},
        {},
    ]
    own = {"messages": MESSAGES, "max_completion_tokens": 64, "seed": 5}

    def call(fields: dict, stream: bool):
        async def of(client) -> str:
            answer = await client.chat.completions.create(model="embedded", stream=stream, **own, **fields)
            if not stream:
                return answer.choices[0].message.content
            return "".join([chunk.choices[0].delta.content or "" async for chunk in answer if chunk.choices])

        return of

    texts = gathered(served, [call(fields, stream) for stream in (False, True) for fields in asked])
    whole, streamed = texts[: len(asked)], texts[len(asked) :]
    assert whole == streamed and whole[-1] == whole[-2]
    jsonschema.validate(json.loads(whole[0]), SCHEMAS["enum"])
    jsonschema.validate(json.loads(whole[1]), SCHEMAS["array"])
    assert re.fullmatch("[0-9]{3}-[a-z]{2}", whole[2]) and whole[3] in ("left", "right")
    assert re.fullmatch("<[a-c]{2}>", whole[4])


def refused(served, **fields) -> openai.BadRequestError:
    def call(client):
        return client.completions.create(**{**ASKED, "extra_body": fields})

    with pytest.raises(openai.BadRequestError) as error:
        gathered(served, [call])
    return error.value


def outputs(**fields) -> dict:
    return {"structured_outputs": fields}


def a_schema(schema: dict) -> dict:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}}


@pytest.mark.parametrize(
    ("fields", "param", "told"),
    [
        (a_schema({"uniqueItems": True}), "response_format", r'cannot hold it: Unimplemented keys: \["uniqueItems"\]'),
        (a_schema({"properties": {str(i): {} for i in range(5000)}}), "response_format", "more than 4096 values"),
        (a_schema({"const": 2**60}), "response_format", f"const with {2**60}"),
        (a_schema({"x-guidance": {"item_separator": ";"}}), "response_format", "x-guidance"),
        (a_schema({"items": {"$ref": "#/items"}, "minProperties": 2}), "response_format", "minProperties 2"),
        (a_schema(json.loads(HOSTILE["references"][0]().text)), "response_format", "too deeply to be compiled"),
        (a_schema(json.loads(HOSTILE["properties"][0]().text)), "response_format", "cannot hold it: .*Current row"),
        (outputs(grammar=HOSTILE["rules"][0]().text), "structured_outputs", "too deeply to be compiled"),
        (outputs(regex=HOSTILE["options"][0]().text), "structured_outputs", "it takes more than"),
        ({"response_format": {"type": "json_schema"}}, "response_format", "without a schema"),
        ({"response_format": {"type": "grammar"}}, "response_format.type", "got 'grammar'"),
        (outputs(regex="(?=a)b"), "structured_outputs", "look-around"),
        (outputs(regex="((a{99}){99}){99}"), "structured_outputs", "repetitions that multiply to 970299"),
        (outputs(grammar="start: nothing"), "structured_outputs", "cannot hold it"),
        (outputs(choice=[]), "structured_outputs", "1 to 1000 texts"),
        (outputs(), "structured_outputs", "got nothing, allowed: one of json, regex, choice, grammar"),
        (outputs(regex="a", choice=["a"]), "structured_outputs", "got regex, choice, allowed: one of"),
        (outputs(regex="a", whitespace_pattern=" "), "structured_outputs.whitespace_pattern", "unknown field"),
        (outputs(structural_tag="{}"), "structured_outputs.structural_tag", "unknown field"),
        ({"guided_json": {}}, "guided_json", "unknown field"),
        ({**outputs(regex="a"), "response_format": {"type": "json_object"}}, "structured_outputs", "not together"),
        ({**outputs(regex="a"), "min_tokens": 3}, "min_tokens", "not together with structured_outputs"),
        ({**a_schema({}), "ignore_eos": True}, "ignore_eos", "not together with response_format"),
    ],
)
def test_what_cannot_be_is_refused_by_name(served, fields, param, told):
    error = refused(served, **fields)
    assert error.param == param and re.search(told, error.message), error.message


def test_a_grammar_that_leaves_no_token_is_told(served):
    """By a bias, which a grammar cannot know of."""

    def call(client):
        bias = {str(token): -100 for token in range(4096)}
        return client.completions.create(**ASKED, logit_bias=bias, extra_body=outputs(regex="[0-9]"))

    (answer,) = gathered(served, [call])  # -100 is finite, so this is allowed
    assert re.fullmatch("[0-9]", answer.choices[0].text)


def test_a_grammar_that_fails_in_the_middle_of_a_text_fails_its_request_alone(served, monkeypatch):
    """It came with the request, so it is no error of the server; nor is it after text was streamed."""
    let_objects_fail(monkeypatch, served.service.tokenizer)
    failing = {**ASKED, **a_schema({"type": "object"}), "temperature": 0}
    plain = {**ASKED, "max_tokens": 20}
    expected = httpx.post(f"{served.url}/v1/completions", json=plain).json()["choices"][0]["text"]

    async def main() -> list[httpx.Response]:
        async with httpx.AsyncClient(base_url=served.url, timeout=60) as client:
            bodies = [failing, {**failing, "stream": True}, {**failing, "n": 2}, plain]
            return await asyncio.gather(*(client.post("/v1/completions", json=body) for body in bodies))

    whole, streamed, two, fine = asyncio.run(main())
    assert fine.json()["choices"][0]["text"] == expected
    for answer in (whole, two):
        assert answer.status_code == 400
        error = answer.json()["error"]
        assert error["type"] == "invalid_request_error" and error["code"] == "grammar"
        assert error["message"].startswith("the text failed in the middle: grammar: Parser Error")
    first, *_, last, done = (event.removeprefix("data: ") for event in streamed.text.strip().split("\n\n"))
    assert streamed.status_code == 200 and json.loads(first)["choices"][0]["text"] == "{"
    assert json.loads(last) == whole.json() and done == "[DONE]"

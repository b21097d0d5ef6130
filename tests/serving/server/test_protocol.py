"""Every field that OpenAI documents is supported, or refused by name: the lists are those of the ``openai`` package, so
a new field of OpenAI's fails here."""

from __future__ import annotations

import typing
from collections.abc import Iterable
from typing import Required

import pytest
from openai.types import completion_create_params as completion_params
from openai.types.chat import completion_create_params as chat_params
from openai.types.responses import response_create_params
from pydantic import ValidationError
from specdec.serving.server.request_bodies import ChatRequest, CompletionRequest, refusal
from specdec.serving.server.response_body import ResponsesRequest
from typing_extensions import get_type_hints, is_typeddict

ENDPOINTS = {
    "completions": (CompletionRequest, completion_params, {"model": "m", "prompt": "x"}),
    "chat": (ChatRequest, chat_params, {"model": "m", "messages": [{"role": "user", "content": "x"}]}),
    "responses": (ResponsesRequest, response_create_params, {"model": "m", "input": "x"}),
}
# Whose effects the other tests of this folder show.
SUPPORTED = {
    "completions": {
        *("model", "prompt", "best_of", "echo", "frequency_penalty", "logit_bias", "logprobs", "max_tokens", "n"),
        *("presence_penalty", "seed", "stop", "stream", "stream_options", "temperature", "top_p", "user"),
    },
    "chat": {
        "tool_choice",
        *("messages", "model", "frequency_penalty", "logit_bias", "logprobs", "max_completion_tokens", "max_tokens"),
        *("n", "prediction", "presence_penalty", "seed", "stop", "stream", "stream_options", "temperature"),
        *("top_logprobs", "top_p", "user", "safety_identifier", "prompt_cache_key", "tools", "parallel_tool_calls"),
        "response_format",
    },
    "responses": {
        *("model", "input", "instructions", "max_output_tokens", "parallel_tool_calls", "prompt_cache_key", "stream"),
        *("safety_identifier", "temperature", "text", "tool_choice", "tools", "top_p", "user"),
    },
}  # fmt: skip
HARMLESS = {
    "function_call": "none", "functions": [], "metadata": {}, "modalities": ["text"],
    "service_tier": "auto", "store": False, "tool_choice": "auto",
    "verbosity": "medium", "background": False, "include": [], "reasoning": {}, "top_logprobs": 0,
    "truncation": "disabled", "context_management": [], "stream_options": {"include_obfuscation": False},
}  # fmt: skip
ASKING = {"verbosity": "low", "truncation": "auto"}  # where the last value of the type asks for nothing
# Where the last member of a union is one that we refuse inside.
OF_UNIONS = {
    "messages": [{"role": "user", "content": "x"}],
    "prediction": {"type": "content", "content": "x"},
    "stream_options": {"include_usage": True},
    "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}],
    "tool_choice": {"type": "function", "function": {"name": "f"}},
}
OF_RESPONSES = {
    "text": {"format": {"type": "json_schema", "name": "x", "schema": {}}},
    "tools": [{"type": "function", "name": "f", "parameters": {"type": "object"}, "strict": True}],
    "tool_choice": {"type": "function", "name": "f"},
    "input": [{"role": "user", "content": "x"}],
}
EXTENSIONS = {
    *("top_k", "min_p", "repetition_penalty", "min_tokens", "stop_token_ids", "ignore_eos", "skip_special_tokens"),
    *("include_stop_str_in_output", "spaces_between_special_tokens", "prompt_logprobs", "add_special_tokens"),
    *("cache_salt", "structured_outputs", "drafter", "rule", "num_drafts", "specdec", "chat_template_kwargs"),
}


# What chats take and OpenAI's responses do not, or under another name.
OF_CHATS = {"max_tokens", "n", "seed", "stop", "logit_bias", "presence_penalty", "frequency_penalty"}


def documented(module) -> dict[str, object]:
    fields: dict[str, object] = {}
    kinds = module.ResponseCreateParams if module is response_create_params else module.CompletionCreateParams
    for kind in typing.get_args(kinds):  # streaming, and not
        fields |= get_type_hints(kind)
    return fields


def sample(kind) -> object:
    """A value of a type of the ``openai`` package: of several allowed ones, the last."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if is_typeddict(kind):
        hints = get_type_hints(kind, include_extras=True)
        required = [name for name, hint in hints.items() if typing.get_origin(hint) is Required]
        return {name: sample(hints[name]) for name in required or [*hints][:1]}
    if origin is Required:
        return sample(arguments[0])
    if origin is typing.Literal:
        return arguments[-1]
    if origin is typing.Union:
        return sample([each for each in arguments if each is not type(None)][-1])
    if origin is dict:
        return {"1": sample(arguments[1])}
    if isinstance(origin, type) and issubclass(origin, Iterable):
        return [sample(arguments[0])]
    return {str: "x", bool: True, int: 1, float: 0.5, object: "x"}[kind]


def refused(model, body: dict) -> object:
    with pytest.raises(ValidationError) as caught:
        model.model_validate(body)
    return refusal(caught.value.errors())


def call(arguments: str) -> dict:
    return {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}


FIELDS = [(name, field) for name, (_, module, _) in ENDPOINTS.items() for field in documented(module)]


@pytest.mark.parametrize(("endpoint", "field"), FIELDS)
def test_a_documented_field_is_supported_or_refused_by_name(endpoint, field):
    model, module, least = ENDPOINTS[endpoint]
    if field not in least:
        model.model_validate({**least, field: None})
    if field in SUPPORTED[endpoint]:
        given = OF_RESPONSES if endpoint == "responses" else OF_UNIONS
        model.model_validate({**least, field: given.get(field, sample(documented(module)[field]))})
        return
    if field in HARMLESS:
        model.model_validate({**least, field: HARMLESS[field]})
    told = refused(model, {**least, field: ASKING.get(field, sample(documented(module)[field]))})
    assert (told.status, told.param, told.code) == (400, field, "unsupported_parameter")
    assert f"{field}: got" in told.message and "not supported here, allowed: null" in told.message


def test_no_other_fields_are_known():
    for model, module, _ in ENDPOINTS.values():
        more = {"prediction", "response_format"} | (OF_CHATS if model is ResponsesRequest else set())
        assert set(model.model_fields) - set(documented(module)) <= EXTENSIONS | more


@pytest.mark.parametrize(
    ("field", "value", "param"),
    [
        ("temperature", True, "temperature"),
        ("temperature", "1", "temperature"),
        ("temperature", 2.01, "temperature"),
        ("temperature", -0.01, "temperature"),
        ("temperature", float("nan"), "temperature"),
        ("top_p", 1.1, "top_p"),
        ("top_k", 1.0, "top_k"),
        ("top_k", -2, "top_k"),
        ("max_tokens", 1.0, "max_tokens"),
        ("max_tokens", -1, "max_tokens"),
        ("max_tokens", True, "max_tokens"),
        ("n", 0, "n"),
        ("n", 129, "n"),
        ("seed", 2**63, "seed"),
        ("stop", [], None),
        ("stop", "", "stop"),
        ("stop", ["a", ""], "stop"),
        ("stop", list("abcde"), "stop"),
        ("stop", [1], "stop"),
        ("stream", 1, "stream"),
        ("stream", "true", "stream"),
        ("stream_options", {"include_usage": 1}, "stream_options.include_usage"),
        ("stream_options", {"include_obfuscation": True}, "stream_options.include_obfuscation"),
        ("logit_bias", {"1": 101}, "logit_bias"),
        ("logit_bias", {"x": 1}, "logit_bias"),
        ("logit_bias", {"-1": 1}, "logit_bias"),
        ("logit_bias", {"1": "1"}, "logit_bias"),
        ("logit_bias", [1], "logit_bias"),
        ("presence_penalty", 2.5, "presence_penalty"),
        ("frequency_penalty", -2.5, "frequency_penalty"),
        ("min_p", 1.5, "min_p"),
        ("repetition_penalty", 0, "repetition_penalty"),
        ("stop_token_ids", [1, -1], "stop_token_ids[1]"),
        ("skip_special_tokens", False, "skip_special_tokens"),
        ("prompt_logprobs", 21, "prompt_logprobs"),
        ("num_drafts", -1, "num_drafts"),
        ("specdec", {"steps": 1}, "specdec.steps"),
        ("specdec", {"step": True}, "specdec.step"),
        ("prediction", {"type": "content"}, "prediction.content"),
        ("prediction", {"type": "content", "content": [{"type": "image_url"}]}, "prediction.content"),
        ("model", 1, "model"),
        ("use_beam_search", True, "use_beam_search"),
        ("guided_json", {}, "guided_json"),
    ],
)
def test_values_are_strict(field, value, param):
    for model, _, least in ENDPOINTS.values():
        body = {**least, field: value}
        if model is ResponsesRequest and field in ("specdec", "stream_options"):  # nothing of these is taken
            param = field
        if param is None:
            model.model_validate(body)
        else:
            told = refused(model, body)
            assert told.param == param and told.message.startswith(f"{param}: ")


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"role": "critic", "content": "x"}, "messages[0].role"),
        ({"role": "tool", "content": "x"}, "messages[0].tool_call_id"),
        ({"role": "user", "content": "x", "tool_call_id": "c"}, "messages[0].tool_call_id"),
        ({"role": "tool", "content": "x", "tool_call_id": "c"}, None),
        ({"role": "user"}, "messages[0].content"),
        ({"role": "user", "content": None}, "messages[0].content"),
        ({"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}, "messages[0].content"),
        ({"role": "user", "content": "x", "name": "Ada"}, "messages[0].name"),
        ({"role": "assistant", "content": "x", "tool_calls": [{}]}, "messages[0].tool_calls[0].id"),
        ({"role": "user", "content": "x", "tool_calls": [call("{}")]}, "messages[0].tool_calls"),
        ({"role": "user", "content": "x", "reasoning": "y"}, "messages[0].reasoning"),
        ({"role": "assistant"}, "messages[0].content"),
        ({"role": "assistant", "tool_calls": []}, "messages[0].content"),
        ({"role": "assistant", "tool_calls": [call('{"a": 1}')]}, None),
        ({"role": "assistant", "content": "x", "reasoning_content": "y"}, None),
        *(
            ({"role": "assistant", "tool_calls": [call(arguments)]}, "messages[0].tool_calls[0].function.arguments")
            for arguments in ("[1]", "{", '{"a": NaN}', '{"a": "\\ud800"}', "[" * 100_000, '{"a": 1, "a": 2}')
        ),
        ({"role": "assistant", "content": "x", "refusal": None, "tool_calls": None, "annotations": []}, None),
        ({"role": "developer", "content": [{"type": "text", "text": "x"}]}, None),
    ],
)
def test_messages(message, param):
    body = {"model": "m", "messages": [message]}
    if param is None:
        ChatRequest.model_validate(body)
    else:
        assert refused(ChatRequest, body).param == param
    assert refused(ChatRequest, {"model": "m", "messages": []}).param == "messages"


@pytest.mark.parametrize("prompt", [[], ["a"], [1, 2], [[1], [2]], None])
def test_forms_of_a_prompt(prompt):
    assert CompletionRequest.model_validate({"model": "m", "prompt": prompt}).prompt == prompt


@pytest.mark.parametrize("prompt", [1, True, {}, [True], [1, "a"], ["a", 1], [[1], "a"], [[[1]]], [-1], [1.0]])
def test_forms_that_no_prompt_has(prompt):
    assert refused(CompletionRequest, {"model": "m", "prompt": prompt}).param == "prompt"

"""How a model writes reasoning and calls of tools: its response template, as transformers has them, or one of ours."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ...checks import refuse
from ...detokenize import Detokenizer
from .answer_reader import CALLS, CONTENT, REASONING, AnswerReader, CallParser, Field
from .call_grammar import JSON_ALONE, CallForm, CallGrammar, Marks, call_form, marks_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_FIELDS = {
    "content": CONTENT,
    "reasoning_content": REASONING,
    "reasoning": REASONING,
    "thinking": REASONING,
    "tool_calls": CALLS,
}
# The forms of models whose tokenizers have no response template. Which one it is, the chat template tells by what it
# has; the first that fits is taken.
_CALLS: tuple[tuple[tuple[str, ...], dict[str, Any]], ...] = (
    (
        ("<tool_call>", "<function="),  # Qwen3-Coder, Qwen3.5
        {
            "open_pattern": r"<tool_call>\s{0,8}<function=(?P<name>[^>\n]{1,256})>",
            "close_pattern": r"</function>\s{0,8}</tool_call>",
            "content": "xml-inline",
            "content_args": {"tag_pattern": r"<parameter=(?P<key>[^>\n]+)>\n?(?P<value>.*?)\n?</parameter>"},
            "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
            "repeats": True,
        },
    ),
    (
        ("<tool_call>",),  # Hermes, Qwen2.5, Qwen3
        {"open": "<tool_call>", "close": "</tool_call>", "content": "json", "repeats": True},
    ),
    (
        ("<|start_header_id|>", '"parameters": '),  # Llama 3
        JSON_ALONE,
    ),
)
_THOUGHT_SIGN, _THOUGHT = "</think>", {"open": "<think>", "close": "</think>"}
_ANCHORS = ("<|im_start|>assistant", "<|start_header_id|>assistant<|end_header_id|>", "<｜Assistant｜>")


@dataclass(frozen=True)
class AnswerForm:
    """What the answers of some requests consist of.

    Args:
        template: a response template of transformers.
        detokenizer: gives those special tokens a text that the template names; what it does not name is not shown.
        call_form: of calls that a grammar can have; None: there are none.
        thought: what is around reasoning; None: no reasoning, or not two marks.
        added: the added tokens of the tokenizer, which special ones are, with their ids.
    """

    tokenizer: PreTrainedTokenizerBase
    template: Mapping[str, Any]
    fields: Mapping[str, Field]
    detokenizer: Detokenizer
    call_form: CallForm | None
    thought: Marks | None
    added: Mapping[str, int]

    def reader(self, prompt: str, tools: Sequence[Mapping[str, Any]]) -> AnswerReader:
        """Reads an answer to ``prompt``, which may have begun it. Arguments get the types that ``tools`` say."""
        parser = self._parser(prompt, tools)
        if self.call_form is not None and self.call_form.marks is not None:
            calls = [name for name, field in self.fields.items() if field.to == CALLS]
            parser = CallParser(parser, calls, self.call_form.marks)
        return AnswerReader(parser, self.fields)

    def call_grammar(
        self, prompt: str, schemas: Sequence[tuple[str, Mapping[str, Any]]], required: bool, parallel: bool
    ) -> CallGrammar:
        """What an answer to ``prompt`` has to be, see ``CallGrammar``. Raises ValueError if no grammar can say it."""
        name, given, allowed = ("tools", "strict functions", "others")
        if required:
            name, given, allowed = "tool_choice", "required or a function", "auto or none"
        if self.call_form is None:
            refuse(name, given, f"{allowed}, since this model's calls are not JSON between two marks")
        thoughts = [e["type"] for e in self._parser(prompt).initial_events if self.fields[e["field"]].to == REASONING]
        thinking = bool(thoughts) and thoughts[-1] != "region_close"
        thought = self.thought if thinking or not thoughts else None
        if self.call_form.marks is None:  # it is read as a call only where it is all of the answer
            thought = None
        if required and thinking and thought is None:
            refuse(name, given, f"{allowed} after this prompt, since it begins a thought")
        marks = {*(self.call_form.marks or ()), *(self.thought or ())}
        added = {text: i for text, i in self.added.items() if text in marks}
        return CallGrammar(self.call_form, schemas, required, parallel, thought, thinking, added)

    def _parser(self, prompt: str, tools: Sequence[Mapping[str, Any]] = ()) -> Any:
        return self.tokenizer.get_response_parser(dict(self.template), prefix=prompt, tools=[*map(dict, tools)])


class Dialect:
    """
    Args:
        template: a response template; None: that of the tokenizer, or one of ours if the chat template shows that it
            fits.

    Attributes:
        plain: of answers to requests without tools. None: the text is the content.
        with_tools: of answers that may have calls. None: how the model writes these is not known.

    Raises:
        ValueError: the response template is none, or has fields that no answer here has.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, template: Mapping[str, Any] | None = None):
        if template is None:
            template = getattr(tokenizer, "response_template", None) or _guessed(tokenizer)
        self.plain: AnswerForm | None = None
        self.with_tools: AnswerForm | None = None
        if template is None:
            return
        try:
            tokenizer.get_response_parser(dict(template), prefix="")
        except (TypeError, ValueError) as error:
            raise ValueError(f"response_template: {error}") from error
        for name, field in template["fields"].items():
            if name not in _FIELDS:
                refuse("response_template", f"a field {name!r}", ", ".join(_FIELDS))
            if _FIELDS[name] != CALLS and (field.get("content", "text") != "text" or "transform" in field):
                refuse("response_template", f"a field {name!r} that is no text", "texts, but for tool_calls")
        has_calls = CALLS in map(_FIELDS.get, template["fields"])
        self.plain = _form(tokenizer, template, False)
        self.with_tools = _form(tokenizer, template, True) if has_calls else None


def _form(tokenizer: PreTrainedTokenizerBase, template: Mapping[str, Any], calls: bool) -> AnswerForm | None:
    """What is left of a template without ``calls``; None: everything is content."""
    fields, places = {}, {}
    form, thought = None, None
    for name, field in template["fields"].items():
        to, arguments = _FIELDS[name], field.get("content_args", {})
        if to == CALLS and not calls:
            continue
        if to == CALLS:
            form = call_form(field)
        if to == REASONING:
            thought = thought or marks_of(field)
        places[name] = Field(to, arguments.get("strip", True), field.get("join") or "")
        if field.get("content") == "json":  # what is no JSON is content
            arguments = {"allow_non_json": True, **arguments}
        fields[name] = {**field, "content_args": arguments, "optional": True}  # a text can end before it has all
    if not any("open" in field or "open_pattern" in field for field in fields.values()):
        return None
    kept = {**template, "fields": fields}
    named = json.dumps(kept, ensure_ascii=False).replace("\\", "")  # without escapes of patterns
    special = {i: token.content for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    special |= dict(zip(tokenizer.all_special_ids, tokenizer.all_special_tokens, strict=True))
    hidden = [i for i, token in special.items() if token not in named]
    ids = {token.content: i for i, token in tokenizer.added_tokens_decoder.items()}
    return AnswerForm(tokenizer, kept, places, Detokenizer(tokenizer, hidden), form, thought, ids)


def _guessed(tokenizer: PreTrainedTokenizerBase) -> dict[str, Any] | None:
    source = tokenizer.chat_template or ""
    if isinstance(source, dict):  # several, by name
        source = "\n".join(source.values())
    anchors = [anchor for anchor in _ANCHORS if anchor in source]
    fields: dict[str, dict[str, Any]] = {"content": {}}
    if _THOUGHT_SIGN in source:
        fields["reasoning_content"] = _THOUGHT
    if calls := next((form for signs, form in _CALLS if all(sign in source for sign in signs)), None):
        fields["tool_calls"] = calls
    return {"start_anchor": anchors, "fields": fields} if anchors and len(fields) > 1 else None

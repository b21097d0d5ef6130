"""Grammars: what is refused and in which words, what is allowed token by token, and what hostile ones cost."""

from __future__ import annotations

import copy
import json
import sys
import time
from types import SimpleNamespace

import pytest
import torch
from specdec.sampling.grammar import GrammarCompiler, check_source
from specdec.sampling.grammar_limits import LONGEST
from specdec.sampling.grammar_masks import GrammarMasks
from specdec.sampling.grammar_source import MOST_CHOICES, GrammarSource
from transformers import AddedToken

OBJECT = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
schema, regex, choice, lark = (getattr(GrammarSource, kind) for kind in ("json_schema", "regex", "choice", "lark"))


@pytest.fixture(scope="module")
def tokenizer(pair):
    return pair[2]


@pytest.fixture(scope="module")
def compiler(tokenizer) -> GrammarCompiler:
    return GrammarCompiler(tokenizer, len(tokenizer) + 40, [0])  # a padded vocabulary


# ---- what is refused ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "given", "told"),
    [
        (schema, "[1]", "allowed: a JSON Schema"),
        (schema, "{", "allowed: a JSON Schema"),
        (schema, True, "allowed: a JSON Schema"),
        (schema, {"enum": ["x" * LONGEST]}, "characters, allowed: up to"),
        (schema, {"enum": list(range(5000))}, "more than 4096 values"),
        (schema, {"type": "string", "pattern": "(a{99}){99}"}, "repetitions that multiply to 9801"),
        (regex, "", "a regular expression"),
        (regex, 5, "a regular expression"),
        (regex, "a\0b", "a NUL"),
        (regex, "\ud800", "lone surrogate"),
        (regex, "((a{100}){10,}){5}", "repetitions that multiply to 5000"),
        (regex, "a{" + "0" * 40 + "9999}", "repetitions that multiply to 9999"),
        (regex, "a{99999999999999}", "repetitions that multiply to 9999999999"),
        (regex, "(" * 30_000 + "a{9999}", "repetitions that multiply to 9999"),
        (lark, "start: /(a{100}){100}/", "repetitions that multiply to 10000"),
        (choice, [], "1 to 1000 texts"),
        (choice, "yes", "1 to 1000 texts"),
        (choice, ["yes", ""], "1 to 1000 texts"),
        (choice, ["yes"] * (MOST_CHOICES + 1), "1 to 1000 texts"),
        (lark, "", "a Lark grammar"),
    ],
)
def test_malformed_sources_are_refused_by_name(make, given, told):
    with pytest.raises(ValueError, match=f"^field: got .*{told}"):
        make(given, name="field")


@pytest.mark.parametrize(
    ("source", "words"),
    [
        (schema({"type": "array", "uniqueItems": True}), r'Unimplemented keys: \["uniqueItems"\]'),
        (schema({"type": "string", "format": "iri"}), "Unknown format: iri"),
        (schema({"if": {}, "then": {}}), "Unimplemented keys"),
        (schema({"$ref": "#/nowhere"}), "does not exist"),
        (regex("(?=a)b"), "look-around"),
        (regex("["), "unclosed character class"),
        (lark("start: missing"), "missing"),
    ],
)
def test_what_the_library_cannot_hold_is_told_in_its_words(compiler, source, words):
    for check in (check_source, compiler.compile):
        with pytest.raises(ValueError, match=f"^field: llguidance cannot hold it: .*{words}") as error:
            check(source, "field")
        assert "\n" not in str(error.value) and len(str(error.value)) < 400


def test_repetitions_that_are_none_do_not_count():
    for fine in (r"\{9999\}", "[{9999}]", "a{64}b{64}c{64}", "(a{64}|b{64})*", "{", ")", "(a{60}b){60}", "[]{9}]{3}"):
        assert regex(fine).text == fine


def nested(depth: int) -> dict:
    inner: dict = {"type": "string"}
    for _ in range(depth):
        inner = {"type": "object", "properties": {"a": inner}, "required": ["a"], "additionalProperties": False}
    return inner


HOSTILE = {
    "deep": lambda: schema(nested(400)),
    "deep text": lambda: schema('{"items":' * 20_000 + "{}" + "}" * 20_000),
    "enum": lambda: schema({"enum": [f"value {i}" for i in range(100_000)]}),
    "properties": lambda: schema({"properties": {f"p{i}": {"type": "integer"} for i in range(5000)}}),
    "items": lambda: schema({"type": "array", "items": {"type": "integer"}, "minItems": 10_000_000}),
    "recursion": lambda: schema({"$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}]}}, "$ref": "#/$defs/a"}),
    "powers": lambda: regex("(((((a{100}){100}){100}){100}){100})"),
    "catastrophe": lambda: regex("(a+)+(a|a)*(a*)*b"),
    "wide": lambda: regex(r"(.*a){60}.*(\w{60}|\w{61})"),
    "and": lambda: lark("start: T\nT: /(.*a){30}/ & /(.*b){30}/ & /(.*c){30}/"),
    "ambiguous": lambda: lark('start: a\na: a a a | "x" | '),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_grammars_cost_little(compiler, name):
    """They are refused, or harmless: of the processor's time, so that a busy machine says nothing else."""
    compiler.compile(choice(["warm"]))
    began = time.process_time()
    try:
        grammar = compiler.compile(HOSTILE[name]())
    except (ValueError, RecursionError) as error:
        assert isinstance(error, ValueError)
    else:
        masks = GrammarMasks(grammar.vocab_size, torch.device("cpu"))
        masks.begin(0, grammar)
        masks.after(masks.send(torch.tensor([[64, 64, 64]])))
    assert time.process_time() - began < 1


def test_a_missing_package_is_refused_by_name(tokenizer, monkeypatch):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(ValueError, match=r"^grammar: .*llguidance.*pip install 'specdec-kernels\[grammar\]'"):
        GrammarCompiler(tokenizer, 4096, [0])


def test_a_compiler_needs_a_fast_tokenizer_and_an_end(tokenizer):
    with pytest.raises(ValueError, match="^tokenizer: got a SimpleNamespace"):
        GrammarCompiler(SimpleNamespace(), 4096, [0])
    with pytest.raises(ValueError, match="^eos_token_id: got none"):
        GrammarCompiler(tokenizer, 4096, [])


def test_compiled_grammars_are_kept(compiler):
    assert compiler.compile(schema(OBJECT)) is compiler.compile(schema(json.dumps(OBJECT)))
    assert compiler.compile(regex("a")) is not compiler.compile(choice(["a"]))


# ---- masks -------------------------------------------------------------------------------------------------


def allowed(mask: torch.Tensor) -> set[int]:
    return {v for v in range(32 * len(mask)) if mask[v // 32] >> (v % 32) & 1}


def by_definition(tokenizer, texts: list[str], before: str) -> set[int]:
    """The tokens that continue ``before`` to a beginning of one of ``texts``; the end where it is one of them."""
    tokens = {
        v
        for v in range(1, len(tokenizer))
        if (text := tokenizer.decode([v])) and any(whole.startswith(before + text) for whole in texts)
    }
    return tokens | ({0} if before in texts else set())


def test_masks_are_those_of_the_grammar_after_each_draft(compiler, tokenizer):
    texts = ["yes", "yesterday", "no", "not now"]
    masks = GrammarMasks(compiler.vocab_size, torch.device("cpu"))
    masks.begin(1, compiler.compile(choice(texts)))
    y, e, s = (tokenizer.convert_tokens_to_ids(c) for c in "yes")
    drafts = torch.tensor([[y, e, s], [y, e, s], [5, 6, 7]])
    found = masks.after(masks.send(drafts))
    assert found.shape == (3, 4, -(-compiler.vocab_size // 32)) and found.dtype == torch.int32
    assert (found[0] == -1).all() and (found[2] == -1).all()  # without a grammar
    for i, before in enumerate(("", "y", "ye", "yes")):
        assert allowed(found[1, i]) == by_definition(tokenizer, texts, before)
    # The walk has left the state as it was, and emitted tokens advance it.
    assert torch.equal(masks.after(masks.send(drafts)), found)
    masks.follow(1, [y, e])
    assert torch.equal(masks.after(masks.send(drafts[:, :0]))[1, 0], found[1, 2])
    masks.end(1)
    assert not masks


@pytest.mark.parametrize("wrong", [-1, 10**6, 4100, 7])
def test_after_a_draft_that_is_not_allowed_everything_is(compiler, tokenizer, wrong):
    """7 is a token, 4100 one of the padding; the others are none, and must not spoil the state."""
    masks = GrammarMasks(compiler.vocab_size, torch.device("cpu"))
    masks.begin(0, compiler.compile(choice(["yes"])))
    y, e, s = (tokenizer.convert_tokens_to_ids(c) for c in "yes")
    right = masks.after(masks.send(torch.tensor([[y, e, s]])))
    for place in range(3):
        drafts = torch.tensor([[y, e, s]])
        drafts[0, place] = wrong
        found = masks.after(masks.send(drafts))
        assert torch.equal(found[0, : place + 1], right[0, : place + 1])
        assert (found[0, place + 1 :] == -1).all() and wrong not in allowed(found[0, place])
    assert not masks.failures


def test_where_a_text_must_end_only_the_end_is_allowed(compiler, tokenizer):
    masks = GrammarMasks(compiler.vocab_size, torch.device("cpu"))
    masks.begin(0, compiler.compile(regex("[0-9]{2}")))
    ids = tokenizer("12").input_ids
    masks.follow(0, ids)
    found = masks.after(masks.send(torch.tensor([[0, 0, 5]])))
    assert allowed(found[0, 0]) == {0} and not masks.failures


def test_a_token_that_is_not_allowed_cannot_be_followed(compiler):
    masks = GrammarMasks(compiler.vocab_size, torch.device("cpu"))
    masks.begin(0, compiler.compile(choice(["yes"])))
    masks.follow(0, [7])
    masks.after(masks.send(torch.zeros(1, 0, dtype=torch.int64)))
    assert masks.failures[0].after == 0 and str(masks.failures[0].error).startswith("grammar: ")


def test_forced_tokens_are_those_of_masks_with_one_bit(compiler, tokenizer):
    masks = GrammarMasks(compiler.vocab_size, torch.device("cpu"))
    masks.begin(0, compiler.compile(schema(OBJECT)))
    assert tokenizer.decode(masks.forced(0)) == "{" and masks.forced(1) == []
    found = masks.after(masks.send(torch.tensor([masks.forced(0)])))
    assert allowed(found[0, 0]) == {*masks.forced(0)} and len(allowed(found[0, 1])) > 1


@pytest.mark.parametrize("source", [schema(OBJECT), regex("a/b"), choice(["yes"]), lark('start: "x"')])
@pytest.mark.parametrize("mark", ["</think>", "<|pad|>", "<end of thought>", "[/THINK]", 'say "so" now\\'])
def test_a_grammar_may_begin_after_a_mark(pair, source, mark):
    """Before it there is any text but an end; after it, what the grammar allows first. An added token may have any
    name."""
    tokenizer = copy.deepcopy(pair[2])
    if mark != "</think>":  # which is a text
        tokenizer.add_tokens([AddedToken(mark, special=True)])
    compiler = GrammarCompiler(tokenizer, len(tokenizer) + 40, [0])
    masks, alone = (GrammarMasks(compiler.vocab_size, torch.device("cpu")) for _ in range(2))
    after = source.after(mark if mark == "</think>" else tokenizer.convert_tokens_to_ids(mark))
    masks.begin(0, compiler.compile(after))
    alone.begin(0, compiler.compile(source))
    thoughts, none = tokenizer(f"I {{think}}\n so{mark}").input_ids, torch.zeros(1, 0, dtype=torch.int64)
    found = masks.after(masks.send(torch.tensor([thoughts])))[0]
    assert all(len(allowed(row)) > 3000 and 0 not in allowed(row) for row in found[:-1])
    assert torch.equal(found[-1], alone.after(alone.send(none))[0, 0])
    for wrong in (-1, True, None, ""):
        with pytest.raises(ValueError, match=f"^mark: got {wrong!r}, allowed: a text, or the id of an added token"):
            source.after(wrong)
    with pytest.raises(ValueError, match="^grammar: llguidance cannot hold it: .*99999"):
        compiler.compile(source.after(99_999))


def test_a_grammar_has_others_in_it(compiler, tokenizer):
    parts = {"first": choice(["yes", "yesterday"]), "second": choice(["no", "never"])}
    masks, texts = GrammarMasks(compiler.vocab_size, torch.device("cpu")), ["yes no", "yes never", "yesterday no"]
    masks.begin(0, compiler.compile(GrammarSource.joined('start: @first " " @second', parts)))
    masks.follow(0, tokenizer("y").input_ids)
    found = masks.after(masks.send(torch.zeros(1, 0, dtype=torch.int64)))
    assert allowed(found[0, 0]) == by_definition(tokenizer, texts, "y")
    with pytest.raises(ValueError, match="^tools: got .* characters, allowed: up to"):
        GrammarSource.joined("start: @a", {"a": lark('start: "' + "x" * 65_500 + '"')}, name="tools")


def test_two_texts_of_one_grammar_do_not_know_of_each_other(compiler, tokenizer):
    texts, masks = ["yes", "yesterday", "no"], GrammarMasks(compiler.vocab_size, torch.device("cpu"))
    grammar = compiler.compile(choice(texts))
    masks.begin(0, grammar)
    masks.begin(1, grammar)
    masks.follow(0, tokenizer("y").input_ids)
    found = masks.after(masks.send(torch.zeros(2, 0, dtype=torch.int64)))
    assert allowed(found[0, 0]) == by_definition(tokenizer, texts, "y")
    assert allowed(found[1, 0]) == by_definition(tokenizer, texts, "")


@pytest.mark.parametrize("white", ["", " ", "\n    ", "  "])
def test_white_space_in_json_is_bounded(compiler, tokenizer, white):
    matcher = compiler.compile(schema(OBJECT)).matcher()
    text = tokenizer(f'{{{white}"name":{white}"x",{white}"age":{white}5{white}}}').input_ids
    assert matcher.validate_tokens(text) == len(text)
    endless = tokenizer("{" + "\n" * 2 + " " * 40).input_ids
    assert matcher.validate_tokens(endless) < len(endless)

"""bench_grammar.py: its schemas, and what it counts."""

from __future__ import annotations

import copy
import json

import bench_grammar as bench
import jsonschema
from json_schemas import schemas
from specdec import GrammarSource, SpeculativeDecoder
from specdec.sampling.grammar import check_source
from support.tiny_service import TEMPLATE


def test_schemas_are_different_and_can_be_held():
    found = schemas(200)
    assert len({json.dumps(schema) for schema in found}) == 200
    for schema in found:
        jsonschema.Draft202012Validator.check_schema(schema)
        check_source(GrammarSource.json_schema(schema))


def test_it_counts_valid_texts_and_forced_tokens(pair):
    tokenizer = copy.deepcopy(pair[2])
    tokenizer.chat_template = TEMPLATE
    decoder = SpeculativeDecoder(pair[0], bench.DRAFTERS["forced"], 3)
    schema = {"type": "object", "properties": {"on": {"type": "boolean"}}, "required": ["on"]}
    schema["additionalProperties"] = False
    grammar = decoder.grammar_compiler(tokenizer).compile(GrammarSource.json_schema(schema))
    found = bench.measure(decoder, tokenizer, [(schema, grammar)], 0.0, 40)
    assert found["texts"] == found["whole"] == found["valid"] == 1
    assert 0 < found["forced"] < found["tokens"] and found["accepted"] > 0
    assert not bench.is_valid('{"on": 1}', schema) and not bench.is_valid('{"on"', schema)

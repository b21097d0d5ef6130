"""bench_clients.py: what its clients send, and what it counts."""

from __future__ import annotations

import asyncio
import dataclasses
import json

import bench_clients as bench
import jsonschema
from json_schemas import schemas
from specdec import GrammarSource
from specdec.sampling.grammar import check_source
from specdec.serving.server.server_settings import ServerSettings
from support.servers import serving
from support.tiny_service import NAME, tiny_service

SCHEMA = {"type": "object", "properties": {"on": {"type": "boolean"}}, "required": ["on"]}
SCHEMA["additionalProperties"] = False


def test_schemas_are_different_and_can_be_held():
    found = schemas(200)
    assert len({json.dumps(schema) for schema in found}) == 200
    for schema in found:
        jsonschema.Draft202012Validator.check_schema(schema)
        check_source(GrammarSource.json_schema(schema))
    assert not bench.is_valid('{"on": 1}', SCHEMA) and not bench.is_valid('{"on"', SCHEMA)


def test_crowds(pair, monkeypatch):
    """Texts that obey are the same beside free ones, which are as long as they are told; what is refused is lost."""
    monkeypatch.setattr(bench, "MODEL", NAME)
    service = dataclasses.replace(tiny_service(pair[2], rows=3), settings=ServerSettings(port=0))

    async def main():
        found = {}
        async with serving(service) as (_, port):
            url = f"http://127.0.0.1:{port}"
            for name in ("grammars", "half", "free"):
                found[name] = await bench.crowd(url, (SCHEMA,) * 4, bench.CROWDS[name], [5, 6, 7, 8], 20)
            found["alone"] = await bench.crowd(url, (SCHEMA,) * 2, bench.CROWDS["free"], [5, 6], 20, at_once=1)
            found["refused"] = await bench.crowd(url, ({"type": "none"},), bench.CROWDS["grammars"], [], 20)
        return found

    found = asyncio.run(main())
    obeying, half, free = (found[name][0] for name in ("grammars", "half", "free"))
    assert all(text.whole and bench.is_valid(text.content, SCHEMA) for text in obeying)
    assert half[1::2] == obeying[1::2] and [text.tokens for text in half[::2]] == [5, 7]
    assert [text.tokens for text in free] == [5, 6, 7, 8] and not any(text.whole for text in free)
    assert found["alone"][0] == free[:2]
    assert found["refused"][0] == [None] and all(seconds > 0 for _, seconds in found.values())

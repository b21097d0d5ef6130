"""bench_clients.py: what its clients send, and what it counts."""

from __future__ import annotations

import asyncio
import dataclasses

import bench_clients as bench
from specdec.serving.server.server_settings import ServerSettings
from support.servers import serving
from support.tiny_service import NAME, tiny_service

SCHEMA = {"type": "object", "properties": {"on": {"type": "boolean"}}, "required": ["on"]}
SCHEMA["additionalProperties"] = False


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
            found["refused"] = await bench.crowd(url, ({"type": "none"},), bench.CROWDS["grammars"], [], 20)
        return found

    found = asyncio.run(main())
    obeying, half, free = (found[name][0] for name in ("grammars", "half", "free"))
    assert all(text.whole and bench.is_valid(text.content, SCHEMA) for text in obeying)
    assert half[1::2] == obeying[1::2] and [text.tokens for text in half[::2]] == [5, 7]
    assert [text.tokens for text in free] == [5, 6, 7, 8] and not any(text.whole for text in free)
    assert found["refused"][0] == [None] and all(seconds > 0 for _, seconds in found.values())

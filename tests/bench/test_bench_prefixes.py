"""bench_prefixes.py: what it asks, and what it counts."""

from __future__ import annotations

import copy

import bench_prefixes as bench
from specdec import Scheduler, SpeculativeDecoder
from support.tiny_service import TEMPLATE


def test_turns_count_what_is_read_and_texts_are_the_same(pair, monkeypatch):
    monkeypatch.setattr(bench, "SYSTEM_TOKENS", 40)
    tokenizer = copy.deepcopy(pair[2])
    tokenizer.chat_template = TEMPLATE
    asked, found = bench.conversations(tokenizer, 2, 3), {}
    assert len({tuple(own) for own in asked}) == 2
    for mode in ("off", "exact", "rounding"):
        decoder = SpeculativeDecoder(pair[0], None, 2)
        scheduler = Scheduler(decoder, rows=2, max_length=600, prefill_chunk=16, prefix_reuse=mode)
        found[mode] = bench.talk(scheduler, tokenizer, asked, 5)
    cold, warm, all_tokens = (found[mode][0] for mode in found)
    assert found["off"][1] == found["exact"][1] and len(found["off"][1]) == 6
    for turn, (none, some, more) in enumerate(zip(cold, warm, all_tokens, strict=True)):
        assert none["read"] == none["prompt_tokens"] - 2 and none["prompt_tokens"] == some["prompt_tokens"]
        assert more["read"] <= some["read"] < none["read"]  # the system message is shared from the first turn on
        assert 0 < some["first_token"] <= some["last_first_token"] and some["turn"] == turn + 1

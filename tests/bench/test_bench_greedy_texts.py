"""bench_greedy_texts.py: which prompts it has, and what it counts."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import bench_greedy_texts as bench
import torch
from support.gguf_files import tiny
from support.tiny_service import TEMPLATE


def test_prompts_are_of_all_kinds_and_in_the_chat_template(pair):
    tokenizer = copy.deepcopy(pair[2])
    tokenizer.chat_template = TEMPLATE
    prompts = bench.read_prompts(tokenizer)
    assert len(prompts) == 60 == len({tuple(prompt) for prompt in prompts})
    assert len({tuple(prompt[:2]) for prompt in prompts}) == 1  # each begins as the template does


def test_a_row_counts_texts_up_to_their_first_differences():
    plain = [[1, 2, 3], [4, 5, 6]]
    texts = {bench.PEER: plain, bench.PLAIN: [[1, 2, 3], [4, 7, 6]], "lookup": [[1, 2, 3], [4, 7, 6]]}
    left = SimpleNamespace(prompt=1, position=1, verdict="near-tie")
    found = bench.row("bfloat16", "lookup", texts["lookup"], texts, [left])
    assert (found["texts"], found["tokens"], found["compared"]) == (2, 6, 5)
    assert (found["as_transformers"], found["as_own_plain"]) == (1, 2)
    assert (found["near_ties"], found["bugs"]) == (1, 0)


def test_every_way_decodes_the_same_weights(tmp_path):
    tiny("llama, wide").save_pretrained(tmp_path)
    ours, theirs = bench.models(str(tmp_path), bench.STORED, torch.device("cpu"))
    prompts = [[7, 3, 200, 31, 5, 5, 90], [8, 9], [1, 2, 3, 1, 2, 3, 1, 2]] * 4
    ways = bench.methods(ours, theirs, 12)
    texts = {name: bench.decode(way, rows, prompts) for name, (way, rows) in ways.items()}
    assert len(texts) == 7 and {rows for _, rows in ways.values()} == {1, 8}
    assert all(found == texts[bench.PEER] and len(found) == 12 for found in texts.values())

"""bench_job.py: every way writes the same tokens, and what it reports."""

from __future__ import annotations

import copy
import json

import bench_job as bench
import pytest
import torch
from specdec import SpeculativeDecoder, SuffixDrafter
from support.benches import run_main
from support.tiny_service import TEMPLATE


def test_prompts_are_of_all_kinds(pair):
    tokenizer = copy.deepcopy(pair[2])
    assert len(bench.asked(tokenizer, 12)) == 12
    tokenizer.chat_template = TEMPLATE
    found = bench.asked(tokenizer, 16)
    assert len({tuple(prompt) for prompt in found}) == 16 and len({tuple(prompt[:2]) for prompt in found}) == 1


def test_every_way_writes_as_many_tokens(pair):
    """Some texts end by themselves, at a token that the model likes."""
    model, prompts = copy.deepcopy(pair[0]), [[5, 6, 7, 8], [9], [10, 11, 12], [13, 14], [15, 16, 17, 18, 19, 20]]
    text = SpeculativeDecoder(model, None, 0).generate([prompts[0]], max_new_tokens=6).tokens[0]
    model.generation_config.eos_token_id = int(text[3])
    ways = [bench.transformers(model, 2)]
    ways += [bench.specdec(model, SpeculativeDecoder(model, *drafts), 2) for drafts in ((None, 0), (SuffixDrafter(),))]
    with torch.inference_mode():
        written = [way(prompts, 12) for way in ways]
    assert len({*written}) == 1 and 5 <= written[0] < 60


@pytest.fixture
def folder(pair, tmp_path):
    pair[0].save_pretrained(tmp_path / "target")
    pair[2].save_pretrained(tmp_path / "target")
    return tmp_path / "target"


def test_what_it_reports(folder, tmp_path):
    done = run_main(bench, folder, "--quick", "--threads", 1, "--json", tmp_path / "out.json")
    assert done.exit_code == 0, done.output
    content = json.loads((tmp_path / "out.json").read_text())
    assert content["complete"] and content["quick"] and content["prompts"] == 4
    assert [row["method"] for row in content["rows"]] == [bench.PEER, bench.PLAIN, bench.DRAFTS]
    assert len({row["tokens"] for row in content["rows"]}) == 1 and 4 <= content["rows"][0]["tokens"] <= 16
    assert all(row["prompts_per_second"]["median"] > 0 for row in content["rows"])
    assert content["rows"][0]["times_transformers"]["median"] == content["rows"][1]["times_plain"]["median"] == 1

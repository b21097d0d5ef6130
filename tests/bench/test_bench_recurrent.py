"""bench_recurrent.py: what it times gives what transformers' functions give, and what it reports."""

from __future__ import annotations

import json
from functools import partial

import bench_recurrent
import pytest
import torch
from specdec_layers import Feed
from support.benches import run_main

SMALL = {
    "delta rule": partial(bench_recurrent.delta_rule, heads=4, key_heads=2, size=8),
    "mamba-2": partial(bench_recurrent.state_space, heads=4, size=6, numbers=16, groups=2),
    "mamba-1": partial(bench_recurrent.state_space, heads=40, size=1, numbers=16, groups=1),
    "convolution": partial(bench_recurrent.convolution, channels=70, taps=3),
}


@pytest.mark.parametrize("kind", SMALL)
def test_both_compute_the_same(kind):
    layers = SMALL[kind](tokens=4, most_bytes=0)
    assert len(layers.held) == 2
    if kind != "convolution":
        layers.held[1].normal_()
    start = torch.tensor([bench_recurrent.START])
    ours = layers.ours(1, Feed(start, start, torch.ones(1, 4, dtype=torch.bool)))
    torch.testing.assert_close(ours, layers.theirs(1), rtol=1e-4, atol=1e-5)
    assert ours.abs().max() > 0.1


def test_what_it_reports(tmp_path, monkeypatch):
    monkeypatch.setattr(bench_recurrent, "LAYERS", {"Jamba": (bench_recurrent.state_space, 64, 1, 16, 1)})
    threads = torch.get_num_threads()
    try:
        options = ("--quick", "--threads", "1", "--seconds", "0.001", "--json", tmp_path / "out.json")
        done = run_main(bench_recurrent, *options)
    finally:
        torch.set_num_threads(threads)
    assert done.exit_code == 0, done.output
    content = json.loads((tmp_path / "out.json").read_text())
    assert content["complete"] and content["threads"] == 1
    settings = [(row["tokens"], row["accepted"]) for row in content["rows"]]
    assert settings == [(t, a) for t in bench_recurrent.TOKENS for a in bench_recurrent.ACCEPTED]
    for row in content["rows"]:
        assert row["layers"] == 256 and row["held_bytes"] == 4096 and row["unavailable"] == {}
        assert row["ratios"].keys() == {"cpu/transformers", "cpu/floor"}
        assert all(ratio["q1"] > 0 and ratio["rounds"] >= 5 for ratio in row["ratios"].values())

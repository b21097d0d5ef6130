"""bench_heads.py: what is compared, and with what."""

from __future__ import annotations

import json
from types import SimpleNamespace

import bench_heads
import pytest
from bench_heads import PLAIN, Contender
from specdec import Stats
from support.benches import run_main


def result(text: list[int], seconds: float, accepted: int = 0) -> SimpleNamespace:
    stats = Stats.empty(2)
    stats.record(2, 2, accepted, len(text), 1)
    stats.seconds = {"total": seconds}
    return SimpleNamespace(tokens=[text], stats=stats, drafter_error=None)


def contenders() -> dict[str, Contender]:
    return {name: Contender(SimpleNamespace(num_drafts=2, nodes=0), name) for name in (PLAIN, "a")}


def test_speeds_are_compared_round_by_round(monkeypatch):
    """The first call warms up and does not count."""
    times = {"a": [9.0, 1.0, 2.0], PLAIN: [9.0, 4.0, 4.0]}
    made = lambda method, *_: [result([1, 2, 3, 4], times[method.rule].pop(0), 1)]  # noqa: E731
    monkeypatch.setattr(bench_heads, "decode", made)
    plain, ours = bench_heads.measure(contenders(), [[1]], 4, 0.0, 2)
    assert [r["tokens_per_second"]["median"] for r in (plain, ours)] == [1.0, 3.0]
    assert (ours["times_plain"]["q1"], ours["times_plain"]["q3"]) == (2.5, 3.5)
    assert ours["equal_to_plain"] == plain["equal_to_plain"] == 2 and ours["tau"] == 4.0
    assert ours["accepted_of_tested_by_depth"] == [1.0, 0.0]


def test_texts_that_differ_are_counted(monkeypatch):
    monkeypatch.setattr(bench_heads, "decode", lambda method, *_: [result([ord(method.rule[0])], 1.0)])
    assert [row["equal_to_plain"] for row in bench_heads.measure(contenders(), [[1]], 1, 0.0, 3)] == [3, 0]


@pytest.mark.nightly
def test_the_report(tmp_path):
    done = run_main(bench_heads, "--quick", "--threads", 1, "--json", tmp_path / "out.json")
    assert done.exit_code == 0, done.output
    content = json.loads((tmp_path / "out.json").read_text())
    assert content["complete"] and [row["temperature"] for row in content["rows"]] == [0.0, 1.0]
    for row in content["rows"]:
        names = [m["name"] for m in row["methods"]]
        expected = [f"{d.name}, {how}" for d in bench_heads.DRAFTERS for how in ("chain", "tree")]
        assert names[0] == PLAIN and {*names[1:], *row["unavailable"]} == {*expected}
        for m in row["methods"]:
            assert m["tau"] >= 1 and (m["nodes"] == 16) == m["name"].endswith("tree")
            assert row["temperature"] or m["equal_to_plain"] == 1

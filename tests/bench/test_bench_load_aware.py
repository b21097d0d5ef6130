"""bench_load_aware.py: what it races, how it judges, and what it reports."""

from __future__ import annotations

import json

import bench_load_aware
import figures_decoding
import pytest
from support.benches import run_main


def test_cells_have_full_rows_and_empty_ones():
    assert bench_load_aware.cells([1, 4]) == [(1, 1), (4, 4), (1, 4)]


@pytest.mark.parametrize(("capped", "noise", "reached"), [(0.97, 1.0, False), (0.97, 0.98, True), (0.99, 1.0, True)])
def test_requests_without_drafts_are_judged_beside_the_noise(capped, noise, reached):
    of = {
        name: {"times_plain": {"median": 1.0, "q1": noise}, "tokens_per_second": {}} for name in bench_load_aware.FIXED
    }
    found = {f"K={k}": dict(cell) for k, cell in of.items()}
    for name, times in (("plain again", 1.0), (bench_load_aware.CAPPED, capped), (bench_load_aware.ADAPTIVE, 1.2)):
        found[name] = {
            "times_plain": {"median": times, "q1": noise},
            "tokens_per_second": {},
            "steps_by_drafts": [1, 3],
        }
    judged = bench_load_aware.judged(found, 4, 8, 0.0)
    assert [*judged["reached"].values()] == [reached, True] and judged["plain_steps"] == 0.25


def test_it_reports(tmp_path):
    arguments = ("--quick", "--threads", "1", "--loads", "2,1", "--temperatures", "1")
    done = run_main(bench_load_aware, *arguments, "--json", tmp_path / "load_aware.json")
    assert done.exit_code == 0, done.output
    content = json.loads((tmp_path / "load_aware.json").read_text())
    assert content["complete"] and content["quick"] and content["rule"] == "coupled"
    assert [(row["load"], row["rows"]) for row in content["rows"]] == [(2, 2), (1, 1), (1, 2)]
    for row in content["rows"]:
        methods = row["methods"]
        assert methods["K=4"]["tau"] >= 1 == methods["plain"]["tau"] == methods[bench_load_aware.CAPPED]["tau"]
        assert sum(methods["K=4"]["steps_by_drafts"][1:]) > 0 == sum(methods["plain"]["steps_by_drafts"][1:])
        assert methods[bench_load_aware.CAPPED]["texts_as_plain"] == 1
        assert all(found["tokens_per_second"]["median"] > 0 for found in methods.values())
    assert "| sequences |" in figures_decoding.load_aware({"load_aware": content})

"""bench_lengths.py: what it races, how it judges, and what it reports."""

from __future__ import annotations

import json

import bench_lengths
import pytest
from support.benches import run_main


def cell(speeds: dict[str, float], again: tuple[float, float] = (1.0, 1.0)) -> dict:
    def of(ratio: float, low: float) -> dict:
        return {"median": ratio, "q1": low, "q3": ratio}

    methods = {
        name: {"tokens_per_second": of(speed, speed), "times_plain": of(speed / speeds["plain"], speed)}
        for name, speed in speeds.items()
    }
    methods["plain again"] = {"times_plain": of(*again)}
    return {"rows": 8, "temperature": 0.0, "methods": methods}


@pytest.mark.parametrize(
    "auto, again, reached",
    [(120.0, (1.0, 1.0), [True, True]), (110.0, (1.0, 1.0), [False, True]), (96.0, (1.0, 1.0), [False, False]),
     (96.0, (0.99, 0.97), [False, True])],
)  # fmt: skip
def test_it_is_judged_by_the_best_of_all(auto, again, reached):
    speeds = {"plain": 100.0, "model, K=1": 115.0, "model, K=4": 80.0, "lookup, K=4": 300.0, "model, auto": auto}
    judged = bench_lengths.judged(cell(speeds, again), "model")
    assert judged["best"] == "model, K=1" and judged["of_best"] == pytest.approx(auto / 115)
    assert judged["of_plain"] == pytest.approx(auto / 100) and [*judged["reached"].values()] == reached
    assert judged["times_plain_of_fixed"] == {"model, K=1": pytest.approx(1.15), "model, K=4": pytest.approx(0.8)}


def test_texts_differ_in_length_and_are_the_same_every_time():
    found = bench_lengths.spread(8, 32, 96)
    assert found == bench_lengths.spread(8, 32, 96) != sorted(found)
    assert (min(found), max(found), sum(found), len({*found})) == (32, 96, 8 * 64, 8)


def test_lengths_reports(tmp_path):
    arguments = ("--quick", "--threads", "1", "--rows", "2", "--drafters", "model,lookup", "--temperatures", "0")
    done = run_main(bench_lengths, *arguments, "--json", tmp_path / "out.json")
    assert done.exit_code == 0, done.output
    content = json.loads((tmp_path / "out.json").read_text())
    assert content["complete"] and content["quick"]
    model, lookup = content["rows"]
    assert (model["drafter"], lookup["drafter"], model["rows"]) == ("model", "lookup", 2)
    methods = model["cell"]["methods"]
    assert [*methods] == [
        "plain", "plain again", "model, K=1", "model, K=2", "model, auto", "lookup, K=1", "lookup, K=2", "lookup, auto"
    ]  # fmt: skip
    for name, found in methods.items():
        assert found["tokens_per_second"]["median"] > 0 and (found["tau"] == 1) >= name.startswith("plain")

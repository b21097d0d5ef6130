"""race.py and the programs that use it: who races, what is compared, and a comparison of two checkouts."""

from __future__ import annotations

import json
import subprocess
from types import SimpleNamespace

import before_after
import bench_lengths
import bench_load_aware
import pytest
import race
from specdec import Request, SpeculativeDecoder, load_embedded_pair
from support.benches import run_main
from typer.testing import CliRunner

from specdec_kernels import SamplingParams

SUMMARY = {"median", "q1", "q3", "rounds"}


def test_texts_differ_in_length_and_are_the_same_every_time():
    found = race.spread_lengths(8, 32, 96)
    assert found == race.spread_lengths(8, 32, 96) != sorted(found)
    assert (min(found), max(found), sum(found), len({*found})) == (32, 96, 8 * 64, 8)


@pytest.fixture(scope="module")
def pair():
    return load_embedded_pair()


def requests(pair, count: int, new_tokens: int = 3) -> list[Request]:
    prompts = race.unseen_code(pair[2], count, 8)
    return [Request(p, new_tokens, SamplingParams(0.0), eos_token_id=[], id=i) for i, p in enumerate(prompts)]


def test_a_race_counts_what_each_contender_did(pair):
    plain, drafting = SpeculativeDecoder(pair[0], None, 0), SpeculativeDecoder(*pair[:2], 2)
    contenders = {"plain": plain, "K=2": drafting, "capped": drafting}
    contenders = {name: race.Contender(d, 0 if name == "capped" else None) for name, d in contenders.items()}
    found = race.race(contenders, requests(pair, 3), rows=2, rounds=2, rule="coupled", load=1)
    for name, method in found.items():
        assert method["tokens_per_second"].keys() == SUMMARY and method["tokens_per_second"]["rounds"] == 2
        assert method["texts_as_plain"] == 1 and method["parts"]["target_forwards"] > 0
        drafted = sum(method["steps_by_drafts"][1:])
        assert (drafted > 0) == (name == "K=2") == (method["tau"] > 1)
    assert found["plain"]["times_plain"] == {"median": 1.0, "q1": 1.0, "q3": 1.0, "rounds": 2}


def test_a_greedy_text_that_is_another_one_ends_the_race(pair):
    contenders = {"plain": race.Contender(SpeculativeDecoder(pair[0], None, 0))}
    contenders["other"] = race.Contender(SpeculativeDecoder(pair[1], None, 0))  # another model
    with pytest.raises(RuntimeError, match="other: a greedy text differs"):
        race.race(contenders, requests(pair, 2, 8), rows=1, rounds=1, rule="token")


def test_a_job_keeps_to_its_load():
    class Scheduler:
        def __init__(self):
            self.most, self.live = 0, 0
            self.batch = SimpleNamespace(timer=SimpleNamespace(seconds={}, lap=lambda name: None))

        @property
        def idle(self) -> bool:
            return self.live == 0

        @property
        def usage(self):
            return SimpleNamespace(live=self.live, prefilling=0, waiting=0, rows=9)

        def submit(self, request) -> None:
            self.live += 1

        def step(self):
            self.most, self.live = max(self.most, self.live), self.live - 1
            stopped = SimpleNamespace(request=SimpleNamespace(id=self.live), error="full", tokens=[], stats=None)
            return [SimpleNamespace(tokens=[1], finish_reason=None, sequence=stopped)]

    scheduler = Scheduler()
    job = race.Job(scheduler, [object()] * 5, load=2)
    assert job.run().tokens == 5 and scheduler.most == 2 and job.done


def test_lengths_report(tmp_path):
    arguments = ("--quick", "--threads", "1", "--rows", "2", "--drafters", "never right,lookup", "--temperatures", "0")
    done = run_main(bench_lengths, *arguments, "--widths", "1", "--json", tmp_path / "out.json")
    assert done.exit_code == 0, done.output
    content = json.loads((tmp_path / "out.json").read_text())
    (row,) = content["rows"]
    assert content["complete"] and content["quick"] and (row["rows"], row["temperature"]) == (2, 0)
    drafting = [f"{name}, {k}" for name in ("never right", "lookup") for k in ("K=1", "auto")]
    assert [*row["methods"]] == ["plain", "plain again", *drafting]
    assert (
        row["methods"]["never right, K=1"]["alpha"]
        == 0
        < sum(row["methods"]["never right, K=1"]["steps_by_drafts"][1:])
    )


def test_load_aware_has_full_rows_and_empty_ones():
    assert bench_load_aware.cells([1, 4]) == [(1, 1), (4, 4), (1, 4)]


def test_load_aware_reports(tmp_path):
    arguments = ("--quick", "--threads", "1", "--loads", "1", "--temperatures", "1")
    done = run_main(bench_load_aware, *arguments, "--json", tmp_path / "out.json")
    assert done.exit_code == 0, done.output
    (row,) = json.loads((tmp_path / "out.json").read_text())["rows"]
    assert (row["load"], row["rows"]) == (1, 1)
    assert row["methods"][bench_load_aware.CAPPED]["texts_as_plain"] == 1
    assert row["methods"]["K=4"]["tau"] >= 1 == row["methods"][bench_load_aware.CAPPED]["tau"]


@pytest.mark.parametrize(
    "program, arguments, named",
    [
        (bench_lengths, ("--rule", "typical"), "rule"),
        (bench_lengths, ("--drafters", "oracle"), "drafters"),
        (bench_load_aware, ("--temperatures", "-1"), "temperatures"),
        (bench_load_aware, ("--loads", "0"), "loads"),
    ],
)
def test_a_bad_option_is_named(program, arguments, named):
    done = run_main(program, *arguments)
    assert done.exit_code == 2 and named in done.output


# ---- Two checkouts

PROGRAM = """\
import json, sys
speed = {"median": %s}
row = {"rows": 8, "temperature": 0.0, %s}
json.dump({"rows": [row]}, open(sys.argv[sys.argv.index("--json") + 1], "w"))
open("calls", "a").write(" ".join(sys.argv[1:-1]))
"""


def test_two_checkouts_run_in_turns_and_are_compared(tmp_path, monkeypatch):
    """The older one writes its methods below ``cell``."""
    methods = '{"plain": {"tokens_per_second": speed}, "model, auto": {"tokens_per_second": speed}}'
    for name, speed, row in (("old", 100, f'"cell": {{"methods": {methods}}}'), ("new", 90, f'"methods": {methods}')):
        (tmp_path / name).mkdir()
        (tmp_path / name / "bench_x.py").write_text(PROGRAM % (speed, row))
    monkeypatch.setattr(before_after.report, "ROOT", tmp_path / "new")
    command = [str(tmp_path / "old"), "bench_x.py", "--rows", "8", "--turns", "2", "--to", str(tmp_path / "to.json")]
    done = CliRunner().invoke(before_after.app, command, env={"COLUMNS": "200"})
    assert done.exit_code == 0, done.output
    assert "temperature 0, rows 8: model, auto" in done.output and done.output.count("0.900") >= 4
    assert (tmp_path / "old" / "calls").read_text() == (tmp_path / "new" / "calls").read_text()
    assert len(json.loads((tmp_path / "to.json").read_text())["after"]) == 2
    (tmp_path / "new" / "bench_x.py").write_text("raise SystemExit(3)")
    with pytest.raises(subprocess.CalledProcessError):
        before_after.run(tmp_path / "new", ["bench_x.py"])


def test_the_loops_share_of_a_comparison_is_in_seconds():
    found = dict(before_after.numbers_of({"methods": [
        {"name": "plain", "tokens_per_second": 10.0, "seconds": 3.0, "loop_fraction": None},
        {"name": "specdec", "tokens_per_second": 20.0, "seconds": 2.0, "loop_fraction": 0.1},
    ]}))  # fmt: skip
    assert found == {"plain": 10.0, "specdec": 20.0, "specdec, seconds in the loop": pytest.approx(0.2)}

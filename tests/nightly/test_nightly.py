"""The nightly run: what its parts are, what is recorded of one, and which of them a call runs."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest
from support.benches import run_main

from . import __main__ as command
from . import parts, plugin, record, run
from .parts import ROOT, Part
from .plugin import share

PART = Part("room/part", ("-m", "nightly", "test_it.py"), ("source",))
RESULT = {
    "outcome": "passed", "commit": "", "dirty": False, "date": "", "seconds": 1, "cpu_seconds": 1, "failures": [],
    "command": "python -m pytest -m nightly test_it.py",
}  # fmt: skip


# ---- parts -------------------------------------------------------------------------------------------------


def test_every_marked_test_is_in_one_part():
    """A file's own part takes all of its tests but those of LONG, whose parts divide their cases."""
    everything = parts.parts()
    assert len({part.name for part in everything}) == len(everything)
    for file in (ROOT / "tests").rglob("test_*.py"):
        path = file.relative_to(ROOT).as_posix()
        whole = [part for part in everything if {"nightly", path} <= {*part.arguments}]
        marked = re.search(r"mark\.nightly|def test_\w+\((?:fast_)?backend|usefixtures\(.*backend", file.read_text())
        assert bool(marked) <= len(whole) <= 1
        left_out = {a.removeprefix("--deselect=") for part in whole for a in part.arguments if "--deselect=" in a}
        assert left_out == {test for test in parts.LONG if test.startswith(f"{path}::")}
    for test, count in parts.LONG.items():
        path, _, name = test.partition("::")
        assert f"\ndef {name}(" in (ROOT / path).read_text()
        shards = [a for part in everything if test in part.arguments for a in part.arguments if "--shard=" in a]
        assert shards == [f"--shard={i}/{count}" for i in range(1, count + 1)]


@pytest.mark.parametrize("count", (0, 3, 25, 26))
def test_shares_are_the_whole(count):
    things = list(range(count))
    for of in (1, 4, 9):
        shares = [things[share(count, f"{i}/{of}")] for i in range(1, of + 1)]
        assert sum(shares, []) == things and max(map(len, shares)) - min(map(len, shares)) <= 1


def test_a_part_depends_on_what_its_tests_import():
    of = {part.name: part.paths for part in parts.parts()}
    assert {"csrc", "tests/kernels/test_chi_square.py", "tests/support/exact.py"} <= {*of["kernels/chi_square"]}
    assert "python/specdec" not in of["kernels/chi_square"] and "python/specdec" in of["jobs/job_embedded"]
    assert {"tests/support/killed_jobs.py", "tests/support/commands.py"} <= {*of["jobs/job_embedded"]}
    assert all((ROOT / path).exists() for paths in of.values() for path in paths)
    # A result that is written makes no other stale.
    assert not any(record.RESULTS.is_relative_to(ROOT / path) for paths in of.values() for path in paths)


# ---- one part ----------------------------------------------------------------------------------------------


def test_what_the_plugin_writes(monkeypatch, tmp_path):
    monkeypatch.setattr(plugin, "machine", lambda: {"threads": 1})
    summary = plugin.Summary(tmp_path / "summary.json")
    for name, outcomes, number in (
        ("test_right", {"setup": "passed", "call": "passed", "teardown": "passed"}, 2),
        ("test_wrong", {"setup": "passed", "call": "failed", "teardown": "failed"}, 3),
        ("test_not_here", {"setup": "skipped", "teardown": "passed"}, 4),
        ("test_not_ready", {"setup": "failed", "teardown": "passed"}, 4),
    ):
        for when, outcome in outcomes.items():
            properties = [("sum", number)]
            summary.pytest_runtest_logreport(
                pytest.TestReport(name, ("", 0, ""), {}, outcome, None, when, user_properties=properties)
            )
    summary.pytest_collectreport(pytest.CollectReport("test_no_module.py", "failed", None, None))
    summary.pytest_sessionfinish()
    assert json.loads((tmp_path / "summary.json").read_text()) == {
        "passed": 1, "failed": 3, "skipped": 1,
        "failures": ["test_wrong", "test_not_ready", "test_no_module.py"], "counted": {"sum": 5},
        "machine": {"threads": 1},
    }  # fmt: skip


@pytest.fixture
def python(monkeypatch, tmp_path):
    """Replaces the Python that runs parts by a shell script, which ends as is said."""

    def ends(how: str) -> None:
        script = tmp_path / "python"
        script.write_text(
            f'#!/bin/sh\nfor last; do :; done\necho \'{{"passed": 2, "failures": []}}\' > "${{last#*=}}"\n{how}\n'
        )
        script.chmod(0o755)
        monkeypatch.setattr(run.sys, "executable", str(script))

    return ends


@pytest.mark.parametrize(("how", "outcome"), [("exit 0", "passed"), ("exit 5", "passed"), ("exit 1", "failed")])
def test_the_outcome_is_that_of_pytest(python, tmp_path, how, outcome):
    python(how)
    result = run.run(PART, tmp_path / "output.txt")
    assert (result["outcome"], result["passed"]) == (outcome, 2)
    assert result["command"].startswith("python -m pytest") and result["command"].endswith("-m nightly test_it.py")
    assert len(result["commit"]) == 40 and result["seconds"] >= 0 and result["cpu_seconds"] >= 0


@pytest.mark.parametrize(
    ("how", "failures"),
    [
        ('rm "${last#*=}"; kill -SEGV $$', ["exit -11"]),
        ("""echo '{"failures": ["test_no_module.py"]}' > "${last#*=}"; exit 2""", ["test_no_module.py"]),
    ],
)
def test_a_crash_and_an_error_of_import_are_failures(python, tmp_path, how, failures):
    python(how)
    result = run.run(PART, tmp_path / "output.txt")
    assert (result["outcome"], result["failures"]) == ("failed", failures)


@pytest.mark.parametrize("how", ("exit 2", "kill -TERM $$", "kill -KILL $$"))
def test_what_is_ended_from_outside_has_no_result(python, tmp_path, how):
    python(how)
    with pytest.raises(run.Ended):
        run.run(PART, tmp_path / "output.txt")


def test_an_environment_is_made_once(monkeypatch, tmp_path):
    calls = []

    def call(arguments, check):
        calls.append(arguments)
        Path(tmp_path, "versions-oldest").mkdir(exist_ok=True)

    monkeypatch.setattr(run, "ENVIRONMENTS", tmp_path)
    monkeypatch.setattr(run.subprocess, "run", call)
    part = Part("versions/oldest", (), (), ("torch==2.11.0",))
    python = run.environment(part)
    assert python == run.environment(part) == tmp_path / "versions-oldest" / "bin" / "python"
    assert len(calls) == 2 and "torch==2.11.0" in calls[1] and "pytest" in calls[1]
    run.environment(part._replace(requirements=("torch==2.12.0",)))
    assert len(calls) == 4


# ---- the record --------------------------------------------------------------------------------------------


@pytest.fixture
def results(monkeypatch, tmp_path):
    monkeypatch.setattr(record, "RESULTS", tmp_path / "results.json")


def test_a_result_replaces_that_of_its_part(results):
    for name, seconds in (("b", 1), ("a", 2), ("b", 3)):
        record.write(name, {"seconds": seconds})
    assert list(record.read().items()) == [("a", {"seconds": 2}), ("b", {"seconds": 3})]
    assert record.RESULTS.read_text().splitlines()[1:3] == ['"a": {"seconds": 2},', '"b": {"seconds": 3}']


def test_a_result_is_stale_when_what_it_depends_on_has_changed(monkeypatch, tmp_path):
    monkeypatch.setattr(record, "ROOT", tmp_path)
    for name in ("source", "other"):
        (tmp_path / name).write_text("before")
    settings = ("-c", "user.name=a", "-c", "user.email=b")
    for arguments in (("init", "-q"), ("add", "."), (*settings, "commit", "-q", "-m", "first")):
        subprocess.run(["git", *arguments], cwd=tmp_path, check=True)
    result = {**RESULT, "commit": record.git("rev-parse", "HEAD").stdout.strip()}
    assert record.state(PART, None) == record.MISSING
    assert record.state(PART, {**result, "outcome": "failed"}) == record.FAILED
    assert record.state(PART, {**result, "dirty": True}) == record.STALE
    assert record.state(PART._replace(arguments=("test_it.py", "test_more.py")), result) == record.STALE
    assert record.state(PART, {**result, "commit": "0" * 40}) == record.STALE
    (tmp_path / "other").write_text("after")
    assert record.state(PART, result) == record.PASSED
    (tmp_path / "source").write_text("after")
    assert record.state(PART, result) == record.STALE


# ---- the command -------------------------------------------------------------------------------------------


@pytest.fixture
def nightly(monkeypatch, results):
    """The command on parts a, b and c, of which a passed and c ends from outside. Lists those that it ran."""
    ran = []

    def judged(part, output):
        ran.append(part.name)
        if part.name == "c":
            raise run.Ended("c: ended")
        return {**RESULT, "outcome": "failed", "failures": ["test_it"]} if part.name == "b" else RESULT

    monkeypatch.setattr(command, "parts", lambda: [PART._replace(name=name) for name in "abc"])
    monkeypatch.setattr(command, "run", judged)
    monkeypatch.setattr(record, "state", lambda part, result: result["outcome"] if result else record.MISSING)
    record.write("a", RESULT)
    return ran


def test_what_is_missing_or_failed_runs(nightly):
    done = run_main(command)
    assert nightly == ["b", "c"] and done.exit_code == 1 and "test_it" in done.stdout
    assert {name: result["outcome"] for name, result in record.read().items()} == {"a": "passed", "b": "failed"}
    assert run_main(command, "[bx]").exit_code == 1 and nightly == ["b", "c", "b"]
    assert run_main(command, "a").exit_code == 0 and nightly == ["b", "c", "b"]
    assert run_main(command, "a", "--again").exit_code == 0 and nightly == ["b", "c", "b", "a"]


def test_no_part_begins_late(nightly):
    done = run_main(command, "--minutes", "1e-9")
    assert not nightly and done.exit_code == 1 and "c: no time left" in done.stdout


def test_the_list_runs_nothing(nightly):
    done = run_main(command, "--list")
    assert not nightly and done.exit_code == 0 and "2 missing, 1 passed" in done.stdout


def test_an_unknown_part_is_refused(nightly):
    done = run_main(command, "nothing*")
    assert done.exit_code == 2 and "nothing*" in done.output and not nightly

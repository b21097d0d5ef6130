"""The gate's verdicts and its record, over a file of one word; and that tests without an end are ended."""

from __future__ import annotations

import json
import shlex
import subprocess
from pathlib import Path

import pytest

from mutations.gate import SECONDS, TIMES, Copy, Gate, Outcome, Run, Unmutated, Verdict
from mutations.mutation import Mutation
from mutations.results import DOCUMENT, RESULTS, Results
from mutations.warm import wait

BUG = Mutation("bug", "code.py", "right", "wrong", "tests/test_it.py")
TEST = f"{BUG.first}::test_it"
PASSED, FAILED, ENDLESS = Run(False, TEST), Run(True, TEST), Run(False, TEST, ended=False)


class Scripted(Copy):
    """Its tests end as they are told to, one run after the other."""

    def __init__(self, folder: Path, *runs: Run):
        self.runs, self.asked, self.cpu_seconds = list(runs), [], 0.0
        self._folder, self._stale = folder, False

    def build(self) -> None:
        return None

    def test(self, arguments: str, seconds: float = 0.0) -> Run:
        self.asked.append((shlex.split(arguments), seconds))
        return self.runs.pop(0)


@pytest.fixture
def tree(tmp_path) -> Path:
    (tmp_path / RESULTS).parent.mkdir(parents=True)
    (tmp_path / BUG.file).write_text("right\n")
    (tmp_path / BUG.first).write_text("def test_it(): ...\n")
    (tmp_path / DOCUMENT).write_text("Before.\n\n**0 of 0 mutants killed** at no commit.\n\nAfter.\n")
    return tmp_path


def judge(tree: Path, *runs: Run, unmutated: tuple[Run, ...] = (PASSED,), everyday: bool = False) -> Verdict:
    return Gate(Scripted(tree, *runs), Unmutated(Scripted(tree, *unmutated)), everyday).judge(BUG)


def test_verdicts(tree):
    assert judge(tree, FAILED)[1:3] == (Outcome.KILLED, TEST)
    assert judge(tree, PASSED)[1:3] == (Outcome.SURVIVED, None)
    assert judge(tree, PASSED, FAILED, everyday=True).killed
    assert judge(tree, Run(False, broken="no such test")).outcome == Outcome.INVALID
    assert judge(tree, FAILED, unmutated=(FAILED,))[1:3] == (Outcome.INVALID, TEST)
    assert (tree / BUG.file).read_text() == "right\n"
    (tree / BUG.file).write_text("right right\n")
    verdict = judge(tree, FAILED)
    assert verdict.outcome == Outcome.INVALID and "2 times" in verdict.detail


def test_the_test_that_kills_passes_otherwise(tree):
    """It alone is run without the mutation, whatever its name."""
    name, unmutated = f"{TEST}[one query]", Scripted(tree, PASSED)
    gate = Gate(Scripted(tree, Run(True, name)), Unmutated(unmutated))
    assert gate.judge(BUG).killed
    assert [tests for tests, _ in unmutated.asked] == [[name]]


def test_tests_that_do_not_end_kill_if_they_end_otherwise(tree):
    fast, slow = PASSED._replace(seconds=SECONDS / TIMES / 2), PASSED._replace(seconds=SECONDS)
    assert judge(tree, ENDLESS, unmutated=(fast,)).outcome == Outcome.ENDLESS
    # Slow anyway: they get another chance, of many times what they take.
    gate = Gate(Scripted(tree, ENDLESS, PASSED), Unmutated(Scripted(tree, slow)))
    assert gate.judge(BUG).outcome == Outcome.SURVIVED
    assert gate._copy.asked == [([BUG.first], SECONDS), ([BUG.first], TIMES * SECONDS)]
    assert judge(tree, ENDLESS, ENDLESS, unmutated=(slow,)).outcome == Outcome.ENDLESS
    assert judge(tree, ENDLESS, ENDLESS, unmutated=(ENDLESS._replace(seconds=SECONDS),)).outcome == Outcome.INVALID


def test_a_group_of_processes_ends_with_its_time():
    command = ["sh", "-c", "sleep 1000 & sleep 1000"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True)
    code, _ = wait(process.pid, 0.01)
    assert code is None
    assert process.stdout.read() == b""  # all who could write to it are gone
    process.stdout.close()


@pytest.mark.parametrize(("command", "code"), [("exit 3", 3), ("kill -9 $$", -9)])
def test_what_ends_has_its_exit_code(command, code):
    process = subprocess.Popen(["sh", "-c", command], start_new_session=True)
    assert wait(process.pid, 60.0)[0] == code


def test_a_kill_is_valid_until_the_code_or_its_test_changes(tree):
    results = Results(tree)
    results.begin([BUG])
    assert results.stale([BUG]) == [BUG]
    results.add(judge(tree, FAILED))
    for file in (BUG.file, BUG.first):
        text = (tree / file).read_text()
        assert Results(tree).stale([BUG]) == []
        (tree / file).write_text(text + "# changed\n")
        assert Results(tree).stale([BUG]) == [BUG]
        (tree / file).write_text(text)
    (tree / BUG.first).unlink()
    assert Results(tree).stale([BUG]) == [BUG]


@pytest.mark.parametrize("run", [PASSED, Run(False, broken="no such test")])
def test_no_other_verdict_is_valid(tree, run):
    results = Results(tree)
    results.begin([BUG])
    results.add(judge(tree, run))
    assert results.stale([BUG]) == [BUG]


def test_the_record_and_its_line(tree):
    other = BUG._replace(name="other")
    results = Results(tree)
    results.begin([BUG, other])
    results.add(judge(tree, FAILED))
    results.add(judge(tree, PASSED)._replace(mutation=other))
    read = json.loads((tree / RESULTS).read_text())
    assert set(read) == {"commit", "date", "dirty", "mutants"}
    assert read["mutants"]["bug"]["verdict"] == "killed" and read["mutants"]["bug"]["test"] == TEST
    text = (tree / DOCUMENT).read_text()
    assert text.startswith(f"Before.\n\n**1 of 2 mutants killed** at commit {read['commit']}")
    assert text.endswith(f"{read['date']}.\n\nAfter.\n")
    results = Results(tree)
    results.begin([BUG, other])  # who survived is judged again
    assert set(results.verdicts) == {"bug"}
    assert "**1 of 1 mutants killed**" in (tree / DOCUMENT).read_text()

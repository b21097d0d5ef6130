"""Which cases run every day: all of them within seven commits, and at once where something was changed."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
from support import ROOT, pairwise, rotation
from support.pairwise import cover
from support.rotation import EVERY, home, reach, reached_files, turn

TESTS = [f"tests/test_{i}.py::test_it" for i in range(40)]


@pytest.mark.parametrize("dear", [False, True])
@pytest.mark.parametrize("commits", [0, 1566])
def test_every_case_runs_within_seven_commits(monkeypatch, commits, dear):
    names = ["tests/test_3.py", *TESTS[10:]] if dear else []
    monkeypatch.setattr(rotation, "DEAR", {name: number for number, name in enumerate(names)})
    for test in TESTS[3:4] + TESTS[10:]:
        for index in range(23):
            runs = [turn(test, index, commits + more) for more in range(EVERY)]
            assert sum(runs) == (1 if index or dear else EVERY)


def test_tests_that_are_listed_exist():
    for name in rotation.DEAR:
        path, _, test = name.partition("::")
        assert f"\ndef {test}" in (ROOT / path).read_text(), name


def test_days_are_alike():
    """Also of tests with two cases, the second ones are spread over the days."""
    assert {sum(turn(test, 1, commits) for test in TESTS) for commits in range(EVERY)} <= {*range(1, 12)}
    days = {sum(turn(test, 0, commits) for test in rotation.DEAR) for commits in range(EVERY)}
    assert max(days) - min(days) <= 1


class Item:
    """As much of a case as the rotation reads and writes."""

    def __init__(self, nodeid: str, *markers: str):
        self.nodeid, self.path, self.markers, self.stash = nodeid, ROOT / nodeid.partition("::")[0], {*markers}, {}

    def get_closest_marker(self, name: str) -> str | None:
        return name if name in self.markers else None

    def add_marker(self, mark: pytest.MarkDecorator) -> None:
        self.markers.add(mark.name)


@pytest.fixture
def marked(monkeypatch):
    """Those left for another day of ten cases, of which one is nightly."""

    def run(changed: tuple[str, ...] = (), all_cases: bool = False, args: tuple[str, ...] = ("tests",)) -> list[int]:
        monkeypatch.chdir(ROOT)
        monkeypatch.setattr(rotation, "git", lambda arguments: "100")
        monkeypatch.setattr(rotation, "changed_files", lambda: frozenset(ROOT / name for name in changed))
        items = [Item(f"tests/test_stopping.py::test_it[{i}]", *["nightly"] * (i == 4)) for i in range(10)]
        rotation.mark(SimpleNamespace(getoption=lambda name: all_cases, args=list(args)), items, *rotation.today(items))
        if changed:
            assert sum(rotation.REACHED in item.stash for item in items) in (0, 7)
        return [i for i, item in enumerate(items) if "another_day" in item.markers]

    return run


def test_the_first_and_a_seventh_run(marked):
    """What is nightly has no number."""
    left = marked()
    assert len(left) == 7 and not {0, 4} & {*left}


def test_who_asks_for_all_gets_all(marked):
    assert not marked(all_cases=True)
    assert not marked(args=("tests/test_stopping.py",))
    assert not marked(args=("tests/test_stopping.py::test_it[1]",))
    assert marked(args=("tests/loop", "tests/models"))


def test_all_cases_of_what_was_changed_run(marked):
    assert not marked(("python/specdec/stopping.py",))
    assert not marked(("tests/test_stopping.py",))
    assert marked(("python/specdec/cli/app.py", "README.md"))


def test_what_a_file_imports():
    """Through helpers and packages that only pass names on, but not what a module of the packages imports in turn."""
    names = {file.relative_to(ROOT).as_posix() for file in reach(ROOT / "tests" / "loop" / "test_equality.py")}
    assert {"tests/loop/test_equality.py", "python/specdec/decoder.py"} <= names
    assert any(name.startswith("tests/support/") for name in names)
    assert "python/specdec/loop/step.py" not in names
    assert home(rotation.FOLDERS, "specdec_kernels", "speculative_step") == ROOT / "specdec_kernels" / "api.py"
    assert home(rotation.FOLDERS, "specdec", "SpeculativeDecoder") == ROOT / "python" / "specdec" / "decoder.py"
    assert home(rotation.FOLDERS, "rivals", "") == ROOT / "bench" / "rivals.py"
    assert home(rotation.FOLDERS, "torch", "nn") is None


def test_who_is_reached():
    """Native code is known by its name. What nearly all import would have all run."""
    tests = {*(ROOT / "tests").rglob("test_*.py")}

    def reached(name: str) -> set[str]:
        return {file.name for file in reached_files(tests, frozenset([ROOT / name]))}

    assert "test_attention.py" in reached("csrc/cpu/attention.cpp")
    assert "test_suffix.py" in reached("python/specdec/drafters/suffix.py")
    assert {"test_stopping.py"} == reached("tests/test_stopping.py")
    assert not reached("python/specdec/decoder.py") and not reached("README.md")


def test_files_are_those_of_the_last_commit_and_after(monkeypatch, tmp_path):
    """Of a merge, only what it changed itself."""

    def git(*arguments: str) -> None:
        identity = ("-c", "user.name=n", "-c", "user.email=e")
        subprocess.run(["git", *identity, *arguments], cwd=tmp_path, check=True, capture_output=True)

    def commit(name: str) -> None:
        (tmp_path / name).write_text(name)
        git("add", name)
        git("commit", "-m", name)

    def changed() -> set[str]:
        return {Path(file).name for file in rotation.changed_files()}

    monkeypatch.setattr(rotation, "ROOT", tmp_path)
    assert changed() == set() and rotation.git("rev-list --count HEAD") == ""  # no repository
    git("init", "-b", "one")
    commit("a")
    commit("b")
    assert changed() == {"b"} and rotation.git("rev-list --count HEAD") == "2\n"
    (tmp_path / "a").write_text("changed")
    (tmp_path / "new").touch()
    assert changed() == {"a", "b", "new"}
    git("checkout", "a")
    (tmp_path / "new").unlink()
    git("checkout", "-b", "two", "HEAD~1")
    commit("c")
    git("merge", "--no-ff", "one")
    assert changed() == set()


def test_few_cases_have_all_pairs():
    axes = {"backend": ("cpu", "triton", "cuda"), "rule": ("token", "block", "coupled"), "q": ("full", "stats")}
    cases = [{"backend": b, "rule": r, "q": q} for b in axes["backend"] for r in axes["rule"] for q in axes["q"]]
    chosen = cover(cases, kept=[17])
    assert 17 in chosen and 9 <= len(chosen) <= 11
    for one, other in (("backend", "rule"), ("backend", "q"), ("rule", "q")):
        pairs = {(cases[i][one], cases[i][other]) for i in chosen}
        assert len(pairs) == len(axes[one]) * len(axes[other])


def test_what_is_no_product_stays_whole():
    assert len(cover([{"given": f"x{i}", "told": f"y{i}", "rule": "token"} for i in range(20)])) == 20


def test_of_an_only_argument_all_cases_stay():
    items = [Item(f"{TESTS[0]}[{i}]") for i in range(20)]
    for item in items:
        item.callspec = SimpleNamespace(params={"case": item.nodeid})
    pairwise.mark(items, (), (), (), 0)
    assert not any(item.markers for item in items)


def test_of_what_takes_long_one_case_stays_and_another_later(monkeypatch, tmp_path):
    """Beside those that killed a mutant. All of a file that imports what was changed."""
    monkeypatch.setattr(pairwise, "KILLERS", tmp_path / "results.json")
    pairwise.KILLERS.write_text(json.dumps({"mutants": {"a-bug": {"test": f"{TESTS[0]}[4]"}}}))

    def left(turn: int, reached: bool = False) -> set[int]:
        items = [Item(f"{TESTS[0]}[{i}]", *["real"] * (i == 3)) for i in range(5)]
        for item in items:
            item.callspec = SimpleNamespace(params={"case": item.nodeid})
        pairwise.mark(items, ("real",), {TESTS[0]}, {items[0].path} if reached else (), turn)
        return {i for i, item in enumerate(items) if "nightly" in item.markers}

    found = [left(turn) for turn in range(4)]
    assert set.union(*found) == {0, 1, 2} and not set.intersection(*found) and min(map(len, found)) == 2
    assert not left(0, reached=True)

"""Which cases of a test run in an everyday run: the first, and a fifth of the others, another fifth after each commit.
Of tests that dear.txt lists, which take a second or more, the first has its turn, too. Of a test file that imports what
was changed, all cases run. The others are marked ``another_day``."""

from __future__ import annotations

import ast
import functools
import subprocess
import zlib
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import pytest

from . import ROOT

EVERY = 5  # so many commits see all cases
APART = ("nightly", "nvcc", "real")  # markers of what no everyday run has
REACHED = pytest.StashKey[bool]()  # of a case that runs only because its file imports what was changed
DEAR = {line for line in (ROOT / "tests/support/dear.txt").read_text().splitlines() if line.startswith("tests/")}
FOLDERS = (ROOT / "tests", ROOT / "bench", ROOT / "python", ROOT)  # where modules are looked for


def turn(test: str, index: int, commits: int) -> bool:
    """Whether case number ``index`` of a test runs after so many commits. Tests of two cases, of which there are many,
    do not all run their second one on the same day."""
    first = index == 0 and DEAR.isdisjoint((test, test.partition("::")[0]))
    return first or (zlib.crc32(test.encode()) + index + commits) % EVERY == 0


def mark(config: pytest.Config, items: Iterable[pytest.Item]) -> None:
    """With ``--all-cases``, and for who names a file or a test, nothing is left for another day."""
    if config.getoption("all_cases") or not all(Path(argument).is_dir() for argument in config.args):
        return
    commits = int(git("rev-list", "--count", "HEAD") or 0)
    changed, seen = changed_files(), Counter()
    for item in items:
        if any(item.get_closest_marker(name) for name in APART):
            continue
        test = item.nodeid.partition("[")[0]
        if not turn(test, seen[test], commits):
            if reaches(item.path, changed):
                item.stash[REACHED] = True
            else:
                item.add_marker(pytest.mark.another_day)
        seen[test] += 1


def git(*arguments: str) -> str:
    """What git says; nothing where there is none, or no repository."""
    try:
        return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True).stdout
    except OSError:
        return ""


def changed_files() -> frozenset[Path]:
    """What the last commit changed, and what is not committed. Of a merge, only what is as in none of its parents: the
    commits that it brings had runs of their own."""
    questions = (
        ("show", "--format=", "--name-only", "HEAD"),
        ("diff", "--name-only", "HEAD"),
        ("ls-files", "--others", "--exclude-standard"),
    )
    return frozenset(ROOT / name for question in questions for name in git(*question).splitlines())


@functools.cache
def reaches(test: Path, changed: frozenset[Path]) -> bool:
    """Whether a test file, or a helper that it imports, was changed or imports what was changed.

    What the packages import in turn does not count: then nearly every test would reach the loop and the operations.
    Of native code, the tests that bear its name count.
    """
    native = {file.stem for file in changed if file.is_relative_to(ROOT / "csrc")}
    return not changed.isdisjoint(reach(test)) or any(stem in test.stem for stem in native)


def reach(test: Path) -> set[Path]:
    """A test file, what it imports of the repository, and what its helpers import."""
    found, reading = {test}, [test]
    while reading:
        new = imported(reading.pop()) - found
        found |= new
        reading += [file for file in new if file.is_relative_to(ROOT / "tests")]
    return found


@functools.cache
def imported(file: Path) -> frozenset[Path]:
    """The repository's files that a file imports, at its top or within its functions."""
    found: set[Path | None] = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found |= {home(FOLDERS, alias.name, "") for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            folders = (file.parents[node.level - 1],) if node.level else FOLDERS
            found |= {home(folders, node.module or "", alias.name) for alias in node.names}
    return frozenset(file for file in found if file is not None)


def home(folders: Iterable[Path], module: str, name: str) -> Path | None:
    """The file of what ``from module import name`` brings. What a package only passes on is where it comes from."""
    places = [folder.joinpath(*module.split(".")) if module else folder for folder in folders]
    options = [file for p in places for file in (p / f"{name}.py", p / name / "__init__.py", p.with_suffix(".py"))]
    file = next((file for file in (*options, *(p / "__init__.py" for p in places)) if file.is_file()), None)
    if name and file in [place / "__init__.py" for place in places]:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and node.level and node.module:
                if name in {alias.name for alias in node.names}:
                    return home((file.parents[node.level - 1],), node.module, name)
    return file

"""Which cases of a test run in an everyday run: the first, and a seventh of the others, another one after each commit.
Of tests that dear.txt lists, which take long, the first has its turn, too, and pairwise.py leaves few of their cases.
Of a test file that imports what was changed, all cases run. The others are marked ``another_day``."""

from __future__ import annotations

import functools
import re
import subprocess
import zlib
from collections import Counter
from collections.abc import Collection, Iterable
from pathlib import Path

import pytest

from . import ROOT

EVERY = 7  # so many commits see all cases
APART = ("nightly", "nvcc", "real")  # markers of what no everyday run has
REACHED = pytest.StashKey[bool]()  # of a case that runs only because its file imports what was changed
LISTED = (line for line in (ROOT / "tests/support/dear.txt").read_text().splitlines() if line.startswith("tests/"))
DEAR = {name: number for number, name in enumerate(LISTED)}  # their turns follow each other, so that days are alike
FOLDERS = (ROOT / "tests", ROOT / "bench", ROOT / "python", ROOT)  # where modules are looked for
IMPORT = re.compile(r"^ *(?:from (\.*)([\w.]*) import (\([^)]*\)|.*)|import (.*))$", re.MULTILINE)
MOST = 40  # test files that all run for one file that was changed


def turn(test: str, index: int, commits: int) -> bool:
    """Whether case number ``index`` of a test runs after so many commits. Tests of two cases, of which there are many,
    do not all run their second one on the same day."""
    number = DEAR.get(test, DEAR.get(test.partition("::")[0]))
    if number is None:
        return index == 0 or (zlib.crc32(test.encode()) + index + commits) % EVERY == 0
    return (number + index + commits) % EVERY == 0


def today(items: Iterable[pytest.Item]) -> tuple[int, set[Path]]:
    """(how many commits there are, test files that import what was changed)"""
    return int(git("rev-list --count HEAD") or 0), reached_files({item.path for item in items}, changed_files())


def mark(config: pytest.Config, items: Iterable[pytest.Item], commits: int, reached: Collection[Path]) -> None:
    """With ``--all-cases``, and for who names a file or a test, nothing is left for another day."""
    if config.getoption("all_cases") or not all(Path(argument).is_dir() for argument in config.args):
        return
    seen = Counter()
    for item in items:
        if any(item.get_closest_marker(name) for name in APART):
            continue
        test = item.nodeid.partition("[")[0]
        if not turn(test, seen[test], commits):
            if item.path in reached:
                item.stash[REACHED] = True
            else:
                item.add_marker(pytest.mark.another_day)
        seen[test] += 1


def git(arguments: str) -> str:
    """What git says; nothing where there is none, or no repository."""
    try:
        return subprocess.run(["git", *arguments.split()], cwd=ROOT, capture_output=True, text=True).stdout
    except OSError:
        return ""


def changed_files() -> frozenset[Path]:
    """What the last commit changed, and what is not committed. Of a merge, only what is as in none of its parents: the
    commits that it brings had runs of their own."""
    questions = ("show --format= --name-only HEAD", "diff --name-only HEAD", "ls-files --others --exclude-standard")
    return frozenset(ROOT / name for question in questions for name in git(question).splitlines())


def reached_files(tests: set[Path], changed: frozenset[Path]) -> set[Path]:
    """Of test files, those that were changed, or import what was, themselves or through helpers. Of native code, those
    that bear its name.

    What the packages import in turn does not count, nor what more than ``MOST`` of the files import: nearly every test
    would run for a line of the loop or the decoder, which whatever runs sees as well.
    """
    changed = {file for file in changed if file.suffix == ".py" or file.is_relative_to(ROOT / "csrc")}
    of, found = {test: reach(test) for test in tests} if changed else {}, set()
    for file in changed:
        own = {test for test in tests if (file in of[test] if file.suffix == ".py" else file.stem in test.stem)}
        found |= own if len(own) <= MOST else own & {file}
    return found


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
    for dots, module, names, modules in IMPORT.findall(file.read_text()):
        folders = (file.parents[len(dots) - 1],) if dots else FOLDERS
        found |= {home(folders, module, name) for name in words(names)}
        found |= {home(FOLDERS, name, "") for name in words(modules)}
    return frozenset(file for file in found if file is not None)


def words(names: str) -> list[str]:
    """The names of ``a, b as c``, which may be in brackets and on several lines."""
    return [name.split()[0] for name in re.sub("#.*", "", names).strip("()").split(",") if name.strip()]


@functools.cache
def home(folders: tuple[Path, ...], module: str, name: str) -> Path | None:
    """The file of what ``from module import name`` brings. What a package only passes on is where it comes from."""
    places = [folder.joinpath(*module.split(".")) if module else folder for folder in folders]
    options = [file for p in places for file in (p / f"{name}.py", p / name / "__init__.py", p.with_suffix(".py"))]
    file = next((file for file in (*options, *(p / "__init__.py" for p in places)) if file.is_file()), None)
    if name and file in [place / "__init__.py" for place in places]:
        for dots, origin, names, _ in IMPORT.findall(file.read_text()):
            if dots and origin and name in words(names):
                return home((file.parents[len(dots) - 1],), origin, name)
    return file

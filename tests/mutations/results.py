"""The record of what the gate found, ``results.json``, and the line of CONTRIBUTING.md that is made from it.

A kill stays valid while the mutated file's text and the killing test's file are as they were. Nothing else is valid.
"""

from __future__ import annotations

import datetime
import json
import re
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from .gate import Outcome, Verdict, digest
from .mutation import ROOT, Mutation

RESULTS = Path("tests", "mutations", "results.json")
DOCUMENT = Path("CONTRIBUTING.md")
LINE = re.compile(r"^\*\*\d+ of \d+ mutants killed\*\* at .*$", re.MULTILINE)


class Results:
    """
    Args:
        root: of the repository. The record is written anew after each verdict, and need not be there yet.
    """

    def __init__(self, root: Path = ROOT):
        self._root, self._file, self._document = root, root / RESULTS, root / DOCUMENT
        self.run: dict[str, Any] = {}
        self.verdicts: dict[str, dict[str, Any]] = {}
        if self._file.exists():
            read = json.loads(self._file.read_text())
            self.verdicts = read.pop("mutants")
            self.run = read

    def begin(self, mutations: Iterable[Mutation]) -> None:
        """A run over the tree as it is, in which these are all the mutations that there are: drops what is not valid."""
        others = ["--", ".", f":!{RESULTS}", f":!{DOCUMENT}"]  # what is written here does not count as a change
        self.run = {
            "commit": git("rev-parse", "--short=12", "HEAD"),
            "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
            "dirty": bool(git("status", "--porcelain", *others)),
        }
        self.verdicts = {m.name: self.verdicts[m.name] for m in mutations if self._is_valid(m)}
        self.write()

    def add(self, verdict: Verdict) -> None:
        self.verdicts[verdict.mutation.name] = {
            "verdict": verdict.outcome,
            "test": verdict.test,
            "seconds": round(verdict.seconds, 1),
            "cpu_seconds": round(verdict.cpu_seconds, 1),
            "commit": self.run["commit"] + ("+" if self.run["dirty"] else ""),
            "mutated": verdict.mutated,
            "tested": verdict.tested,
        }
        self.write()

    def write(self) -> None:
        new = self._file.with_suffix(".new")
        new.write_text(json.dumps({**self.run, "mutants": dict(sorted(self.verdicts.items()))}, indent=1) + "\n")
        new.replace(self._file)
        text = self._document.read_text()
        if LINE.search(text) is None:
            raise ValueError(f"{self._document.name}: has no line that {LINE.pattern!r} matches")
        self._document.write_text(LINE.sub(self.line(), text))

    def line(self) -> str:
        killed = sum(killed_by(verdict) for verdict in self.verdicts.values())
        where = f"commit {self.run['commit']}{' with changes' if self.run['dirty'] else ''}, {self.run['date']}"
        return f"**{killed} of {len(self.verdicts)} mutants killed** at {where}."

    def stale(self, mutations: Iterable[Mutation]) -> list[Mutation]:
        """Those without a valid verdict."""
        return [mutation for mutation in mutations if not self._is_valid(mutation)]

    def _is_valid(self, mutation: Mutation) -> bool:
        verdict = self.verdicts.get(mutation.name)
        if verdict is None or not killed_by(verdict):
            return False
        test = self._root / verdict["test"].split("::")[0]
        try:
            mutated = mutation.applied((self._root / mutation.file).read_text())
        except (ValueError, FileNotFoundError):  # whoever judges it says so
            return False
        return test.is_file() and (verdict["mutated"], verdict["tested"]) == (digest(mutated), digest(test.read_text()))


def killed_by(verdict: dict[str, Any]) -> bool:
    return verdict["verdict"] in (Outcome.KILLED, Outcome.ENDLESS)


def git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip()

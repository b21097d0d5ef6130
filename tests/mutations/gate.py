"""A copy of the repository in which mutations are built and tested."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from .mutation import ROOT, Mutation

# The suite of every day, but for the test that looks for old texts: it would see every mutation.
EVERYDAY = "tests --ignore=tests/mutations/test_mutations.py"
_TEST = re.compile(
    r"^(tests/\S+\.py::.*?)(?: (?:PASSED|FAILED|ERROR|SKIPPED|XFAIL|XPASS).*| Fatal.*| )?$", re.MULTILINE
)


class Run(NamedTuple):
    """One call of pytest, which stops at the first failure."""

    failed: bool
    last: str  # the test that ran last
    broken: str | None = None  # why no test ran


class Copy:
    """The files that git knows or would add, and an extension built from them; or a copy of that, ``of``.

    C++ is compiled with -O1: the compiler takes most of the time, and a bug of the source is one at any level.
    """

    def __init__(self, folder: Path, of: Copy | None = None):
        self._folder, self._stale = folder, of is None
        if of is not None:
            shutil.copytree(of._folder, folder, ignore=shutil.ignore_patterns("build"))
        else:
            listing = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
            listed = subprocess.run(listing, cwd=ROOT, check=True, capture_output=True, text=True).stdout
            for name in filter(None, listed.split("\0")):
                if (ROOT / name).is_file():
                    (folder / name).parent.mkdir(parents=True, exist_ok=True)
                    shutil.copy2(ROOT / name, folder / name)
            setup = folder / "setup.py"
            setup.write_text(setup.read_text().replace('"-O3"', '"-O1"'))
        # Nothing installed is used. Compiled files would outlive a mutation of the same second and size.
        paths = {"PYTHONPATH": f"{folder}:{folder / 'python'}", "PYTHONDONTWRITEBYTECODE": "1", "MAX_JOBS": "1"}
        self._warm = subprocess.Popen(
            [sys.executable, Path(__file__).with_name("warm.py")], cwd=folder, env={**os.environ, **paths}, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip

    @contextlib.contextmanager
    def mutated(self, mutation: Mutation) -> Iterator[None]:
        source = self._folder / mutation.file
        text = source.read_text()
        source.write_text(mutation.applied(text))
        self._stale |= mutation.native
        try:
            yield
        finally:
            source.write_text(text)
            self._stale |= mutation.native

    def build(self) -> str | None:
        """What the compiler says if it fails."""
        if not self._stale:
            return None
        code, output = self._python("setup.py", "build_ext", "--inplace")
        self._stale = code != 0
        return output[-2000:] if self._stale else None

    def test(self, *arguments: str) -> Run:
        code, output = self._python("-m", "pytest", "-x", "-v", "--tb=no", "-p", "no:cacheprovider", *arguments)
        tests = _TEST.findall(output)
        if not tests or code > 1:  # 2 and more: interrupted while collecting, wrong usage
            return Run(False, "", output[-2000:])
        return Run(code != 0, tests[-1])

    def _python(self, *arguments: str) -> tuple[int, str]:
        """(exit code, negative where a signal ended it; output)"""
        output = self._folder / "output.txt"
        self._warm.stdin.write(json.dumps([str(output), *arguments]) + "\n")
        self._warm.stdin.flush()
        return int(self._warm.stdout.readline()), output.read_text(errors="replace")


class Unmutated:
    """Which tests pass without any mutation. Shared by all threads."""

    def __init__(self, folder: Path):
        self.copy, self._known, self._lock = Copy(folder), {}, threading.Lock()

    def build(self) -> str | None:
        return self.copy.build()

    def passes(self, test: str) -> bool:
        with self._lock:
            if test not in self._known:
                run = self.copy.test(test)
                self._known[test] = not run.failed and run.broken is None
            return self._known[test]


class Verdict(NamedTuple):
    mutation: Mutation
    killed: bool
    text: str
    detail: str = ""


class Gate:
    """Judges mutations in copies of its own. ``unmutated`` says whether a test that killed one passes otherwise."""

    def __init__(self, folder: Path, unmutated: Unmutated):
        self._copy, self._unmutated = Copy(folder, unmutated.copy), unmutated

    def judge(self, mutation: Mutation) -> Verdict:
        with self._copy.mutated(mutation):
            if (error := self._copy.build()) is not None:
                return Verdict(mutation, False, "INVALID, it does not compile", error)
            for arguments in (mutation.first, EVERYDAY):
                run = self._copy.test(*shlex.split(arguments))
                if run.broken is not None:
                    return Verdict(mutation, False, "INVALID, no test runs", run.broken)
                if run.failed:
                    if not self._unmutated.passes(run.last):
                        return Verdict(mutation, False, f"INVALID, this fails anyway: {run.last}")
                    return Verdict(mutation, True, f"killed by {run.last}")
        return Verdict(mutation, False, "SURVIVED")

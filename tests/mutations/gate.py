"""A copy of the repository in which mutations are built and tested."""

from __future__ import annotations

import contextlib
import enum
import hashlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from .mutation import ROOT, Mutation

# The suite of every day with all cases, but for the tests of this gate: that of the old texts would see every mutation.
EVERYDAY = "tests --all-cases --ignore=tests/mutations"
_TEST = re.compile(
    r"^(tests/\S+\.py::.*?)(?: (?:PASSED|FAILED|ERROR|SKIPPED|XFAIL|XPASS).*| Fatal.*| )?$", re.MULTILINE
)


# Tests of a mutation have this many seconds, or this many times what they take without it, whichever is more: the
# machine may be shared. Only who exceeds the seconds costs a run without the mutation.
SECONDS, TIMES = 90.0, 10.0
LONGEST = 3600.0  # seconds for what has no mutation in it


class Run(NamedTuple):
    """One call of pytest, which stops at the first failure."""

    failed: bool
    last: str = ""  # the test that ran last
    broken: str | None = None  # why no test ran
    ended: bool = True  # or it was killed after its time
    seconds: float = 0.0


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
        settings = {"PYTHONPATH": f"{folder}:{folder / 'python'}", "PYTHONDONTWRITEBYTECODE": "1", "MAX_JOBS": "1"}
        settings["TMPDIR"] = str(folder.parent)  # where tests leave kernels that they compiled
        self.cpu_seconds = 0.0  # of all that has run here
        self._warm = subprocess.Popen(
            [sys.executable, Path(__file__).with_name("warm.py")], cwd=folder, env={**os.environ, **settings},
            text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
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

    def test(self, arguments: str, seconds: float = LONGEST) -> Run:
        start = time.monotonic()
        # Without a summary of warnings, which would name other tests behind the last one.
        pytest = ("-m", "pytest", "-x", "-v", "--tb=no", "--disable-warnings", "-p", "no:cacheprovider")
        code, output = self._python(*pytest, *shlex.split(arguments), seconds=seconds)
        tests = _TEST.findall(output)
        if not tests or (code is not None and code > 1):  # 2 and more: interrupted while collecting, wrong usage
            return Run(False, broken=output[-2000:])
        return Run(code not in (0, None), tests[-1], ended=code is not None, seconds=time.monotonic() - start)

    def digest(self, file: str) -> str:
        """Of the file's text as it is in this copy."""
        return digest((self._folder / file).read_text())

    def _python(self, *arguments: str, seconds: float = LONGEST) -> tuple[int | None, str]:
        """(exit code: negative where a signal ended it, None where its time did; output)"""
        output = self._folder / "output.txt"
        self._warm.stdin.write(json.dumps([str(output), seconds, *arguments]) + "\n")
        self._warm.stdin.flush()
        code, used = json.loads(self._warm.stdout.readline())
        self.cpu_seconds += used
        return code, output.read_text(errors="replace")


class Unmutated:
    """What the tests do without any mutation. Shared by all threads."""

    def __init__(self, copy: Copy):
        self._copy, self._known, self._lock = copy, {}, threading.Lock()

    def run(self, arguments: str) -> Run:
        with self._lock:
            if arguments not in self._known:
                self._known[arguments] = self._copy.test(arguments)
            return self._known[arguments]

    def passes(self, arguments: str) -> bool:
        run = self.run(arguments)
        return run.ended and not run.failed and run.broken is None


class Outcome(enum.StrEnum):
    KILLED = "killed"
    ENDLESS = "killed: did not end"
    SURVIVED = "survived"
    INVALID = "invalid"


class Verdict(NamedTuple):
    mutation: Mutation
    outcome: Outcome
    test: str | None = None  # that killed it, or fails anyway
    detail: str = ""
    seconds: float = 0.0
    cpu_seconds: float = 0.0
    mutated: str = ""  # digests of the mutated file's text, and of the killing test's
    tested: str = ""

    @property
    def killed(self) -> bool:
        return self.outcome in (Outcome.KILLED, Outcome.ENDLESS)


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


class Gate:
    """Judges mutations in ``copy``. ``unmutated`` says what their tests do otherwise."""

    def __init__(self, copy: Copy, unmutated: Unmutated, everyday: bool = False):
        self._copy, self._unmutated, self._everyday = copy, unmutated, everyday

    def judge(self, mutation: Mutation) -> Verdict:
        start, used = time.monotonic(), self._copy.cpu_seconds
        try:
            with self._copy.mutated(mutation):
                verdict = self._judge(mutation)
                tested = self._copy.digest(verdict.test.split("::")[0]) if verdict.test else ""
                mutated = self._copy.digest(mutation.file)
        except ValueError as error:  # it does not apply
            return Verdict(mutation, Outcome.INVALID, detail=str(error))
        seconds, used = time.monotonic() - start, self._copy.cpu_seconds - used
        return verdict._replace(seconds=seconds, cpu_seconds=used, mutated=mutated, tested=tested)

    def _judge(self, mutation: Mutation) -> Verdict:
        if (error := self._copy.build()) is not None:
            return Verdict(mutation, Outcome.INVALID, detail=f"It does not compile:\n{error}")
        for arguments in (mutation.first, *([EVERYDAY] if self._everyday else [])):
            run = self._test(arguments)
            if run.broken is not None:
                return Verdict(mutation, Outcome.INVALID, detail=f"No test runs:\n{run.broken}")
            # A test that does not end would pass otherwise, since all of them have.
            if run.failed and not self._unmutated.passes(shlex.quote(run.last)):
                return Verdict(mutation, Outcome.INVALID, run.last, "This test fails anyway.")
            if not run.ended and not self._unmutated.passes(arguments):
                return Verdict(mutation, Outcome.INVALID, run.last, "These tests fail or do not end anyway.")
            if run.failed or not run.ended:
                return Verdict(mutation, Outcome.KILLED if run.ended else Outcome.ENDLESS, run.last)
        return Verdict(mutation, Outcome.SURVIVED)

    def _test(self, arguments: str) -> Run:
        run = self._copy.test(arguments, SECONDS)
        if not run.ended and (seconds := TIMES * self._unmutated.run(arguments).seconds) > SECONDS:
            run = self._copy.test(arguments, seconds)
        return run

"""Tries grammars in another process before this one compiles them: ``grammar_child.py`` says why."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import subprocess
import sys
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from multiprocessing import spawn
from typing import IO, NamedTuple, cast

# Modules are looked for where this process looks for them, and nowhere else.
_COMMAND = "import sys; sys.path[:] = sys.argv[1:]; from specdec.sampling.grammar_child import main; main()"
_TRIES = 2  # of a grammar whose process was ended, which it has hardly done itself
_KEPT = 128  # verdicts


class Vocabulary(NamedTuple):
    """What the library needs of a tokenizer: that of ``tokenizers`` as JSON, V, and the end-of-sequence tokens."""

    tokenizer: str
    vocab_size: int
    eos: list[int]


class Verdict(NamedTuple):
    """What became of a grammar.

    Attributes:
        words: why it cannot be had; "": it can.
        limit: whether it ran into a limit; otherwise the words are the library's, or say what is wrong with it.
        seconds, bytes: what it took.
        final: whether the same grammar would have the same verdict again.
    """

    words: str = ""
    limit: bool = False
    seconds: float = 0.0
    bytes: int = 0
    final: bool = False


@dataclass
class _Job:
    """One grammar, whoever waits for it."""

    grammar: str
    futures: list[Future[Verdict]] = field(default_factory=list)
    tries: int = 0


class GrammarTrials:
    """Tries grammars, in a process that is started for the first one, and again where it was ended. It ends with this
    object, and with this process, however that ends. Threads may share it; after a fork the child starts its own.

    Args:
        vocabulary: makes it when it is needed. None: grammars are checked as far as that goes without one, and shortly.
    """

    def __init__(self, vocabulary: Callable[[], Vocabulary] | None):
        self._vocabulary, self._process, self._jobs = vocabulary, cast("_Process | None", None), dict[int, _Job]()
        self._known = OrderedDict[str, Verdict]()
        self._lock, self._number = threading.RLock(), 0
        _followed().add(self)

    def submit(self, grammar: str) -> Future[Verdict]:
        """Returns what will be known of a grammar, as the library takes it. Equal ones are tried once, and the last
        verdicts kept. Where the last of those who asked for one cancels, it is tried no more."""
        future: Future[Verdict] = Future()
        with self._lock:
            if (known := self._known.get(grammar)) is not None:
                self._known.move_to_end(grammar)
                future.set_result(known)
                return future
            number = next((n for n, job in self._jobs.items() if job.grammar == grammar), None)
            if number is None:
                number = self._number = self._number + 1
                self._jobs[number] = _Job(grammar, [future])
                self._send(number)
            else:
                self._jobs[number].futures.append(future)
        future.add_done_callback(lambda done: self._leave(number, done) if done.cancelled() else None)
        return future

    def _send(self, number: int) -> None:
        job = self._jobs[number]
        job.tries += 1
        try:
            if self._process is None:
                self._process = _Process(self._vocabulary and self._vocabulary(), weakref.ref(self))
            self._process.write({"id": number, "grammar": job.grammar})
        except OSError as error:
            self._told(number, Verdict(f"no process can be started that tries it: {error}", limit=True))

    def _leave(self, number: int, future: Future[Verdict]) -> None:
        with self._lock:
            if (job := self._jobs.get(number)) is not None:
                job.futures.remove(future)
                if not job.futures:
                    del self._jobs[number]
                    if self._process is not None:
                        self._process.write({"id": number})

    def _told(self, number: int, verdict: Verdict) -> None:
        with self._lock:
            if (job := self._jobs.pop(number, None)) is None:
                return
            if verdict.final:
                self._known[job.grammar] = verdict
                if len(self._known) > _KEPT:
                    self._known.popitem(last=False)
        for future in job.futures:
            if future.set_running_or_notify_cancel():
                future.set_result(verdict)

    def _lost(self, process: _Process, status: int) -> None:
        """The process has ended, which it does not by itself."""
        with self._lock:
            process.close()
            if self._process is process:
                self._process = None
                for number, job in list(self._jobs.items()):
                    if job.tries < _TRIES:
                        self._send(number)
                    else:
                        self._told(number, Verdict(f"the process that tries it ended with {status}", limit=True))

    def _forked(self) -> None:
        """In the child of a fork: the process, and who waits for it, are the parent's."""
        if self._process is not None:
            self._process.forget()
        self._lock, self._process, self._jobs = threading.RLock(), None, {}


class _Process:
    """The child, and the thread that reads what it tells."""

    def __init__(self, vocabulary: Vocabulary | None, trials: weakref.ref[GrammarTrials]):
        self._child = subprocess.Popen(
            [_python(), "-I", "-c", _COMMAND, *_import_path()],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "MALLOC_ARENA_MAX": "1"},  # more of them would count as memory that a grammar takes
            start_new_session=True,  # Ctrl-C is for this process, which may go on for a while
        )
        self._input, self._output = cast("IO[bytes]", self._child.stdin), cast("IO[bytes]", self._child.stdout)
        threading.Thread(target=self._read, args=(trials,), name="specdec-grammar-trials", daemon=True).start()
        self.write({} if vocabulary is None else vocabulary._asdict())
        self.close = weakref.finalize(trials() or self, _close, self._input)

    def write(self, line: dict) -> None:
        with contextlib.suppress(BrokenPipeError):  # it has ended, which the reading thread sees
            self._input.write(json.dumps(line).encode() + b"\n")
            self._input.flush()

    def forget(self) -> None:
        with open(os.devnull, "r+b", buffering=0) as null:
            for pipe in (self._input, self._output):  # not closed, as what another thread had not written would be now
                os.dup2(null.fileno(), pipe.fileno(), inheritable=False)
        self._child.returncode = 0  # it is no child of this process

    def _read(self, trials: weakref.ref[GrammarTrials]) -> None:
        for line in self._output:
            told = json.loads(line)
            if (owner := trials()) is not None:
                owner._told(told.pop("id"), Verdict(**told))
            del owner
        self._output.close()
        status = self._child.wait()
        if (owner := trials()) is not None:
            owner._lost(self, status)


def _close(pipe: IO[bytes]) -> None:
    with contextlib.suppress(OSError):
        pipe.close()


def _python() -> str:
    """Raises OSError where this process is an application that has Python in itself, which would start again."""
    python = os.fsdecode(spawn.get_executable() or "")  # which such an application may set
    if not python or getattr(sys, "frozen", False) and python == sys.executable:
        raise OSError("no interpreter is known; name one with multiprocessing.set_executable")
    return python


def _import_path() -> list[str]:
    try:
        return [os.path.abspath(entry) for entry in sys.path]
    except FileNotFoundError:  # the current folder is there no more, and nothing can be relative to it
        return [entry for entry in sys.path if os.path.isabs(entry)]


@functools.cache
def _followed() -> weakref.WeakSet[GrammarTrials]:
    """Those that learn of forks."""
    alive: weakref.WeakSet[GrammarTrials] = weakref.WeakSet()

    def tell() -> None:
        for trials in list(alive):
            trials._forked()

    os.register_at_fork(after_in_child=tell)
    return alive

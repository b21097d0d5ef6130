"""Python that has imported what takes seconds to import, and runs every command in a fork of itself.

Reads commands, one a line: [output file, seconds, arguments of python ...] in JSON. Answers each with [its exit code, or
null if it had not ended after so many seconds; the seconds of CPU time that it took]. Whatever a command started ends
with it: they are a process group.
"""

from __future__ import annotations

import contextlib
import json
import os
import runpy
import signal
import sys
import time

POLL = 0.05  # seconds between two looks whether the command has ended


def import_what_takes_seconds() -> None:
    import torch

    if not torch.cuda.is_available():
        os.environ["TRITON_INTERPRET"] = "1"  # as in conftest.py, before triton is imported

    import hypothesis  # noqa: F401
    import pytest  # noqa: F401
    import scipy.stats  # noqa: F401
    import setuptools  # noqa: F401
    import torch.utils.cpp_extension
    import transformers.models.llama.modeling_llama  # noqa: F401
    import triton  # noqa: F401


def run(arguments: list[str]) -> None:
    if arguments[0] == "-m":
        sys.argv = arguments[1:]
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = arguments
        runpy.run_path(arguments[0], run_name="__main__")


def child(output: str, arguments: list[str]) -> None:
    file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream in (1, 2):
        os.dup2(file, stream)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    code = 0
    try:
        run(arguments)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException as error:
        print(repr(error))
        code = 4
    sys.stdout.flush()
    os._exit(code)


def wait(process: int, seconds: float) -> tuple[int | None, float]:
    """Waits for the leader of a process group, and ends the group.

    Returns:
        (its exit code, negative where a signal ended it, or None: it had not ended, and was killed;
        the CPU time that it and what it waited for have taken, in seconds)
    """
    until, ended = time.monotonic() + seconds, 0
    try:
        while not ended and time.monotonic() < until:
            ended, status, used = os.wait4(process, os.WNOHANG)
            if not ended:
                time.sleep(POLL)
    finally:
        with contextlib.suppress(ProcessLookupError):  # the group is empty
            os.killpg(process, signal.SIGKILL)
        if not ended:
            _, _, used = os.wait4(process, 0)
    return os.waitstatus_to_exitcode(status) if ended else None, used.ru_utime + used.ru_stime


def main() -> None:
    sys.path[0] = os.getcwd()  # instead of this file's folder
    import_what_takes_seconds()
    for line in sys.stdin:
        output, seconds, *arguments = json.loads(line)
        if (process := os.fork()) == 0:
            os.setpgid(0, 0)
            child(output, arguments)
        with contextlib.suppress(ProcessLookupError):  # it may have ended
            os.setpgid(process, process)  # here as well, since either may be the first
        print(json.dumps(wait(process, seconds)), flush=True)


if __name__ == "__main__":
    main()

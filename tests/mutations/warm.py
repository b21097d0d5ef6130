"""Python that has imported what takes seconds to import, and runs every command in a fork of itself.

Reads commands, one a line: [output file, arguments of python ...] in JSON. Answers each with its exit code.
"""

from __future__ import annotations

import json
import os
import runpy
import signal
import sys

sys.path[0] = os.getcwd()  # instead of this file's folder

import torch  # noqa: E402

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # as in conftest.py, before triton is imported

import hypothesis  # noqa: F401, E402
import pytest  # noqa: F401, E402
import scipy.stats  # noqa: F401, E402
import setuptools  # noqa: F401, E402
import torch.utils.cpp_extension  # noqa: E402
import transformers.models.llama.modeling_llama  # noqa: F401, E402
import triton  # noqa: F401, E402

SECONDS = 3600  # a mutation may loop for ever


def run(arguments: list[str]) -> None:
    if arguments[0] == "-m":
        sys.argv = arguments[1:]
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = arguments
        runpy.run_path(arguments[0], run_name="__main__")


def child(output: str, arguments: list[str]) -> None:
    signal.alarm(SECONDS)
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


def main() -> None:
    for line in sys.stdin:
        output, *arguments = json.loads(line)
        if (process := os.fork()) == 0:
            child(output, arguments)
        code = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
        print(code, flush=True)


if __name__ == "__main__":
    main()

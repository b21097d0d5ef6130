"""Code to edit, out of Python's own standard library, which every machine has."""

from __future__ import annotations

import argparse
import configparser
import inspect
import shlex
import statistics
import textwrap
from collections.abc import Callable

# What is edited, the names that the edit replaces, and how many lines of the result the prompt shows.
EDITS: tuple[tuple[Callable, dict[str, str], int], ...] = (
    (textwrap.TextWrapper._wrap_chunks, {"cur_line": "row", "chunks": "parts"}, 8),
    (statistics.quantiles, {"data": "values"}, 6),
    (shlex.shlex.read_token, {"nextchar": "char"}, 6),
    (argparse.HelpFormatter._format_usage, {"usage": "text"}, 6),
    (configparser.RawConfigParser._read, {"fp": "file"}, 6),
)


def editing() -> list[str]:
    """A function, and the beginning of the same with names replaced: most of what follows stands in the prompt."""
    prompts = []
    for function, names, lines in EDITS:
        before = after = inspect.getsource(function)
        for old, new in names.items():
            after = after.replace(old, new)
        prompts.append(f"{before}\n\n# The same, renamed.\n{''.join(after.splitlines(True)[:lines])}")
    return prompts

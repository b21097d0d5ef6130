"""What chats have in common, wherever the model is: lines are read until the end, and commands told from messages."""

from __future__ import annotations

import sys
from collections.abc import Callable

from .chat_commands import Done
from .terminal import remark


def converse(take: Callable[[str], None]) -> None:
    """Reads lines from standard input, with a prompt on a terminal, until its end or /exit."""
    interactive = sys.stdin.isatty()
    if interactive:
        remark("/help lists commands, Ctrl-D ends", "dim")
    while True:
        try:
            line = input("> ") if interactive else sys.stdin.readline()
            if not interactive and not line:
                break
            take(line.rstrip("\n"))
        except KeyboardInterrupt:
            remark("(/exit or Ctrl-D ends)", "dim")
        except (EOFError, Done):
            break


def obey_or_answer(line: str, obey: Callable[[str], str], answer: Callable[[str], None]) -> None:
    """Obeys a command or answers a message. Errors are printed and change nothing."""
    if not line.strip():
        return
    try:
        if line.startswith("/"):
            remark(obey(line), "dim")
        else:
            answer(line)
    except ValueError as error:
        remark(f"{line.split()[0] if line.startswith('/') else 'not answered'}: {error}", "red")

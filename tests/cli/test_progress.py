"""How far a command is: lines where stderr is no terminal, a bar where it is one."""

from __future__ import annotations

import io
import sys
import threading

import pytest
from specdec.cli import progress_bar as module
from specdec.cli.progress_bar import Lines, progress


def test_lines_have_counts_and_what_remains():
    now = [0.0]
    lines = Lines("loading models", lambda: now[0])
    now[0] = 61.0
    assert lines.line() == "loading models, 0:01:01"
    lines.update(4, 10, "going on")  # four were there
    now[0] = 71.0
    assert lines.line() == "4 of 10 in 0:00:10: going on"
    lines.update(6, 10, "x = 1")
    assert lines.line() == "6 of 10 in 0:00:10, 0:00:20 left: x = 1"
    now[0] = 4000.0
    lines.update(10, 10, "done")
    assert lines.line() == "10 of 10 in 1:05:39, 0:00:00 left: done"


class Pipe(io.StringIO):
    """Says when it was written to."""

    def __init__(self) -> None:
        super().__init__()
        self.written = threading.Event()

    def write(self, text: str) -> int:
        count = super().write(text)
        if "\n" in text:
            self.written.set()
        return count


def test_lines_come_while_the_work_says_nothing(monkeypatch):
    monkeypatch.setattr(module, "EVERY_SECONDS", 0.001)
    monkeypatch.setattr(sys, "stderr", pipe := Pipe())
    before = threading.active_count()
    with progress("loading models") as show:
        assert pipe.written.wait(60)
        show(1, 3, "first")
        seen = len(pipe.getvalue())
        while "first" not in pipe.getvalue()[seen:]:
            pipe.written.clear()
            assert pipe.written.wait(60)
    assert threading.active_count() == before
    assert pipe.getvalue().startswith("loading models, 0:00:00\n") and "\n1 of 3 in 0:00:00: first\n" in pipe.getvalue()


def test_what_ends_early_says_nothing(capsys):
    with progress("loading models") as show:
        show(1, 3, "first")
    with pytest.raises(ZeroDivisionError), progress("loading models"):
        _ = 1 / 0
    assert capsys.readouterr() == ("", "")


def test_nothing_where_nothing_was_asked_for(monkeypatch):
    monkeypatch.setattr(module, "EVERY_SECONDS", 0)
    monkeypatch.setattr(sys, "stderr", pipe := Pipe())
    with progress("loading models", asked=False) as show:
        show(1, 3, "first")
    assert pipe.getvalue() == ""


@pytest.mark.parametrize("width", (40, 60, 100))
def test_a_bar_on_a_terminal(monkeypatch, capsys, width):
    """It takes one line of any width, is gone in the end, and leaves stdout alone."""
    monkeypatch.setattr(sys, "stderr", screen := Pipe())
    monkeypatch.setattr(screen, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", str(width))
    with progress("loading models") as show:
        show(3, 12, "[distribution] " + "word " * 30)
        print("a result")
    shown = screen.getvalue()
    assert "3/12" in shown and "[d" in shown and "…" in shown and "a result" not in shown
    assert shown.count("\n") <= 1 and shown.endswith("\x1b[2K")
    assert capsys.readouterr().out == "a result\n"

"""What a terminal is shown: no control characters of a text, and lines that end between words."""

from __future__ import annotations

import contextlib
import io
import sys

import click
import pytest
from specdec.cli import app, show, terminal
from specdec.cli.terminal import print_table, remark, visible, write
from specdec.result import Producer
from support.commands import PROMPT, rows, run
from typer.main import get_command

EVIL = "a\x1b[2J\x1b]0;title\x07\x08\r\n\tb\x7f\x9b31mé\u202e\u2066€ \u200f\U0001f600"
SHOWN = "a\\x1b[2J\\x1b]0;title\\x07\\x08\\r\n\tb\\x7f\\x9b31mé\\u202e\\u2066€ \u200f\U0001f600"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def screen(monkeypatch):
    """Makes stdout and stderr one terminal, so many columns wide."""

    def make(width: int = 60) -> Terminal:
        opened = Terminal()
        for name in ("stdout", "stderr"):
            monkeypatch.setattr(sys, name, opened)
        for name, value in {"TERM": "xterm", "NO_COLOR": "1", "COLUMNS": str(width)}.items():
            monkeypatch.setenv(name, value)
        return opened

    return make


def test_control_characters_are_shown():
    assert visible(EVIL) == SHOWN
    assert "".join(map(visible, EVIL)) == SHOWN  # in pieces as well


def test_text_on_a_terminal(screen):
    shown = screen()
    write(EVIL)
    assert shown.getvalue() == SHOWN


def test_text_in_a_pipe_is_as_it_is(capsysbinary):
    write(EVIL)
    write(EVIL, "green", dim=True)
    assert capsysbinary.readouterr().out == 2 * EVIL.encode()


class Vocabulary:
    """A tokenizer whose tokens are characters."""

    all_special_ids: tuple[int, ...] = ()

    def decode(self, tokens, **_: object) -> str:
        return "".join(map(chr, tokens))

    def convert_ids_to_tokens(self, token: int) -> str:
        return chr(token)


def test_a_streamed_escape_sequence(screen):
    """Its parts are different tokens. What was shown is remembered as it was."""
    shown = screen()
    page = show.Page(Vocabulary(), "p\x1b", [1], coloured=False)
    for character in "\x1b[31mx":
        page.show([ord(character)], [Producer.ACCEPTED])
    page.finish()
    assert click.unstyle(shown.getvalue()) == "p\\x1b\\x1b[31mx\n" and page.shown == "\x1b[31mx"


def test_prompts_with_control_characters(monkeypatch, pair):
    """The command shows them on a terminal, and leaves them alone elsewhere and in JSON."""
    monkeypatch.setattr("specdec.models.load.loading.load_embedded_pair", lambda *_, **__: pair)
    prompt, options = PROMPT + "\x1b[31m\u202e", ("--max-new-tokens", 2)
    text = rows(prompt, *options)[0]["text"]
    assert run("generate", prompt, *options).stdout == prompt + text + "\n"
    monkeypatch.setattr(terminal, "on_terminal", lambda: True)
    assert run("generate", prompt, *options).stdout == visible(prompt + text) + "\n"


WORDS = "seconds: prefill 0.012, draft_forwards 0.123, target_forwards 1.234, kernels 0.1, loop 0.0"


@pytest.mark.parametrize("width", (40, 60))
def test_remarks_are_wrapped_at_words(screen, width):
    shown = screen(width)
    remark(WORDS, "dim")
    lines = click.unstyle(shown.getvalue()).splitlines()
    assert len(lines) > 1 and max(map(len, lines)) <= width
    assert " ".join(line.strip() for line in lines) == WORDS


def test_remarks_in_a_pipe_are_one_line(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    remark(WORDS, "dim")
    remark("[bold]" + WORDS + " :smile: /no/file.py:3", err=False)
    out, err = capsys.readouterr()
    assert err == WORDS + "\n" and out == "[bold]" + WORDS + " :smile: /no/file.py:3\n"


def lines_of(screen, width: int, *arguments: object) -> list[str]:
    """What a command prints to a terminal that is so wide. typer's own runner would give help 80 columns."""
    shown = screen(width)
    with contextlib.suppress(SystemExit):
        app([str(argument) for argument in arguments])
    return [line.rstrip() for line in click.unstyle(shown.getvalue()).splitlines()]


@pytest.mark.parametrize("width", (60, 80, 200))
@pytest.mark.parametrize("name", [*get_command(app).commands])
def test_help_has_the_width_of_the_terminal(screen, width, name):
    longest = max(map(len, lines_of(screen, width, name, "--help")))
    assert longest <= width and (longest > 80 or width <= 80)


def test_the_list_of_commands_is_not_cut(screen):
    lines = lines_of(screen, 60, "--help")
    assert max(map(len, lines)) <= 60 and not any(line.endswith("...") for line in lines[1:])
    assert all(any(line.split()[:1] == [name] for line in lines) for name in get_command(app).commands)


@pytest.mark.parametrize("width", (60, 80, 200))
def test_predictions_fit_the_terminal(screen, width):
    lines = lines_of(screen, width, "simulate", "--alpha", 0.8)
    assert len(lines) > 5 and max(map(len, lines)) <= width


COLUMNS, CELLS = ("check", "drafter", "lowest p\n/ level"), [("distribution", "early-exit", "0.031")] * 2


@pytest.mark.parametrize("width, paragraphs", [(80, False), (34, False), (33, True), (20, True)])
def test_a_table_that_does_not_fit_is_text(screen, width, paragraphs):
    shown = screen(width)
    print_table(COLUMNS, CELLS)
    lines = [line.rstrip() for line in click.unstyle(shown.getvalue()).splitlines()]
    assert max(map(len, lines)) <= width
    if paragraphs:
        assert " ".join(lines) == " ".join(2 * ["check distribution, drafter early-exit, lowest p / level 0.031"])
    else:
        assert lines.count(" distribution early-exit 0.031") == 2


def test_a_table_in_a_pipe_is_a_table(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "20")
    print_table(COLUMNS, CELLS, err=True)
    out, err = capsys.readouterr()
    assert out == "" and err.count(" distribution early-exit 0.031") == 2

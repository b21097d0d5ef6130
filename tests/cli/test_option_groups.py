"""Commands take dataclasses of options, which typer sees one by one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import pytest
import typer
from specdec.cli import app
from specdec.cli.option_groups import GroupedCommand, command, option
from specdec.cli.user_errors import refuse
from typer.main import get_command
from typer.testing import CliRunner


@dataclass(frozen=True)
class Sizes:
    """How large"""

    width: int = option(..., "In pixels.", "--width", "-w")
    height: int = option(3)

    def __post_init__(self) -> None:
        if self.height < 0:
            refuse("--height", self.height, "an integer >= 0")


@dataclass(frozen=True)
class FlatSizes(Sizes):
    """How flat"""

    height: int = option(1, "Less than usual.")
    names: list[str] | None = option(None, "Repeatable.", "--name")


@pytest.fixture
def drawing():
    seen, drawing = [], typer.Typer(rich_markup_mode=None)

    @command
    def draw(sizes: FlatSizes, colour: Annotated[str, typer.Argument()] = "red") -> None:
        """Draws."""
        if colour == "blue":
            raise ValueError("names: got blue, allowed: red")
        if colour == "none":
            raise ValueError("nobody: asked for this")
        seen.append((sizes, colour))

    drawing.command(cls=GroupedCommand)(draw)
    return seen, lambda *args: CliRunner().invoke(drawing, args)


def test_a_command_gets_its_groups(drawing):
    seen, run = drawing
    assert run("-w", "5", "--name", "a", "--name", "b", "green").exit_code == 0
    assert run("--width", "6", "--height", "0").exit_code == 0
    assert seen == [(FlatSizes(width=5, names=["a", "b"]), "green"), (FlatSizes(width=6, height=0), "red")]
    text = run("--help").stdout
    places = [text.index(words) for words in ("Draws.", "Arguments:", "How flat:", "--width", "Less than", "Other:")]
    assert places == sorted(places) and "How large" not in text


def test_errors_name_the_option(drawing):
    _, run = drawing
    for args, told in (
        (("-w", "5", "blue"), "--name: got blue, allowed: red"),
        (("-w", "5", "--height", "-1"), "--height: got -1, allowed: an integer >= 0"),
        ((), "Missing option '--width'"),
    ):
        result = run(*args)
        assert result.exit_code == 2 and told in " ".join(result.stderr.split()), result.stderr
    assert isinstance(run("-w", "5", "none").exception, ValueError)  # a bug keeps its traceback


def test_every_option_has_a_heading():
    for each in get_command(app).commands.values():
        options = [param for param in each.params if param.param_type_name == "option" and param.name != "help"]
        assert all(param.rich_help_panel or each.name == "doctor" for param in options), each.name
        assert len({name for param in options for name in param.opts}) == sum(len(param.opts) for param in options)

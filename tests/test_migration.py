"""What the pages of docs/migration/ give as ours runs: Python as it stands, and so do commands on the embedded pair."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import specdec
from specdec.cli import app
from specdec.models.load import loading
from typer.main import get_command
from typer.testing import CliRunner

PAGES = sorted((Path(__file__).resolve().parents[1] / "docs" / "migration").glob("*.md"))
TEXTS = {page.stem: page.read_text(encoding="utf-8") for page in PAGES}


def blocks(language: str, text: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


PYTHON = {name: blocks("python", text) for name, text in TEXTS.items()}
LINES = [line for text in TEXTS.values() for block in blocks("bash", text) for line in block.splitlines()]
COMMANDS = [line for line in LINES if line.startswith("specdec ")]


@pytest.fixture(autouse=True)
def pair_loaded_once(pair, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (specdec, loading):
        monkeypatch.setattr(module, "load_embedded_pair", lambda *_, **__: pair)


@pytest.mark.parametrize("name", [name for name, examples in PYTHON.items() if examples])
def test_python_runs_as_it_stands(name, capsys):
    (example,) = PYTHON[name]
    names: dict = {}
    exec(compile(example, f"docs/migration/{name}.md", "exec"), names)
    match name:
        case "llm_speculative_sampling":
            assert names["output"].shape == (1, len(names["prompt"][0]) + 20)
        case "transformers":
            assert names["output"].shape == (2, names["inputs"].input_ids.shape[1] + 32)
            assert capsys.readouterr().out.startswith("tau ")
        case "vllm":
            assert [len(tokens) for _, tokens in sorted(names["outputs"].items())] == [32, 32]
        case _:
            raise AssertionError(f"docs/migration/{name}.md has Python that nothing here looks at")


@pytest.mark.parametrize("line", [line for line in COMMANDS if " generate " in line and "DIR" not in line])
def test_commands_run_as_they_stand(line):
    _, *arguments = shlex.split(line)
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert arguments[1] in result.output and len(result.output) > len(arguments[1]) + 20


def test_each_page_has_what_was_before_and_what_comes_after():
    for name in {*TEXTS} - {"README"}:
        assert "# before" in TEXTS[name] and len(re.findall(r"^\|.*\|$", TEXTS[name], re.MULTILINE)) > 8
        assert f"({name}.md)" in TEXTS["README"]
    assert len(COMMANDS) >= 5


def test_what_has_no_counterpart_has_none():
    """A row that says "none" is wrong once there is an option of the name."""
    commands = get_command(app).commands.values()
    options = {option for command in commands for param in command.params for option in param.opts}
    rows = [cells for text in TEXTS.values() for cells in re.findall(r"^\| (.*?) \| none\b", text, re.MULTILINE)]
    names = {name for row in rows for name in re.findall(r"`\W*([\w-]+)", row)}
    assert len(rows) >= 10 and {"pipeline-parallel-size", "spec-draft-n-min", "revision"} <= names
    assert not {f"--{name.replace('_', '-')}" for name in names} & options

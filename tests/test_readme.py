"""The README is short, and its Python runs as it stands."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"^```python\n(.*?)^```$", README, flags=re.MULTILINE | re.DOTALL)


def test_it_is_short():
    assert len(README.splitlines()) <= 120


@pytest.mark.parametrize("number", range(len(EXAMPLES)))
def test_python_runs_as_it_stands(number, capsys):
    names: dict = {}
    exec(compile(EXAMPLES[number], f"README.md, Python example {number + 1}", "exec"), names)
    if number == 0:
        printed = capsys.readouterr().out.splitlines()[-1]
        result = names["result"]
        lengths = [len(tokens) for tokens in result.tokens]
        assert lengths[0] == 32 and 0 < lengths[1] <= 32  # the second one is sampled, and may come to its end
        assert printed == f"{sum(lengths)} tokens in {result.stats.steps} steps, tau {result.stats.tau:.2f}"
    else:
        assert names["output"].shape == (2, names["inputs"].input_ids.shape[1] + 32)


def test_there_are_two_examples():
    assert len(EXAMPLES) == 2


def test_what_ci_runs():
    """The first two bash blocks: a text from the embedded pair, and the tests (.ci/run)."""
    first, second = re.findall(r"^```bash\n(.*?)\n```$", README, flags=re.MULTILINE | re.DOTALL)[:2]
    assert first.endswith('\n.venv/bin/specdec generate "def fibonacci(n):"')
    assert '-e ".[test]"' in second and ".venv/bin/python -m pytest" in second


def test_cells_of_the_table_have_eight_words_at_most():
    rows = [
        line for line in README.partition("## How fast")[2].partition("## ")[0].splitlines() if line.startswith("| ")
    ]
    assert len(rows) == 7 and all(len(cell.split()) <= 8 for row in rows for cell in row.strip("| ").split(" | "))


def test_every_line_of_setup_asks_for_a_setuptools_that_is_new_enough():
    """A new environment of Python 3.11 has 65.5, which ``pip install setuptools`` leaves there."""
    oldest = re.search(r'"(setuptools>=\d+)"', (ROOT / "pyproject.toml").read_text())[1]
    for told in ("README.md", "tools/torch-cpu.txt", "examples/Dockerfile"):
        named = re.findall(r"setuptools\S*", (ROOT / told).read_text())
        assert named and all(name.strip("'") == oldest for name in named)

"""What figures are made of: results, numbers with their spread, tables, and where they come from."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path


class Missing(Exception):
    """A result that does not exist, or is not whole; its name is the argument."""


class Results:
    """The results of a folder, by name."""

    def __init__(self, folder: Path):
        self.folder, self._read = folder, dict[str, dict]()

    def __getitem__(self, name: str) -> dict:
        """
        Raises:
            Missing: there is no such file, it is not whole, or it comes from a smoke run.
        """
        if name not in self._read:
            path = self.folder / f"{name}.json"
            content = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
            if not content.get("complete") or content.get("quick"):
                raise Missing(name)
            self._read[name] = content
        return self._read[name]


# ---- Numbers, rows and tables


def number(value: float) -> str:
    """Three digits, and never an exponent: 0.0376, 1.57, 12.3, 1,234."""
    return f"{value:,.0f}" if abs(value) >= 99.95 else f"{value:#.3g}".rstrip(".")


def percent(part: float) -> str:
    return f"{100 * part:.0f} %"


def spread(of: Mapping[str, float]) -> str:
    """The median, and the quartiles in brackets."""
    return f"{number(of['median'])} ({number(of['q1'])} to {number(of['q3'])})"


def times_faster(of: Mapping[str, float]) -> dict[str, float]:
    """Of a ratio of seconds, ours over theirs: how many times as fast ours is. Quartiles change places."""
    return {"median": 1 / of["median"], "q1": 1 / of["q3"], "q3": 1 / of["q1"]}


def milliseconds(of: Mapping[str, float]) -> str:
    return f"{number(1e3 * of['median'])} ms"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def page(*parts: str) -> str:
    """Tables and pictures as they are, and paragraphs in lines of 120 characters."""
    return "\n\n".join(part if part.startswith(("|", "![")) else _filled(part) for part in parts)


def _filled(paragraph: str) -> str:
    return textwrap.fill(paragraph, 120, break_long_words=False, break_on_hyphens=False)


def not_measured(missing: Missing) -> str:
    return f"Not measured yet: `python bench/regenerate.py {missing}`."


def source(name: str, result: dict) -> str:
    """Where a figure comes from: the file, the commit, the day, the kernels' instructions and the command."""
    commit = f"{result['commit'][:10]}{' with changes' if result['dirty'] else ''}"
    about = f"commit {commit}, {result['date'][:10]}, {result['instruction_set']}, {result['threads']} threads"
    return f"`bench/results/cpu/{name}.json` ({about}): `{_shown(result['command'])}`"


def _shown(command: str) -> str:
    """A command as a reader can repeat it: without the file that it wrote."""
    return command.split(" --json ")[0].removesuffix(" --json")


def machine(results: Results) -> str:
    try:
        r = results["speculative_step"]
    except Missing as missing:
        return not_measured(missing)
    versions = r["versions"]
    return page(
        f"Medians and quartiles on {r['threads']} threads of an {r['hardware']['cpu']} ({r['instruction_set']}) in a "
        f"virtual machine, float32, torch {versions['torch'].split('+')[0]}, transformers {versions['transformers']}, "
        f"Python {versions['python']}."
    )

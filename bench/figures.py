"""What every figure is made of: numbers with their spread, a table, and where its numbers come from."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping, Sequence

from report import ROOT
from results import BY_NAME, Missing, Results

MARK = " †"  # at every row of a result that is stale
STALE = "† Measured before the code that it times was changed."


def number(value: float) -> str:
    """Three digits, and never an exponent: 0.0376, 1.57, 12.3, 1,234."""
    return f"{value:,.0f}" if abs(value) >= 99.95 else f"{value:#.3g}".rstrip(".")


def spread(of: Mapping[str, float]) -> str:
    """The median, and the quartiles in brackets."""
    return f"{number(of['median'])} ({number(of['q1'])} to {number(of['q3'])})"


def times_faster(of: Mapping[str, float]) -> dict[str, float]:
    """Of a ratio of seconds, ours over theirs: how many times as fast ours is. Quartiles change places."""
    return {"median": 1 / of["median"], "q1": 1 / of["q3"], "q3": 1 / of["q1"]}


def milliseconds(of: Mapping[str, float]) -> str:
    return f"{number(1e3 * of['median'])} ms"


def mark(results: Results, name: str) -> str:
    return MARK if results.is_stale(name) else ""


def table(head: Sequence[str], rows: Iterable[Sequence[str]], marked: str = "") -> str:
    """``marked``: what each row's first cell ends with."""
    lines = [head, ["---"] * len(head), *([f"{first}{marked}", *rest] for first, *rest in rows)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def page(*parts: str) -> str:
    """Tables and pictures as they are, and paragraphs in lines of 120 characters."""
    filled = (part if part.startswith(("|", "![")) else _filled(part) for part in parts if part)
    return "\n\n".join(filled)


def _filled(paragraph: str) -> str:
    return textwrap.fill(paragraph, 120, break_long_words=False, break_on_hyphens=False)


def not_measured(missing: Missing) -> str:
    return f"Not measured yet: `python bench/regenerate.py {missing}`."


def hardware(result: Mapping) -> str:
    """What a result was measured on. The kernels' instruction set may be another one than torch's."""
    if result.get("device") == "cuda":
        return f"{result['hardware']['gpu']}, driver {result['hardware']['gpu_driver']}"
    threads = result["threads"]
    kernels, torch_has = result["instruction_set"], result["hardware"]["cpu_capability"].lower()
    instructions = kernels if torch_has == kernels else f"{kernels}, torch: {torch_has}"
    return f"{result['hardware']['cpu']}, {threads} thread{'s' * (threads > 1)} ({instructions})"


def software(result: Mapping) -> str:
    versions = result["versions"]
    return (
        f"torch {versions['torch'].split('+')[0]}, transformers {versions['transformers']}, Python {versions['python']}"
    )


def made(result: Mapping) -> str:
    """The commit and the day."""
    return f"commit {result['commit'][:10]}{' with changes' if result['dirty'] else ''}, {result['date'][:10]}"


def source(results: Results, *names: str) -> str:
    """Where figures come from: for each result its file, command, commit, day and machine; and whether it is stale."""
    said = []
    for name in names:
        r = results[name]
        command = r["command"].split(" --json ")[0].removesuffix(" --json")  # without the file that it wrote
        path = BY_NAME[name].path().relative_to(ROOT)
        said.append(f"`{path}`: `{command}`, {made(r)}, {hardware(r)}, {software(r)}.")
    return " ".join(said + ([STALE] if any(map(results.is_stale, names)) else []))

"""The results of ``specdec bench`` as the report reads them."""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

from ...checks import refuse, shown
from ..bench.grid import ASSISTED, BASELINES, PLAIN, TRANSFORMERS, Setting

FORMAT = "specdec bench 1"
LONGEST = 40  # of a method's name in a picture
HIDDEN = ("Cc", "Cf", "Cs", "Zl", "Zp")  # categories of characters
# What people call a method; one that is not here, such as a folder's head, has its own name.
METHODS = {
    TRANSFORMERS: "transformers generate",
    PLAIN: "plain decoding by specdec",
    ASSISTED: "transformers assisted",
    "model": "draft model",
    "lookup": "prompt lookup",
    "suffix": "suffix automaton",
    "early-exit": "early exit",
    "eagle3": "EAGLE-3",
    "medusa": "Medusa",
    "dflash": "DFlash",
    "tree": "draft model",
}


class Quartiles(NamedTuple):
    """A median of rounds and their quartiles."""

    median: float
    low: float
    high: float


class Series(NamedTuple):
    """Cells that differ in K and setting only. The default rules are not named."""

    method: str
    rule: str | None
    tree: int | None

    @property
    def name(self) -> str:
        method = METHODS.get(self.method, visible(self.method))
        words = [method if len(method) <= LONGEST else f"…{method[1 - LONGEST :]}"]  # of a folder, its end says most
        words += [f"tree of {self.tree}"] if self.tree is not None else []
        default = "token" if self.tree is None else "coupled"
        return ", ".join(words + ([visible(self.rule)] if self.rule not in (None, default) else []))


@dataclass(frozen=True)
class CellResult:
    id: str
    series: Series
    k: int | Literal["auto"] | None
    setting: Setting
    speed: Quartiles | None  # tokens/s
    over_plain: Quartiles | None  # how many times as fast, round by round
    over_transformers: Quartiles | None
    interval: tuple[float, float] | None  # of ``over_plain``
    first_token: float | None  # seconds, the median
    between_tokens: float | None  # seconds of an output token after the first, the median
    inter_token_p99: float | None  # seconds
    acceptance_rate: float | None
    alpha: float | None
    tau: float | None
    predicted_c: float | None
    predicted_speedup: float | None  # over plain
    peak_memory: float | None  # bytes
    rounds: int
    # Tokens/s in each round, by category; {} where that is not known.
    by_kind: dict[str, tuple[float, ...]] = field(compare=False)

    @property
    def name(self) -> str:
        words = [self.series.name]
        if self.k is not None:
            words.append("K adapts" if self.k == "auto" else f"K = {self.k}")
        return ", ".join(words)

    @property
    def is_baseline(self) -> bool:
        return self.series.method in BASELINES


class SettingVerdict(NamedTuple):
    setting: Setting
    winner: str | None
    within_noise: tuple[str, ...]
    words: str


@dataclass(frozen=True)
class BenchResults:
    cells: tuple[CellResult, ...]
    verdicts: tuple[SettingVerdict, ...]
    environment: dict[str, Any]
    models: dict[str, Any]
    settings: dict[str, Any]
    categories: tuple[str, ...]  # of each prompt, "" if it has none
    greedy: dict[str, Any]

    def by_setting(self) -> dict[Setting, list[CellResult]]:
        groups: dict[Setting, list[CellResult]] = {}
        for cell in self.cells:
            groups.setdefault(cell.setting, []).append(cell)
        return groups

    @property
    def series(self) -> list[Series]:
        """In the order of the file, so that one has the same colour in every picture."""
        return list(dict.fromkeys(cell.series for cell in self.cells if not cell.is_baseline))

    @property
    def machine(self) -> str:
        """A line about what measured: processor, threads, number type and versions, as far as they are known."""
        e = self.environment
        known = [e.get("gpu") or e.get("cpu"), f"{e['threads']} threads" if "threads" in e else None, e.get("dtype")]
        known += [f"{name} {str(e[name]).split('+')[0]}" for name in ("torch", "transformers") if name in e]
        return visible(", ".join(str(value) for value in known if value))


def visible(text: str) -> str:
    """What cannot be seen, or moves other text around (control characters, zero-width ones, directions, halves of
    surrogate pairs), written as its number. Line feeds and tabs stay."""
    return "".join(f"U+{ord(c):04X}" if unicodedata.category(c) in HIDDEN and c not in "\n\t" else c for c in text)


def load_results(path: str | Path) -> dict[str, Any]:
    """Reads the file of a run, or ``results.json`` in its folder.

    Raises:
        ValueError: there is none, it cannot be read, or it is no JSON.
    """
    path = Path(path)
    file = path / "results.json" if path.is_dir() else path
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        refuse("results", shown(str(file)), "a file that exists: results.json of `specdec bench`, or its folder")
    except (OSError, UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        refuse("results", f"{shown(str(file))}, {error}", "a readable JSON file of `specdec bench`")
    return content


def read_results(content: Any) -> BenchResults:
    """
    Args:
        content: the JSON of ``specdec bench``.

    Raises:
        ValueError: it is of another format, or was not written by ``specdec bench``.
    """
    if not isinstance(content, Mapping) or content.get("format") != FORMAT:
        found = content.get("format") if isinstance(content, Mapping) else content
        refuse("results", f"the format {shown(found)}", f"{FORMAT!r}, which `specdec bench` writes")
    try:
        kinds = {str(prompt.get("id")): str(prompt.get("category") or "") for prompt in content.get("prompts", ())}
        cells = tuple(_cell(cell, kinds) for cell in content.get("cells", ()))
        verdicts = tuple(
            SettingVerdict(_setting(v), v.get("winner"), tuple(v.get("within_noise", ())), str(v.get("words", "")))
            for v in content.get("verdicts", ())
        )
        categories = tuple(str(prompt.get("category") or "") for prompt in content.get("prompts", ()))
        parts = {name: dict(content.get(name) or {}) for name in ("environment", "models", "settings", "greedy")}
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        refuse("results", f"a file with other fields ({type(error).__name__}: {error})", "what `specdec bench` wrote")
    if len({cell.id for cell in cells}) != len(cells):
        refuse("results", "two cells of the same id", "an id of its own for each")
    return BenchResults(cells, verdicts, categories=categories, **parts)


def _cell(f: Mapping[str, Any], kinds: Mapping[str, str]) -> CellResult:
    over = f.get("speedup") or {}
    interval = (over.get("over_plain") or {}).get("interval")
    k = f["num_drafts"]
    return CellResult(
        id=str(f["id"]),
        series=Series(str(f["method"]), f.get("rule"), f.get("tree")),
        k=k if k in (None, "auto") else int(k),
        setting=_setting(f),
        speed=_spread(f.get("tokens_per_second")),
        over_plain=_spread(over.get("over_plain")),
        over_transformers=_spread(over.get("over_transformers")),
        interval=None if interval is None else (float(interval[0]), float(interval[1])),
        first_token=_number(f.get("time_to_first_token"), "median"),
        between_tokens=_number(f.get("time_per_output_token"), "median"),
        inter_token_p99=_number(f.get("inter_token"), "p99"),
        predicted_c=_number(f.get("predicted"), "c"),
        predicted_speedup=_number(f.get("predicted"), "speedup"),
        rounds=len(f["rounds"]),
        by_kind=_by_kind(f["rounds"], kinds),
        **{name: _number(f, name) for name in ("acceptance_rate", "alpha", "tau", "peak_memory")},
    )


def _by_kind(rounds: Sequence[Mapping[str, Any]], kinds: Mapping[str, str]) -> dict[str, tuple[float, ...]]:
    """Of rounds that have the time of every prompt by itself, and not of batches of several kinds."""
    found: dict[str, list[float]] = {}
    for played in rounds:
        totals: dict[str, tuple[float, int]] = {}
        for prompts, seconds, tokens in played.get("by_prompt", ()):
            if len(prompts) > 1 or str(prompts[0]) not in kinds:
                return {}
            kind = kinds[str(prompts[0])]
            before = totals.get(kind, (0.0, 0))
            totals[kind] = (before[0] + seconds, before[1] + tokens)
        for kind, (seconds, tokens) in totals.items():
            found.setdefault(kind, []).append(tokens / seconds)
    return {visible(kind): tuple(speeds) for kind, speeds in found.items() if kind and len(speeds) == len(rounds)}


def _setting(f: Mapping[str, Any]) -> Setting:
    return Setting(float(f["temperature"]), int(f["batch"]), f.get("top_k"), f.get("top_p"), f.get("min_p"))


def _number(of: Mapping[str, Any] | None, name: str) -> float | None:
    value = (of or {}).get(name)
    return None if value is None else float(value)


def _spread(of: Mapping[str, Any] | None) -> Quartiles | None:
    """Of a summary; without quartiles they are the median."""
    median = _number(of, "median")
    if of is None or median is None:
        return None
    low, high = of.get("quartiles") or (median, median)
    return Quartiles(median, float(low), float(high))

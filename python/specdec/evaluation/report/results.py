"""The results of ``specdec bench`` as the report reads them: every field checked once, so that a file that another
program wrote, or that was edited, is refused by the name of its field."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from ...checks import refuse, shown
from .fields import Fields, refuse_field, visible

FORMAT = "specdec bench 1"
PLAIN, TRANSFORMERS = "plain", "transformers"  # the baselines: our own plain decoding, and transformers' ``generate``
LONGEST = 40  # of a method's name in a picture
ASSISTED = "assisted"
BASELINES = (PLAIN, TRANSFORMERS)
PARTS = ("draft", "target", "kernels", "loop")  # of the time of a step
# What people call a method; one that is not here, such as a folder's head, has its own name.
METHODS = {
    "transformers": "transformers generate",
    "plain": "plain decoding by specdec",
    "assisted": "transformers assisted",
    "model": "draft model",
    "lookup": "prompt lookup",
    "suffix": "suffix automaton",
    "early-exit": "early exit",
    "eagle3": "EAGLE-3",
    "medusa": "Medusa",
    "dflash": "DFlash",
    "tree": "draft model",
}


class Spread(NamedTuple):
    """A median of rounds and their quartiles."""

    median: float
    low: float
    high: float


class Setting(NamedTuple):
    """What cells must have in common to be compared."""

    temperature: float
    batch: int
    top_k: int | None
    top_p: float | None
    min_p: float | None

    @property
    def filters(self) -> dict[str, float]:
        given = {"top-k": self.top_k, "top-p": self.top_p, "min-p": self.min_p}
        return {name: value for name, value in given.items() if value is not None}

    @property
    def words(self) -> str:
        warmth = f"temperature {self.temperature:g}" if self.temperature else "greedy"
        return ", ".join((warmth, self.words_but_temperature))

    @property
    def words_but_temperature(self) -> str:
        rows = "one sequence at a time" if self.batch == 1 else f"{self.batch} sequences at a time"
        return ", ".join((rows, *(f"{name} {value:g}" for name, value in self.filters.items())))

    @property
    def file_name(self) -> str:
        return f"t{self.temperature:g}-{self.file_name_but_temperature}"

    @property
    def file_name_but_temperature(self) -> str:
        return "-".join((f"b{self.batch}", *(f"{name}{value:g}" for name, value in self.filters.items())))


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
class Cell:
    id: str
    series: Series
    k: int | Literal["auto"] | None
    setting: Setting
    speed: Spread | None  # tokens/s
    over_plain: Spread | None  # how many times as fast, round by round
    over_transformers: Spread | None
    interval: tuple[float, float] | None  # of ``over_plain``
    first_token: float | None  # seconds, the median
    between_tokens: float | None  # seconds of an output token after the first, the median
    inter_token_p99: float | None  # seconds
    acceptance_rate: float | None
    alpha: float | None
    tau: float | None
    by_position: tuple[float, ...]  # of steps that drafted so many, how many accepted draft 1, 2, ...; () if unknown
    shares: dict[str, float] | None  # of the seconds of a step, by PARTS
    predicted_c: float | None
    predicted_speedup: float | None  # over plain
    peak_memory: int | None  # bytes
    rounds: int

    @property
    def name(self) -> str:
        words = [self.series.name]
        if self.k is not None:
            words.append("K adapts" if self.k == "auto" else f"K = {self.k}")
        return ", ".join(words)

    @property
    def is_baseline(self) -> bool:
        return self.series.method in BASELINES

    @property
    def step_seconds(self) -> float | None:
        """Of a step that decodes: the seconds of an output token, times the tokens that a step emits."""
        if self.between_tokens is None:
            return None
        tau = 1.0 if self.series.method == PLAIN else self.tau
        return None if tau is None else self.between_tokens * tau


class Verdict(NamedTuple):
    setting: Setting
    winner: str | None
    within_noise: tuple[str, ...]
    words: str


class Sample(NamedTuple):
    prompt_id: str
    cell: str
    pieces: tuple[tuple[str, str], ...]  # text, and what produced it


@dataclass(frozen=True)
class Results:
    cells: tuple[Cell, ...]
    verdicts: tuple[Verdict, ...]
    samples: tuple[Sample, ...]
    environment: dict[str, Any]
    models: dict[str, Any]
    settings: dict[str, Any]
    prompts: tuple[tuple[str, str], ...]  # id and category, "" if it has none
    greedy: dict[str, Any]

    def by_setting(self) -> dict[Setting, list[Cell]]:
        groups: dict[Setting, list[Cell]] = {}
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


def read_results(content: Any) -> Results:
    """
    Args:
        content: the JSON of ``specdec bench``.

    Raises:
        ValueError: it is of another format, or a field has a value of another type.
    """
    if not isinstance(content, Mapping) or content.get("format") != FORMAT:
        found = content.get("format") if isinstance(content, Mapping) else content
        refuse("results", f"the format {shown(found)}", f"{FORMAT!r}, which `specdec bench` writes")
    whole = Fields(content, "")
    cells = tuple(_cell(fields) for fields in whole.objects("cells"))
    if len({cell.id for cell in cells}) != len(cells):
        refuse_field("cells", "two cells of the same id", "an id of its own for each")
    verdicts = tuple(
        Verdict(_setting(f), f.text("winner", optional=True), tuple(f.texts("within_noise")), f.text("words") or "")
        for f in whole.objects("verdicts")
    )
    samples = tuple(
        Sample(
            f.text("prompt_id") or "",
            f.text("cell") or "",
            tuple((p.text("text") or "", p.text("produced_by") or "") for p in f.objects("pieces")),
        )
        for f in whole.objects("samples")
    )
    parts = {name: whole.mapping(name) for name in ("environment", "models", "settings", "greedy")}
    prompts = tuple((f.text("id") or "", f.text("category", optional=True) or "") for f in whole.objects("prompts"))
    return Results(cells, verdicts, samples, prompts=prompts, **parts)


def _cell(f: Fields) -> Cell:
    k = f.of.get("num_drafts")
    if k != "auto":
        k = f.count("num_drafts", optional=True)
    over = f.inner("speedup")
    plain, predicted = over.inner("over_plain"), f.inner("predicted")
    shares = f.inner("shares")
    interval = plain.numbers("interval")
    return Cell(
        id=f.text("id") or "",
        series=Series(f.text("method") or "", f.text("rule", optional=True), f.count("tree", optional=True)),
        k=k,
        setting=_setting(f),
        speed=_spread(f.inner("tokens_per_second")),
        over_plain=_spread(plain),
        over_transformers=_spread(over.inner("over_transformers")),
        interval=(interval[0], interval[1]) if len(interval) == 2 else None,
        first_token=f.inner("time_to_first_token").number("median"),
        between_tokens=f.inner("time_per_output_token").number("median"),
        inter_token_p99=f.inner("inter_token").number("p99"),
        acceptance_rate=f.number("acceptance_rate", most=1),
        alpha=f.number("alpha", most=1),
        tau=f.number("tau"),
        by_position=tuple(f.numbers("accepted_by_position", most=1)),
        shares={part: shares.number(part, most=1) or 0.0 for part in PARTS} if shares.of else None,
        predicted_c=predicted.number("c"),
        predicted_speedup=predicted.number("speedup"),
        peak_memory=f.count("peak_memory", optional=True),
        rounds=len(f.objects("rounds")),
    )


def _setting(f: Fields) -> Setting:
    temperature = f.number("temperature")
    batch = f.count("batch")
    if temperature is None:
        refuse_field(f"{f.where}.temperature", "null", "a number")
    assert batch is not None
    return Setting(temperature, batch, f.count("top_k", optional=True), f.number("top_p"), f.number("min_p"))


def _spread(f: Fields) -> Spread | None:
    """Of a summary; without quartiles they are the median."""
    median, quartiles = f.number("median"), f.numbers("quartiles")
    if median is None:
        return None
    low, high = quartiles if len(quartiles) == 2 else (median, median)
    if not low <= median <= high:
        refuse_field(f"{f.where}.quartiles", shown(quartiles), f"two numbers with the median, {median:g}, between them")
    return Spread(median, low, high)

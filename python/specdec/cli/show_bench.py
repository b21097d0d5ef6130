"""How ``specdec bench`` prints its results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from .show import RATIOS
from .show_suite import SUITE_WORDS, gain, print_suite
from .terminal import print_table, remark

if TYPE_CHECKING:
    from ..evaluation.bench.grid import BenchCell
    from ..evaluation.bench.measure import BenchPrompt
    from ..evaluation.bench.session import Timed

COLUMNS = ("method", "tokens/s", "times plain", "times\ntransformers", "first token\nms", "a token\nms", "alpha", "tau")


def print_log(cell: BenchCell, number: int, batch: Sequence[BenchPrompt], run: Timed) -> None:
    """A line of the log: one call."""
    names = ", ".join(f"{prompt.id} ({prompt.category})" for prompt in batch)
    speed = f"{run.emitted / run.seconds:.1f} tokens/s"
    measured = f"{run.emitted} tokens in {run.seconds:.3f} s, {speed}"
    remark(f"round {number + 1}: {names}: {cell.id}: {measured}", err=False)


def print_results(whole: Mapping, folder: Path) -> None:
    """A table and the verdict of each setting, and what the files are."""
    suite = whole.get("suite")
    for number, verdict in enumerate(whole["verdicts"]):
        of_setting = [cell for cell in whole["cells"] if all(cell[name] == verdict[name] for name in _SETTING)]
        if suite is None:
            print_table(COLUMNS, [_row(cell) for cell in of_setting])
        else:
            print_suite(suite["tables"][number]["rows"])
        remark(verdict["words"], "bold", err=False)
    remark("Medians of the rounds, ratios with the interval that has their median. docs/bench.md", err=False)
    remark(RATIOS, err=False)
    if suite is not None:
        remark(f"{suite['name']}, prompts by {suite['prompts']}. {SUITE_WORDS}", err=False)
        if suite["unasked"]:
            ended = f"{len(suite['unasked'])} questions ended before their last turn: {', '.join(suite['unasked'][:5])}"
            remark(f"{ended}{', ...' if len(suite['unasked']) > 5 else ''}; no position was left", err=False)
    greedy = whole["greedy"]
    if greedy["equal"] is not None:
        remark(f"greedy texts of specdec and transformers equal: {'yes' if greedy['equal'] else 'no'}", err=False)
    for d in greedy["differences"]:
        gap = "" if d["gap"] is None else f", gap {d['gap']:.3g}, rounding allows {d['bound']:.3g}"
        turn = f", turn {d['turn']}" if "turn" in d else ""
        at = f"prompt {d['prompt_id']}{turn}, new token {d['position']}"
        remark(f"{d['verdict']}: {d['methods'][1]}, {at}{gap}", err=False)
    more = "" if suite is None else ", answers/ (for specdec report)"
    remark(f"{folder}: results.json, results.csv, log.csv (every call), rounds.jsonl{more}", err=False)


_SETTING = ("temperature", "batch", "top_k", "top_p", "min_p")


def _row(cell: Mapping) -> tuple[str, ...]:
    speed, gains = cell["tokens_per_second"], cell["speedup"]
    return (
        cell["id"],
        f"{speed['median']:.1f} ({speed['min']:.1f}–{speed['max']:.1f})",
        *(gain(gains[name]) for name in ("over_plain", "over_transformers")),
        _milliseconds(cell["time_to_first_token"]),
        _milliseconds(cell["time_per_output_token"]),
        *("–" if cell[name] is None else f"{cell[name]:.2f}" for name in ("alpha", "tau")),
    )


def _milliseconds(seconds: Mapping | None) -> str:
    return "–" if seconds is None else f"{1000 * seconds['median']:.1f}"

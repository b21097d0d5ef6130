"""How ``specdec bench --suite`` and ``specdec report`` print the table of a suite."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from .terminal import print_table

SUITE_WORDS = "MAT: mean accepted tokens, those that a step emits. Speeds are means over questions."


def print_suite(rows: Sequence[Mapping]) -> None:
    """One row for each group and method."""
    baselines = [name.removeprefix("over_") for name in rows[0]["speedup"]]
    columns = ("group", "questions", "method", "MAT", "tokens/s", *(f"times {name}" for name in baselines))
    print_table(
        (*columns, "equal texts"), [_row(row, before) for before, row in zip([None, *rows], rows, strict=False)]
    )


def gain(of: Mapping) -> str:
    low, high = of["interval"]
    return f"{of['median']:.2f} ({low:.2f}–{high:.2f})"


def _row(row: Mapping, before: Mapping | None) -> tuple[str, ...]:
    speed, begins = row["tokens_per_second"], before is None or before["group"] != row["group"]
    return (
        *((row["group"], str(row["questions"])) if begins else ("", "")),
        row["method"],
        "–" if row["mean_accepted"] is None else f"{row['mean_accepted']:.2f}",
        f"{speed['median']:.1f} ({speed['min']:.1f}–{speed['max']:.1f})",
        *(gain(of) if of["rounds"] > 1 else f"{of['median']:.2f}" for of in row["speedup"].values()),
        "–" if row["equal"] is None else f"{row['equal']} of {row['questions']}",
    )

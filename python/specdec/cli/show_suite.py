"""How ``specdec bench --suite``, with --url or not, and ``specdec report`` print the table of a suite."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from .terminal import print_table, remark

SUITE_WORDS = "MAT: mean accepted tokens, those that a step emits. Speeds are means over questions."


def print_suite(rows: Sequence[Mapping]) -> None:
    """One row for each group and method."""
    baselines = [name.removeprefix("over_") for name in rows[0]["speedup"]]
    columns = ("group", "questions", "method", "MAT", "tokens/s", *(f"times {name}" for name in baselines))
    print_table(
        (*columns, "equal texts"), [_row(row, before) for before, row in zip([None, *rows], rows, strict=False)]
    )


def print_served(whole: Mapping) -> None:
    """The table of somebody's server, one row for each group, and what has to be known of it."""
    columns = ("group", "questions", "MAT", "accepted", "tokens/s", "first token\nms", "99 % of them\nms")
    print_table(columns, [_served_row(row) for row in whole["rows"]])
    remark(f"{whole['suite']['name']}, {whole['grid']['url']}, {whole['grid']['model']}. {SUITE_WORDS}", err=False)
    if whole["rows"][-1]["mean_accepted"] is None:
        remark("the server tells nothing of drafts, neither in its answers nor in /metrics", err=False)
    if whole["unasked"]:
        ended = f"{len(whole['unasked'])} questions ended before their last turn, which the server refused"
        remark(f"{ended}: {', '.join(whole['unasked'][:5])}{', ...' if len(whole['unasked']) > 5 else ''}", err=False)


def _served_row(row: Mapping) -> tuple[str, ...]:
    speed, first, rate = row["tokens_per_second"], row["time_to_first_token"], row["acceptance_rate"]
    return (
        row["group"],
        str(row["questions"]),
        "–" if row["mean_accepted"] is None else f"{row['mean_accepted']:.2f}",
        "–" if rate is None else f"{100 * rate:.0f} %",
        f"{speed['median']:.1f} ({speed['min']:.1f}–{speed['max']:.1f})",
        f"{1000 * first['median']:.0f}",
        f"{1000 * first['p99']:.0f}",
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

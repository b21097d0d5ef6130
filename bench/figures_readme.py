"""The table of the README: a line for what most users ask about first."""

from __future__ import annotations

from collections.abc import Callable

from figures import Missing, Results, machine, milliseconds, not_measured, number, page, spread, table, times_faster
from figures_bench import compiled_row, images, readme_rows
from figures_decoding import of_part
from figures_kernels import accepted

STEPS = (  # the result, B, K, V, drafts; most machines have AVX2
    ("speculative_step.avx2", 1, 5, 128256, "typical"),
)
Row = tuple[str, str, str]


def readme(results: Results) -> str:
    """The pictures of `specdec bench`, where it was measured, and the table."""
    head = ("measured", "against", "times as fast (quartiles)")
    lines: list[Row] = []
    single = (compiled_row, _wide, *(_step(*case) for case in STEPS), _filters)
    for rows in (readme_rows, *map(_one, single)):
        try:
            lines += rows(results)
        except Missing as missing:
            lines.append((not_measured(missing), "", ""))
    try:
        above = [images(results)]
    except Missing:
        above = []
    return page(*above, table(head, lines), machine(results))


def _one(row: Callable[[Results], Row]) -> Callable[[Results], list[Row]]:
    return lambda results: [row(results)]


def _wide(results: Results) -> Row:
    rows = [r for r in of_part(results["throughput"], "rows") if r["temperature"] == 0]
    most = max(r["rows"] for r in rows)
    plain, ours = (next(r for r in rows if (r["rows"], r["method"]) == (most, m)) for m in ("plain", "K adapts"))
    speeds = [number(r["tokens_per_second"]["median"]) for r in (ours, plain)]
    return (
        f"the same pair, {most} rows of a `Scheduler`, K adapts: {speeds[0]} tokens/s",
        f"plain decoding by the same: {speeds[1]} tokens/s",
        spread(ours["times_plain"]),
    )


def _step(name: str, B: int, K: int, V: int, drafts: str) -> Callable[[Results], Row]:
    def row(results: Results) -> Row:
        wanted = (B, K, V, drafts)
        found = next(r for r in results[name]["rows"] if (r["B"], r["K"], r["V"], r["drafts"]) == wanted)
        isa = results[name]["instruction_set"].upper() if "." in name else ""
        shape = f"`speculative_step`{f' with {isa}' if isa else ''}, B = {B}, K = {K}, V = {V}, {accepted(found)}"
        ratio = spread(times_faster(found["ratios"]["cpu/transformers"]))
        return f"{shape}: {milliseconds(found['seconds']['cpu'])}", "transformers' `_speculative_sampling`", ratio

    return row


def _filters(results: Results) -> Row:
    row = next(r for r in results["settings"]["rows"] if r["drafts"] == "typical")
    case = "token top_k+top_p"
    ratio = spread(times_faster(row["ratios"][f"cpu {case}/transformers {case}"]))
    shape = f"B = {row['B']}, K = {row['K']}, V = {row['V']}, top-k 50 and top-p 0.95"
    return (
        f"{shape}: {milliseconds(row['seconds'][f'cpu {case}'])}",
        "transformers' processors and `_speculative_sampling`",
        ratio,
    )

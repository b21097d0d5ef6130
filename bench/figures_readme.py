"""The table of the README: a line for what most users ask about first."""

from __future__ import annotations

from collections.abc import Callable

from figures import Missing, Results, machine, milliseconds, not_measured, number, page, spread, table, times_faster
from figures_decoding import by_round, of_part
from figures_kernels import accepted

STEPS = (  # the result, B, K, V, drafts; most machines have AVX2
    ("speculative_step.avx2", 1, 5, 128256, "typical"),
    ("speculative_step.avx2", 8, 5, 128256, "typical"),
    ("speculative_step.avx2", 1, 8, 32000, "all_accepted"),
)
Row = tuple[str, str, str]


def readme(results: Results) -> str:
    head = ("measured", "against", "times as fast (quartiles)")
    lines = []
    for row in (
        *(_compared(other) for other in ("plain", "assisted")),
        _wide,
        *(_step(*case) for case in STEPS),
        _filters,
    ):
        try:
            lines.append(row(results))
        except Missing as missing:
            lines.append((not_measured(missing), "", ""))
    return page(table(head, lines), machine(results))


def _compared(other: str) -> Callable[[Results], Row]:
    names = {"plain": "transformers' `generate`", "assisted": "transformers' assisted generation"}

    def row(results: Results) -> Row:
        r = results["compare"]
        by_name = {m["name"]: m for m in r["methods"]}
        ours, theirs = by_name["specdec"], by_name[other]
        measured = (
            f"embedded pair, greedy, {_drafts(ours['num_drafts'])}: {number(ours['tokens_per_second'])} tokens/s"
            if other == "plain"
            else "the same"
        )
        return measured, f"{names[other]}: {number(theirs['tokens_per_second'])} tokens/s", by_round(r, other)

    return row


def _drafts(num_drafts: int | str) -> str:
    return "K adapts" if num_drafts == "auto" else f"K = {num_drafts}"


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

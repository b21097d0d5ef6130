"""The figures that choose from several results: the README's table, and those of docs/worth_it.md."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import figures_decoding as decoding
from figures import (
    STALE,
    hardware,
    made,
    mark,
    milliseconds,
    not_measured,
    number,
    page,
    software,
    source,
    spread,
    table,
    times_faster,
)
from figures_decoding import by_width, model_of_bench, temperature, texts_of_bench, texts_of_race, two
from figures_kernels import accepted
from figures_real import greedy_in_short
from results import Missing, Results
from specdec.evaluation.report import read_results
from specdec.evaluation.report.results import ASSISTED, PLAIN, TRANSFORMERS

AGAINST = {
    TRANSFORMERS: "transformers' `generate`",
    PLAIN: "plain decoding by specdec",
    ASSISTED: "transformers' assisted generation by prompt lookup",
}
STEP = (1, 5, 128256, "typical")  # B, K, V and drafts of the README's row of speculative_step
ROWS = 16  # of the README's row of a scheduler
Row = tuple[str, str, str]  # what was measured, against what, how many times as fast


def readme(results: Results) -> str:
    """The pictures of `specdec bench`, where it was measured, the table, each row of which says where its own numbers
    come from, and whether greedy texts are plain decoding's."""
    lines: list[tuple[str, ...]] = []
    shown: list[str] = []
    for name, rows in README_ROWS.items():
        try:
            on = f"{hardware(results[name])}; `{name}`, {made(results[name])}"
            lines += [
                (measured, against, f"{times}{mark(results, name)}", on) for measured, against, times in rows(results)
            ]
            shown.append(name)
        except Missing as missing:
            lines.append((not_measured(missing), "", "", ""))
    said = [f"{'; '.join(dict.fromkeys(software(results[name]) for name in shown))}."] if shown else []
    said += [STALE] if any(map(results.is_stale, shown)) else []
    head = ("measured", "against", "times as fast (quartiles)", "on")
    try:
        said = [greedy_in_short(results), *said]
    except Missing as missing:
        said = [f"Greedy texts: {not_measured(missing)}", *said]
    return page(decoding.images(results) if decoding.PICTURED in shown else "", table(head, lines), " ".join(said))


def _smollm2(results: Results) -> Iterable[Row]:
    """The fastest method beside both baselines and transformers' assisted generation, and the fastest of sampled
    texts beside the first of them."""
    r = results["smollm2"]
    best, others = decoding.fastest(r)
    texts = f"one text at a time ({texts_of_bench(r)}; {best.rounds} rounds)"
    measured = f"{model_of_bench(r)} without a draft, greedy, {texts}, {best.name}: {decoding.speed(best)}"
    for method, name in AGAINST.items():
        yield measured, f"{name}: {decoding.speed(others[method])}", decoding.faster(r, best, others[method])
        measured = "the same"
    best, others = decoding.fastest(r, decoding.SAMPLED)
    against = f"{AGAINST[TRANSFORMERS]}: {decoding.speed(others[TRANSFORMERS])}"
    measured = f"the same at temperature 1, {best.name}: {decoding.speed(best)}"
    yield measured, against, decoding.faster(r, best, others[TRANSFORMERS])


def _rivals(results: Results) -> Iterable[Row]:
    """Plain decoding, and the best with drafts beside llama.cpp's best, by kinds of weights."""
    r = results["rivals"]
    speeds: dict[str, dict[str, dict]] = {}
    for row in r["rows"]:
        speeds.setdefault(row["weights"], {})[row["method"]] = row

    def median(row: dict, key: str = "tokens_per_second") -> float:
        return row[key]["median"]

    def words(rows: Iterable[dict], key: str = "tokens_per_second") -> str:
        return ", ".join(number(median(row, key)) for row in rows)

    plain = [of["specdec"] for of in speeds.values()]
    best = [max((row for way, row in of.items() if way.startswith("specdec,")), key=median) for of in speeds.values()]
    theirs = [max((row for way, row in of.items() if way.startswith("llama")), key=median) for of in speeds.values()]
    measured = f"{r['target']} on a CPU, weights of {', '.join(speeds)}: {words(plain)} tokens/s, with its best drafts"
    against = f"llama.cpp, plain or with drafts: {words(theirs)} tokens/s"
    yield f"{measured} {words(best)}", against, words(best, "over_its_best")


def _rows(results: Results) -> Iterable[Row]:
    row = next(r for r in results["lengths"]["rows"] if (r["rows"], r["temperature"]) == (ROWS, 0.0))
    ours, plain = (row["methods"][name] for name in ("model, auto", "plain"))
    speeds = [number(m["tokens_per_second"]["median"]) for m in (ours, plain)]
    measured = f"embedded pair, {ROWS} texts at a time by a `Scheduler` ({texts_of_race(row)}), K adapts"
    against = f"plain decoding by the same: {speeds[1]} tokens/s"
    yield f"{measured}: {speeds[0]} tokens/s", against, spread(ours["times_plain"])


def _step(results: Results) -> Iterable[Row]:
    B, K, V, drafts = STEP
    rows = results["speculative_step"]["rows"]
    row = next(r for r in rows if (r["B"], r["K"], r["V"], r["drafts"]) == STEP)
    measured = f"`speculative_step`, B = {B}, K = {K}, V = {V}, {accepted(row)}"
    times = spread(times_faster(row["ratios"]["cpu/transformers"]))
    yield f"{measured}: {milliseconds(row['seconds']['cpu'])}", "transformers' `_speculative_sampling`", times


README_ROWS: dict[str, Callable[[Results], Iterable[Row]]] = {  # at most seven rows, by result
    "smollm2": _smollm2,
    "rivals": _rivals,
    "lengths": _rows,
    "speculative_step": _step,
}


# ---- docs/worth_it.md


def worth_drafts(results: Results) -> str:
    """What a step of each method of ``specdec bench`` costs, in plain steps, and what it emits. Prompts are left out,
    as drafts do not read them faster."""
    cells = read_results(results["bench"]).by_setting()[decoding.README]
    plain = next(c for c in cells if c.series.method == PLAIN).step_seconds
    rows = []
    for c in cells:
        seconds = c.step_seconds
        if c.is_baseline or c.series.method == ASSISTED or not (seconds and plain and c.tau):
            continue
        cost, over = seconds / plain, decoding.quartiles(c.over_plain)
        rows.append((c.name, two(c.alpha), two(c.tau), number(cost), number(c.tau / cost), over))
    head = ("greedy, one text at a time", "alpha", "tokens a step (tau)", "a step costs", "tau / cost", "times plain")
    said = (
        f"{texts_of_bench(results['bench'])}. *Times plain* has the prompts in it, which are read as fast without "
        f"drafts. {source(results, 'bench')}"
    )
    return page(table(head, rows, mark(results, "bench")), said)


def worth_costs(results: Results) -> str:
    """What a step with K drafts costs by the number of rows, as the decoder learned it."""
    r = results["lengths"]
    greedy = sorted((row for row in r["rows"] if row["temperature"] == 0), key=lambda row: row["rows"])
    costs = {row["rows"]: row["methods"]["model, auto"]["step_costs"] for row in greedy}
    found = {count: some for count, some in costs.items() if some}
    most = max(map(len, found.values()), default=0)
    lines = [(str(count), *(f"{cost:.2f}" for cost in some)) for count, some in found.items()]
    head = ["texts at a time", *(f"K = {k}" for k in range(most))]
    return page(table(head, lines, mark(results, "lengths")), f"The draft model. {source(results, 'lengths')}")


def worth_rows(results: Results) -> str:
    """Times plain decoding by the number of texts at a time, for a draft model, and for one that is never right."""
    r = results["lengths"]
    cells = {(row["temperature"], row["rows"]): row["methods"] for row in r["rows"]}
    temperatures, counts = (sorted({key[i] for key in cells}) for i in (0, 1))
    shown = [(t, "model", k) for t in temperatures for k in by_width(cells[t, counts[0]], "model")]
    shown += [(temperatures[0], "never right", "K adapts")]
    head = ["texts at a time", *(f"{temperature(t)}: {k}" for t, drafter, k in shown if drafter == "model")]
    head += ["greedy, a draft that is never right: K adapts"]
    lines = [[str(n), *(number(by_width(cells[t, n], drafter)[k]) for t, drafter, k in shown)] for n in counts]
    said = f"Times plain decoding of as many texts, rule `{r['rule']}`: {texts_of_race(r['rows'][0])}. "
    return page(table(head, lines, mark(results, "lengths")), said + source(results, "lengths"))

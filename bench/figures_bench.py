"""The figures of `specdec bench`: tables, and the pictures that tools/bench_pictures.py draws of the same result."""

from __future__ import annotations

from figures import Results, number, page, source, spread, table
from measure import ratios
from specdec.evaluation.report import fastest_of_each, read_results, sections_of
from specdec.evaluation.report.plot import Plot
from specdec.evaluation.report.results import ASSISTED, PLAIN, TRANSFORMERS, CellResult, Quartiles, Setting

NAME, COMPILED = "bench", "bench.compiled"
AGAINST = {
    TRANSFORMERS: "transformers' `generate`",
    PLAIN: "plain decoding by specdec",
    ASSISTED: "transformers' assisted generation",
}
README = Setting(0.0, 1, None, None, None)  # greedy, one sequence at a time: what the README has pictures and lines of
PICTURES = {"speed.svg": f"speed-{README.file_name}", "speedup_by_k.svg": f"lengths-{README.file_name}"}  # in docs/


def bench(results: Results) -> str:
    """Every method at its fastest K, by setting, and the verdicts."""
    read = read_results(results[NAME])
    head = ("", "tokens/s", "times plain", "times transformers", "alpha", "tau")
    parts = []
    for setting, cells in read.by_setting().items():
        rows = [
            (c.name, _spread(c.speed), _spread(c.over_plain), _spread(c.over_transformers), _two(c.alpha), _two(c.tau))
            for c in fastest_of_each(cells)
        ]
        parts += [f"{setting.words[0].upper()}{setting.words[1:]}:", table(head, rows)]
    verdicts = "; ".join(verdict.words for verdict in read.verdicts if verdict.words)
    return page(*parts, f"Verdicts: {verdicts}. {source(NAME, results[NAME])}")


def pictures(results: Results) -> dict[str, Plot]:
    """The README's, by the names of their files."""
    plots = {plot.name: plot for section in sections_of(read_results(results[NAME])) for plot in section.plots}
    return {file: plots[name] for file, name in PICTURES.items()}


def images(results: Results) -> str:
    """The README's line with its pictures, whose texts are those of the report."""
    return " ".join(f"![{plot.title}. {plot.says}](docs/{file})" for file, plot in pictures(results).items())


def readme_rows(results: Results) -> list[tuple[str, str, str]]:
    """The fastest method beside both baselines, and beside transformers' assisted generation."""
    cells = fastest_of_each(read_results(results[NAME]).by_setting()[README])
    best = next(c for c in cells if not c.is_baseline and c.series.method != ASSISTED)
    others = {c.series.method: c for c in cells}
    measured, rows = f"embedded pair, greedy, {best.name}: {_speed(best)}", []
    for method, name in AGAINST.items():
        rows.append((measured, f"{name}: {_speed(others[method])}", _faster(results[NAME], best, others[method])))
        measured = "the same"
    return rows


def compiled_row(results: Results) -> tuple[str, str, str]:
    """The fastest method with torch.compile beside plain decoding, which is compiled as well."""
    cells = fastest_of_each(read_results(results[COMPILED]).by_setting()[README])
    best = next(c for c in cells if not c.is_baseline and c.series.method != ASSISTED)
    plain = next(c for c in cells if c.series.method == PLAIN)
    measured = f"with `--compile`, {best.name}: {_speed(best)}"
    return measured, f"the same without drafts: {_speed(plain)}", _faster(results[COMPILED], best, plain)


def _faster(result: dict, best: CellResult, other: CellResult) -> str:
    """How many times as fast, round by round."""
    by_id = {cell["id"]: [r["tokens_per_second"] for r in cell["rounds"]] for cell in result["cells"]}
    return spread(ratios(by_id[best.id], by_id[other.id]))


def _speed(cell: CellResult) -> str:
    assert cell.speed is not None
    return f"{number(cell.speed.median)} tokens/s"


def _spread(of: Quartiles | None) -> str:
    return "" if of is None else spread({"median": of.median, "q1": of.low, "q3": of.high})


def _two(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"

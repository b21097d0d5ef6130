"""The figures of scaling: fitted exponents, and the roofline model's errors."""

from __future__ import annotations

from figures import Results, number, page, source, table


def scaling(results: Results) -> str:
    r = results["scaling"]
    head = ["time of", "against", "at", "from", "to", "exponent (95 %)", "floor", "error of the fit"]
    rows = []
    for row in (row for row in r["rows"] if "fit" in row):
        fit, points = row["fit"], row["points"]
        first, last = (
            f"{number(1e3 * points[x]['median'])} ms at {int(x):,}"
            for x in (min(points, key=int), max(points, key=int))
        )
        interval = "" if fit["interval"] is None else f" ({fit['interval'][0]:.2f} to {fit['interval'][1]:.2f})"
        floor = f"{number(1e3 * fit['floor'])} ms" if fit["floor"] else "none"
        exponent = f"{fit['exponent']:.2f}{interval}"
        about = [f"`{row['of']}`" if "_" in row["of"] else row["of"], row["against"], row["fixed"]]
        rows.append([*about, first, last, exponent, floor, f"{100 * fit['error']:.0f} %"])
    said = (
        "Medians of rounds in which the points of a curve take turns. The fit is b x^n, or a + b x^n where a floor a is "
        f"plain, by least squares of logarithms. {source('scaling', r)}"
    )
    return page(table(head, rows), said)


def roofline(results: Results) -> str:
    r = results["scaling"]
    rows = []
    for row in (row for row in r["rows"] if row["part"] == "roofline"):
        for what, measured in row["measured"].items():
            scale, unit = (1.0, "") if what == "speed-up" else (1e3, " ms")
            cells = [f"{number(scale * value)}{unit}" for value in (measured, row["predicted"][what])]
            rows.append(
                [f"{row['pair']}, alpha {row['alpha']:.2f}", what, *cells, f"{100 * row['error'][what]:+.0f} %"]
            )
    said = f"K = 4, greedy, context 64, B = 1. The machine's rates were measured between the rounds. {source('scaling', r)}"
    return page(table(["pair", "", "measured", "predicted", "error"], rows), said)

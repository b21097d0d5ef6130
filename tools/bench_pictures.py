"""Draws the README's two pictures of `specdec bench`, docs/speed.svg and docs/speed_by_kind.svg, as `specdec report`
draws them, from the result that `python bench/headline.py smollm2` makes. Needs matplotlib.

    python tools/bench_pictures.py
"""

from __future__ import annotations

import argparse
from pathlib import Path

from specdec.evaluation.report import load_results, read_results, sections_of

ROOT = Path(__file__).resolve().parents[1]
RESULT = ROOT / "bench" / "results" / "cpu" / "smollm2.json"
PICTURES = {"speed.svg": "speed-t0-b1", "speed_by_kind.svg": "kinds-t0-b1"}  # greedy, one text at a time


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--result", type=Path, default=RESULT)
    parser.add_argument("--out", type=Path, default=ROOT / "docs")
    args = parser.parse_args()
    results = read_results(load_results(args.result))
    plots = {plot.name: plot for section in sections_of(results) for plot in section.plots}
    for name, plot in PICTURES.items():
        (args.out / name).write_bytes(plots[plot].file("svg", results.machine))
        print(args.out / name)


if __name__ == "__main__":
    main()

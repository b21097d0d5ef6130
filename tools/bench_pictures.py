"""Draws the README's two pictures of `specdec bench`, docs/speed.svg and docs/speed_by_kind.svg, from
bench/results/cpu/smollm2.json, which `python bench/regenerate.py smollm2` makes. Needs matplotlib.

    python tools/bench_pictures.py
"""

from __future__ import annotations

import argparse
import hashlib
import sys
from pathlib import Path

from specdec.evaluation.report import read_results

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT / "bench"))  # whose files are scripts, not a package

from figures_decoding import PICTURED, pictures  # noqa: E402
from results import FOLDER, Missing, Results  # noqa: E402


def draw(folder: Path, out: Path) -> list[Path]:
    """Writes the pictures of the result in ``folder`` to ``out``. Each says in a comment which result it shows.

    Raises:
        Missing: there is no whole result.
    """
    results = Results(folder)
    drawn, files = pictures(results), []
    for name, plot in drawn.items():
        svg = plot.file("svg", read_results(results[PICTURED]).machine)
        files.append(out / name)
        files[-1].write_bytes(svg + f"<!-- {digest(folder)} -->\n".encode())
    return files


def digest(folder: Path) -> str:
    """Of the result's file."""
    return f"{PICTURED}.json, SHA-256 {hashlib.sha256((folder / f'{PICTURED}.json').read_bytes()).hexdigest()}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=FOLDER, help="their folder")
    parser.add_argument("--out", type=Path, default=ROOT / "docs")
    args = parser.parse_args()
    try:
        for path in draw(args.results, args.out):
            print(path)
    except Missing:
        parser.error(f"{args.results / PICTURED}.json: not there or not whole: python bench/regenerate.py {PICTURED}")


if __name__ == "__main__":
    main()

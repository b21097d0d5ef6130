"""Writes the figures of the README and of the docs: all that stands between two marks comes out of results/.

    python bench/tables.py             # which pages say something else; exit code 1 if there are any
    python bench/tables.py --write     # mends them

A page has ``<!-- begin: NAME -->`` and ``<!-- end -->``, where NAME is one of FIGURES. ``regenerate.py`` makes results.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import figures_decoding as decoding
import figures_kernels as kernels
import figures_worth as worth
import typer
from figures import Missing, Results, machine, not_measured
from figures_bench import bench
from figures_readme import readme
from figures_scaling import roofline, scaling
from regenerate import FOLDER, ROOT
from rich.console import Console

PAGES = ("README.md", "bench/README.md", "docs/verify.md", "docs/cuda.md", "docs/worth_it.md", "docs/training.md")
BLOCK = re.compile(r"(<!-- begin: (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)


FIGURES: dict[str, Callable[[Results], str]] = {
    "machine": machine,
    "readme": readme,
    "bench": bench,
    "compare": decoding.compare("compare"),
    "compare.compiled": decoding.compare("compare.compiled"),
    "drafters": decoding.drafters,
    "heads": decoding.heads,
    "throughput": decoding.throughput,
    "lengths": decoding.lengths,
    "load_aware": decoding.load_aware,
    "server": decoding.server,
    "server_latency": decoding.server_latency,
    "admission": decoding.admission,
    "memory": decoding.memory,
    "rules": decoding.rules,
    "advise": decoding.advised,
    "distill": decoding.distilled,
    "better_draft": decoding.better_draft,
    "speculative_step": kernels.steps("speculative_step"),
    "speculative_step.avx2": kernels.steps("speculative_step.avx2"),
    "settings": kernels.settings,
    "draft_step": kernels.drafts,
    "machine_code": kernels.instructions,
    "predicted_steps": kernels.predicted_steps,
    "verification": decoding.verification,
    "worth_drafts": worth.drafts,
    "worth_costs": worth.step_costs,
    "worth_rows": worth.rows,
    "scaling": scaling,
    "roofline": roofline,
}


# ---- The pages


def text_of(name: str, results: Results) -> str:
    """A figure's text. Of a result that does not exist it says which command makes it.

    Raises:
        ValueError: there is no such figure.
    """
    figure: Callable[[Results], str] | None = FIGURES.get(name)
    if figure is None:
        raise ValueError(f"figure: got {name!r}, allowed: {', '.join(FIGURES)}")
    try:
        return figure(results).strip()
    except Missing as missing:
        return not_measured(missing)


def filled(page: str, results: Results) -> str:
    """The page with the text of every figure between its marks."""
    return BLOCK.sub(lambda block: f"{block[1]}{text_of(block[2], results)}\n{block[3]}", page)


def main(
    write: Annotated[bool, typer.Option("--write", help="into the pages")] = False,
    folder: Annotated[Path, typer.Option(help="where the results are")] = FOLDER,
) -> None:
    """Compares the pages' figures with the results that they are made of, or writes them."""
    results, old = Results(folder), []
    for path in (ROOT / name for name in PAGES):
        page = path.read_text(encoding="utf-8")
        if (new := filled(page, results)) != page:
            old.append(path)
            if write:
                path.write_text(new, encoding="utf-8")
    for path in old:
        Console(stderr=True).print(f"{path.relative_to(ROOT)}: {'written' if write else 'not what the results say'}")
    raise typer.Exit(int(bool(old) and not write))


if __name__ == "__main__":
    typer.run(main)

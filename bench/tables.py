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

import figures_cluster as cluster
import figures_decoding as decoding
import figures_kernels as kernels
import figures_pages as pages
import figures_real as real
import typer
from figures import not_measured
from report import ROOT
from results import FOLDER, Missing, Results
from rich.console import Console

BLOCK = re.compile(r"(<!-- begin: (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)
FIGURES: dict[str, Callable[[Results], str]] = {
    "readme": pages.readme,
    "smollm2": decoding.bench("smollm2"),
    "smollm2.bfloat16": decoding.bench("smollm2.bfloat16"),
    "real_drafts": decoding.bench("real_drafts"),
    "gemma3": decoding.bench("gemma3"),
    "greedy_texts": real.greedy_texts,
    "rivals": real.rivals("rivals"),
    "rivals.avx2": real.rivals("rivals.avx2"),
    "rivals.gemma3": real.rivals("rivals.gemma3"),
    "contention": real.contention,
    "loading": real.loading,
    "cpu_step": real.cpu_step,
    "perplexity": real.perplexity,
    "prefixes": real.prefixes,
    "grammar": real.grammar,
    "clients": real.clients,
    "bench": decoding.bench("bench"),
    "bench.heads": decoding.bench("bench.heads"),
    "bench.rules": decoding.bench("bench.rules", every_k=True),
    "compare": decoding.compare("compare"),
    "lengths": decoding.lengths,
    "load_aware": decoding.load_aware,
    "verification": decoding.verification,
    "verify.smollm2": real.verified("verify.smollm2"),
    "speculative_step": kernels.steps("speculative_step"),
    "speculative_step.avx2": kernels.steps("speculative_step.avx2", (128256,)),
    "settings": kernels.settings,
    "goals": kernels.goals,
    "decode": decoding.on_a_gpu,
    "draft_step": kernels.drafts,
    "recurrent": kernels.recurrent("recurrent"),
    "recurrent.avx2": kernels.recurrent("recurrent.avx2"),
    "recurrent.two_threads": kernels.recurrent("recurrent.two_threads"),
    "cluster_check": cluster.check,
    "cluster_gpus": cluster.gpus,
    "worth_drafts": pages.worth_drafts,
    "worth_costs": pages.worth_costs,
    "worth_rows": pages.worth_rows,
}


def pages_with_figures() -> list[Path]:
    """Every page that has marks."""
    every = (*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), ROOT / "bench" / "README.md")
    return [page for page in sorted(every) if "<!-- begin: " in page.read_text(encoding="utf-8")]


def text_of(name: str, results: Results) -> str:
    """A figure's text. Of a result that does not exist it says which command makes it.

    Raises:
        ValueError: there is no such figure.
    """
    if name not in FIGURES:
        raise ValueError(f"figure: got {name!r}, allowed: {', '.join(FIGURES)}")
    try:
        return FIGURES[name](results).strip()
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
    for path in pages_with_figures():
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

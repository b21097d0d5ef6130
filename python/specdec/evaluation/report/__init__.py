"""The report on the results of ``specdec bench``: a page of HTML on its own, and pictures as files.

matplotlib draws them, and is imported when it is needed. Nothing here imports torch."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ...checks import refuse
from ...files import write_whole
from .html_page import html_page
from .kinds import kinds
from .lengths import lengths
from .plot import Section
from .results import BenchResults, load_results, read_results
from .speeds import fastest_of_each, speeds

__all__ = [
    "FORMATS",
    "check_matplotlib",
    "fastest_of_each",
    "load_results",
    "read_results",
    "sections_of",
    "write_report",
]

FORMATS = ("png", "svg")


def check_matplotlib() -> None:
    """Raises ValueError, which says how to install it, where matplotlib is missing."""
    if importlib.util.find_spec("matplotlib") is None:
        refuse("report", "no matplotlib", "it after pip install 'specdec-kernels[bench]'")


def sections_of(results: BenchResults) -> list[Section]:
    """All pictures, in the order of the page."""
    return [speeds(results), lengths(results), kinds(results)]


def write_report(results: Mapping[str, Any], folder: str | Path, formats: Sequence[str] = FORMATS) -> list[Path]:
    """Writes ``report.html`` and ``plots/NAME.png`` and ``.svg``. A file that exists is replaced, and whoever reads it
    meanwhile reads the old one. Equal results give equal files, with the same version of matplotlib.

    Args:
        results: the JSON of ``specdec bench``.
        folder: made where it is missing.
        formats: of the pictures' files, among FORMATS; none: only the page, which has its pictures inside.

    Returns:
        The files, the page first.

    Raises:
        ValueError: ``results`` is of another format, a format is not known, or matplotlib is missing.
        OSError: a file cannot be written.
    """
    if unknown := [form for form in formats if form not in FORMATS]:
        refuse("formats", repr(unknown[0]), ", ".join(FORMATS))
    read, folder = read_results(results), Path(folder)
    check_matplotlib()
    sections = sections_of(read)
    files: dict[Path, str | bytes] = {folder / "report.html": html_page(read, sections)}
    for plot in (plot for section in sections for plot in section.plots):
        for form in dict.fromkeys(formats):
            files[folder / "plots" / f"{plot.name}.{form}"] = plot.file(form, read.machine)
    for path, content in files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, content)
    return list(files)

"""``specdec report``: the pictures of a run of ``specdec bench``, or a table of several answer files of a suite."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from .option_groups import command, option
from .options import as_json
from .show_suite import SUITE_WORDS, print_suite
from .terminal import remark
from .user_errors import refuse

FORMATS = "png,svg"
ANSWERS = ".jsonl"  # how the names of answer files end


@dataclass(frozen=True)
class ReportOptions:
    """The report"""

    output: Path | None = option(None, "Where the report goes. Default: beside the results.", metavar="FOLDER")
    formats: str | None = option(
        None, f"Of the pictures' files, separated by commas; none: only the page. Default: {FORMATS}.", "--format"
    )


@dataclass(frozen=True)
class AnswerOptions:
    """Answer files"""

    baseline: Path | None = option(
        None, "The answer file that others are compared with. Default: the first one.", metavar=f"FILE{ANSWERS}"
    )
    as_json: bool = as_json("Print the table as JSON.")


@command
def report(
    asked: ReportOptions,
    of_answers: AnswerOptions,
    results: Annotated[
        list[Path],
        typer.Argument(
            metavar="FOLDER|FILE...",
            help="What `specdec bench` wrote: its folder, or results.json; or answer files, "
            f"FILE{ANSWERS} ...: its own of a suite, and those of Spec-Bench.",
        ),
    ],
) -> None:
    """Writes report.html, a page that needs no other file and no network, and its pictures in plots/, from the results
    of `specdec bench`. Prints the names of the files. Needs matplotlib (pip install 'specdec-kernels[bench]').

    Of answer files it prints a table instead: mean accepted tokens, tokens per second, speed-up over a baseline, and
    how many questions have its texts, by groups of questions.
    """
    files = [path for path in results if path.suffix == ANSWERS]
    if files and len(files) == len(results):
        _refuse_other(asked, f"with answer files, FILE{ANSWERS}", "without: they become a table")
        _print_answers(results, of_answers)
        return
    _refuse_other(of_answers, "with results of specdec bench", f"with answer files, FILE{ANSWERS} ...")
    if len(results) > 1:
        refuse(
            "FOLDER|FILE", ", ".join(map(str, results)), f"one folder or results.json, or only answer files {ANSWERS}"
        )
    from ..evaluation.report import load_results

    (path,) = results
    content = load_results(path)
    folder = asked.output or (path if path.is_dir() else path.parent)
    for written in write(content, folder, asked.formats or FORMATS):
        typer.echo(written)


def write(results: Mapping[str, Any], folder: Path, formats: str = FORMATS) -> list[Path]:
    """Writes the report of results that are known already; a disk that is full ends the command with a message."""
    from ..evaluation.report import write_report

    named = [] if formats == "none" else [name.strip() for name in formats.split(",")]
    try:
        return write_report(results, folder, named)
    except OSError as error:
        remark(f"Error: the report cannot be written to {folder}: {error.strerror or error}", "red")
        raise typer.Exit(1) from error


def _refuse_other(options: ReportOptions | AnswerOptions, given: str, allowed: str) -> None:
    """Refuses options of the other kind of report."""
    for name, value in vars(options).items():
        if value:
            shown = {"formats": "--format", "as_json": "--json"}.get(name, f"--{name}")
            refuse(shown, f"{shown} {given}", allowed)


def _print_answers(files: Sequence[Path], options: AnswerOptions) -> None:
    from ..evaluation.bench.answers import load_answers, named_apart
    from ..evaluation.bench.suite_table import table

    baseline = options.baseline or files[0]
    paths = [*files] if baseline in files else [baseline, *files]
    read = dict(zip(paths, named_apart([load_answers(path) for path in paths], paths), strict=True))
    rows = table([*read.values()], {"over_baseline": read[baseline]}, read[baseline])
    if options.as_json:
        typer.echo(json.dumps({"suite": read[baseline].suite, "baseline": str(baseline), "rows": rows}))
        return
    print_suite(rows)
    remark(f"{read[baseline].suite}, times {baseline} and texts equal to its. {SUITE_WORDS} docs/bench.md", err=False)

"""``specdec merge``: one file of what a job's shards wrote."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .job import SOME_FAILED, tell_end
from .option_groups import command
from .terminal import remark


@command
def merge(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Where the shards' outputs are.", show_default=False)],
    output: Annotated[Path, typer.Argument(metavar="FILE", help="What is written.", show_default=False)],
) -> None:
    """Joins the outputs of specdec generate --shard: FILE has every result once, in the order of the prompts, and is
    the output of the same job without shards, as its settings beside it say.

    Refused are outputs that are not whole, of different jobs, models or settings, or still being written. Exit codes:
    0, all prompts have their texts; 3, some failed; 4, the file could not be written. docs/jobs.md says more."""
    from ..jobs.merge import find_parts, rounding
    from ..jobs.merge import merge as join
    from ..line_file import OutputError, WriteError

    try:
        parts = find_parts(folder)
        for change in rounding(parts):
            remark(f"Warning: {change}: near-ties may have gone another way", "red")
        totals = join(parts, output)
    except OutputError as error:
        raise typer.BadParameter(str(error), param_hint="DIR / FILE") from error
    except WriteError as error:
        raise typer.Exit(tell_end(error)) from error
    ends = ", ".join(f"{count} {end}" for end, count in sorted(totals.ends.items()))
    remark(f"{totals.results} results in {str(output)!r}: {ends}; {totals.emitted} tokens, tau {totals.tau:.2f}")
    raise typer.Exit(SOME_FAILED if totals.ends["failed"] else 0)

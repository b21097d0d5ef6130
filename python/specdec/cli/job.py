"""``specdec generate --output``: a job over a file of prompts, which a later run of the same command goes on with."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from . import models, options
from .options import refuse
from .show import print_drafter_error

if TYPE_CHECKING:
    from ..decoder import SpeculativeDecoder
    from ..drafters.draft_length import AdaptiveDrafts
    from ..jobs.input import JobFile
    from ..jobs.output import Results, Totals
    from ..jobs.progress import Shown
    from ..jobs.signals import Signals
    from ..serving.scheduler import Scheduler

SOME_FAILED, NOT_WRITTEN = 3, 4  # exit codes


@dataclass(frozen=True)
class Scheduling:
    """None: as the scheduler has it."""

    rows: int | None
    max_length: int | None
    cache_tokens: int | None
    cache_bytes: str | None
    prefill_chunk: int | None

    def given(self) -> dict[str, int]:
        whole = {**vars(self)}
        if self.cache_bytes is not None:
            whole["cache_bytes"] = options.read_bytes("--cache-bytes", self.cache_bytes)
        return {name: value for name, value in whole.items() if value is not None}


@dataclass(frozen=True)
class Command:
    """The options of a job; ``lines`` is what a line has that says nothing else (``jobs.lines.LineSettings``)."""

    batch_file: Path
    output: Path
    lines: Mapping[str, object]
    target: str | None
    draft: str | None
    device: str | None
    dtype: str | None
    drafter: str
    exit_layers: int | None
    confidence: float
    rule: str
    num_drafts: int | AdaptiveDrafts
    scheduling: Scheduling
    progress: bool

    def decoding(self) -> dict[str, object]:
        """What texts depend on, beside models and lines."""
        from specdec_kernels import __version__

        k = self.num_drafts if isinstance(self.num_drafts, int) else "auto"
        names = ("drafter", "exit_layers", "confidence", "rule", "dtype")
        max_length = self.scheduling.max_length
        own = {name: getattr(self, name) for name in names}
        return {"specdec": __version__, **own, "num_drafts": k, "max_length": max_length}

    def rounding(self) -> dict[str, object]:
        """What changes no distribution, but may change the last bits of logits, and what is too long for the caches."""
        import torch
        import transformers

        device = self.device or ("cuda" if torch.cuda.is_available() else "cpu")
        versions = {"torch": torch.__version__, "transformers": transformers.__version__}
        shapes = {
            name: getattr(self.scheduling, name) for name in ("rows", "prefill_chunk", "cache_tokens", "cache_bytes")
        }
        return {**versions, "device": torch.device(device).type, **shapes}


def refuse_options(scheduling: Scheduling, no_progress: bool) -> None:
    """Those of a job where there is none."""
    given = [field.name for field in fields(scheduling) if getattr(scheduling, field.name) is not None]
    for name in [*given, *(["no_progress"] if no_progress else [])]:
        option = "--" + name.replace("_", "-")
        refuse(option, f"{option} without --output", "both, or neither")


def check_options(
    batch_file: Path | None,
    output: Path,
    scheduling: Scheduling,
    num_return_sequences: int,
    others: Mapping[str, bool],
) -> None:
    """Those of a job. ``others``: options that do not go with one, and whether they were given."""
    if batch_file is None:
        refuse("--output", "--output with PROMPT", "--output with --batch-file")
    if output.exists() and output.samefile(batch_file):
        refuse("--output", f"{str(output)!r}, the --batch-file", "another file")
    for option, given in others.items():
        if given:
            refuse(option, f"{option} with --output", "one of the two: results are JSON, with counts but no times")
    if num_return_sequences != 1:
        refuse("--num-return-sequences", f"{num_return_sequences} with --output", "1: give a prompt several lines")
    numbers = {name: value for name, value in vars(scheduling).items() if name != "cache_bytes"}
    options.check_counts(1, **numbers)
    if scheduling.cache_tokens is not None and scheduling.cache_bytes is not None:
        refuse("--cache-tokens / --cache-bytes", "both", "one of the two")
    scheduling.given()


def run(command: Command) -> int:
    """The exit code."""
    from ..jobs.input import InputError
    from ..jobs.output import OutputError, Results, WriteError
    from ..jobs.signals import Signals, Stopped

    results: Results | None = None
    with Signals() as signals:
        try:
            results = Results(command.output)
            file = _check(command, results)
            if results.totals.results < file.mark.prompts:
                _decode(command, file, results, signals)
            else:
                told = f"all {file.mark.prompts} prompts have results in {str(results.path)!r}: nothing to do"
                typer.echo(told, err=True)
            return SOME_FAILED if results.totals.ends["failed"] else 0
        except InputError as error:
            raise typer.BadParameter(str(error), param_hint="--batch-file") from error
        except OutputError as error:
            raise typer.BadParameter(str(error), param_hint="--output") from error
        except (WriteError, Stopped) as error:
            signals.ignore()
            stopped = isinstance(error, Stopped)
            typer.secho(f"stopped by {error}" if stopped else f"Error: {error}", fg="red", err=True)
            if results is not None:
                typer.echo(
                    f"{results.totals.results} results are written; the same command goes on from there", err=True
                )
            return error.exit_code if stopped else NOT_WRITTEN
        finally:
            signals.ignore()
            if results is not None:
                results.close()


def _check(command: Command, results: Results) -> JobFile:
    """All that can be said without models; the output is then ready for more."""
    from ..jobs.input import InputMark, JobFile
    from ..jobs.lines import LineSettings, check_defaults
    from ..jobs.manifest import differences, make_settings, read_vocab_size

    paths = models.paths(command.target, command.draft, command.drafter)
    vocab_size = read_vocab_size("target", paths["target"])
    defaults = LineSettings(**command.lines)
    check_defaults(defaults, vocab_size)
    file = JobFile(command.batch_file, defaults, vocab_size)
    then = results.settings
    results.check_ids(file.check(None if then is None else InputMark(**then["input"])))
    costs = None if then is None else then["costs"]
    settings = make_settings(command.decoding(), defaults, paths, command.rounding(), file.mark, costs)
    results.begin(settings)
    for change in [] if then is None else differences(then["rounding"], settings["rounding"]):
        typer.secho(
            f"Warning: {change}: near-ties may go another way, and other prompts be too long", fg="red", err=True
        )
    return file


def _decode(command: Command, file: JobFile, results: Results, signals: Signals) -> None:
    from ..jobs.progress import Rates, describe
    from ..jobs.run import run_job

    if results.done:
        typer.echo(f"{len(results.done)} of {file.mark.prompts} prompts have results: going on", err=True)
    loaded = models.load(command.target, command.draft, [command.drafter], command.device, command.dtype)
    scheduler = _scheduler(command, loaded, results)
    prompts, totals = file.mark.prompts, results.totals
    rates, shown = Rates(prompts, totals), _shown(command.progress, prompts, totals)
    try:
        signals_and_show = (signals, lambda: shown.update(totals, scheduler.usage.busy))
        drafter_error = run_job(scheduler, file.lines(), results, loaded.tokenizer, loaded.tail, *signals_and_show)
    finally:
        shown.close()
        scheduler.close()
    if drafter_error is not None:
        print_drafter_error(drafter_error)
    ends = ", ".join(f"{count} {end}" for end, count in sorted(totals.ends.items()))
    told = f"{totals.emitted} tokens, tau {totals.tau:.2f}, {describe(totals, rates, scheduler.usage.busy)}"
    typer.echo(f"all {prompts} prompts have results in {str(results.path)!r}: {ends}; {told}", err=True)


def _scheduler(command: Command, loaded: models.Models, results: Results) -> Scheduler:
    """Ready to run. With ``-k auto`` what steps cost is measured by the first run, and kept for later ones: K, and with
    it a sampled text, depends on it."""
    from ..decoder import SpeculativeDecoder
    from ..drafters.draft_length import AdaptiveDrafts
    from ..serving.scheduler import Scheduler

    drafter = loaded.drafter(command.drafter, command.exit_layers, confidence=command.confidence)
    k = command.num_drafts
    if isinstance(k, AdaptiveDrafts):
        costs = results.settings["costs"]
        if costs is None:
            costs = _measure(SpeculativeDecoder(loaded.target, drafter, k), command.scheduling.rows or 8)
            results.begin({**results.settings, "costs": costs})
        k = AdaptiveDrafts(k.max_drafts, costs)
    decoder = SpeculativeDecoder(loaded.target, drafter, k)
    return Scheduler(decoder, rule=command.rule, **command.scheduling.given())


def _measure(decoder: SpeculativeDecoder, rows: int) -> list[float]:
    """T(0), T(1), ... of steps over so many rows."""
    result = decoder.generate([[0] * 16] * rows, max_new_tokens=4, eos_token_id=[])
    return result.step_costs


def _shown(progress: bool, prompts: int, totals: Totals) -> Shown:
    from ..jobs.progress import Bar, Lines, Nothing

    if not progress:
        return Nothing()
    return (Bar if sys.stderr.isatty() else Lines)(prompts, totals)

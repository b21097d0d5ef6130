"""``specdec generate --output``: a job over a file of prompts, which the same command resumes after it was stopped."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from . import models, options
from .options import refuse
from .show import print_drafter_error

if TYPE_CHECKING:
    from ..decoder import SpeculativeDecoder
    from ..drafters.draft_length import AdaptiveDrafts
    from ..jobs.input import JobFile
    from ..jobs.lines import LineSettings
    from ..jobs.output import Results, Totals
    from ..jobs.progress import Shown
    from ..jobs.signals import Signals
    from ..serving.scheduler import Scheduler

SOME_FAILED, NOT_WRITTEN = 3, 4  # exit codes


@dataclass(frozen=True)
class Scheduling:
    """Options of the scheduler; None leaves one to the scheduler."""

    rows: int | None
    max_length: int | None
    cache_tokens: int | None
    cache_bytes: str | None
    prefill_chunk: int | None

    def given(self) -> dict[str, Any]:
        """The options that were given, as arguments of ``Scheduler``."""
        whole = {**vars(self)}
        if self.cache_bytes is not None:
            whole["cache_bytes"] = options.read_bytes("--cache-bytes", self.cache_bytes)
        return {name: value for name, value in whole.items() if value is not None}


@dataclass(frozen=True)
class ModelsAt:
    """Which models, by folder or hub name, and how they are loaded; None leaves it to ``models.load``."""

    target: str | None
    draft: str | None
    device: str | None
    dtype: str | None


@dataclass(frozen=True)
class Drafting:
    drafter: str
    exit_layers: int | None
    confidence: float
    rule: str
    num_drafts: int | AdaptiveDrafts


@dataclass(frozen=True)
class Command:
    """The options of a job."""

    batch_file: Path
    output: Path
    defaults: LineSettings  # for what a line leaves open
    models: ModelsAt
    drafting: Drafting
    scheduling: Scheduling
    progress: bool

    def decoding(self) -> dict[str, object]:
        """The settings that texts depend on, besides models and lines."""
        from specdec_kernels import __version__

        d = self.drafting
        return {
            "specdec": __version__,
            "drafter": d.drafter,
            "exit_layers": d.exit_layers,
            "confidence": d.confidence,
            "rule": d.rule,
            "dtype": self.models.dtype,
            "num_drafts": d.num_drafts if isinstance(d.num_drafts, int) else "auto",
            "max_length": self.scheduling.max_length,
        }

    def rounding(self) -> dict[str, object]:
        """What leaves the distribution as it is, but can change the last bits of logits, or what fits the caches."""
        import torch
        import transformers

        device = self.models.device or ("cuda" if torch.cuda.is_available() else "cpu")
        versions = {"torch": torch.__version__, "transformers": transformers.__version__}
        shapes = {
            name: getattr(self.scheduling, name) for name in ("rows", "prefill_chunk", "cache_tokens", "cache_bytes")
        }
        return {**versions, "device": torch.device(device).type, **shapes}


def refuse_options(scheduling: Scheduling, no_progress: bool) -> None:
    """Refuses the options of a job where there is no --output."""
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
    """Checks the options of a job. ``others``: options that do not go with a job, and whether they were given."""
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
    """Runs the job; returns the exit code."""
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
            told = f"stopped by {error}" if isinstance(error, Stopped) else f"Error: {error}"
            typer.secho(told, fg="red", err=True)
            if results is not None:
                typer.echo(
                    f"{results.totals.results} results are written; the same command goes on from there", err=True
                )
            return error.exit_code if isinstance(error, Stopped) else NOT_WRITTEN
        finally:
            signals.ignore()
            if results is not None:
                results.close()


def _check(command: Command, results: Results) -> JobFile:
    """Checks all that can be checked without models. The output is then ready for more results."""
    from ..jobs.input import InputMark, JobFile
    from ..jobs.lines import check_defaults
    from ..jobs.manifest import differences, make_settings

    paths = models.paths(command.models.target, command.models.draft, command.drafting.drafter)
    vocab_size = models.read_vocab_size(command.models.target)
    check_defaults(command.defaults, vocab_size)
    file = JobFile(command.batch_file, command.defaults, vocab_size)
    then = results.settings
    results.check_ids(file.check(None if then is None else InputMark(**then["input"])))
    costs = None if then is None else then["costs"]
    settings = make_settings(command.decoding(), command.defaults, paths, command.rounding(), file.mark, costs)
    results.begin(settings)
    for change in [] if then is None else differences(then["rounding"], settings["rounding"]):
        typer.secho(
            f"Warning: {change}: near-ties may go another way, and other prompts may be too long", fg="red", err=True
        )
    return file


def _decode(command: Command, file: JobFile, results: Results, signals: Signals) -> None:
    from ..jobs.progress import Rates, describe
    from ..jobs.run import run_job

    if results.done:
        typer.echo(f"{len(results.done)} of {file.mark.prompts} prompts have results: going on", err=True)
    at = command.models
    loaded = models.load(at.target, at.draft, [command.drafting.drafter], at.device, at.dtype)
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
    """Ready to run. With ``-k auto`` the first run measures what steps cost and keeps it for later runs, because K, and
    with it a sampled text, depends on it."""
    from ..decoder import SpeculativeDecoder
    from ..drafters.draft_length import AdaptiveDrafts
    from ..serving.scheduler import Scheduler

    drafting, settings = command.drafting, results.settings
    drafter = loaded.drafter(drafting.drafter, drafting.exit_layers, confidence=drafting.confidence)
    k = drafting.num_drafts
    if isinstance(k, AdaptiveDrafts) and settings is not None:
        costs = settings["costs"]
        if costs is None:
            costs = _measure(SpeculativeDecoder(loaded.target, drafter, k), command.scheduling.rows or 8)
            results.begin({**settings, "costs": costs})
        k = AdaptiveDrafts(k.max_drafts, costs)
    decoder = SpeculativeDecoder(loaded.target, drafter, k)
    return Scheduler(decoder, rule=drafting.rule, **command.scheduling.given())


def _measure(decoder: SpeculativeDecoder, rows: int) -> list[float] | None:
    """T(0), T(1), ...: what steps over ``rows`` rows cost."""
    result = decoder.generate([[0] * 16] * rows, max_new_tokens=4, eos_token_id=[])
    return result.step_costs


def _shown(progress: bool, prompts: int, totals: Totals) -> Shown:
    from ..jobs.progress import Bar, Lines, Nothing

    if not progress:
        return Nothing()
    return (Bar if sys.stderr.isatty() else Lines)(prompts, totals)

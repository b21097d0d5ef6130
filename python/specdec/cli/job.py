"""``specdec generate --output``: a job over a file of prompts, which the same command resumes after it was stopped."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from . import models, options
from .options import refuse
from .progress import progress
from .show import print_drafter_error
from .terminal import on_terminal, remark

if TYPE_CHECKING:
    from ..jobs.input import JobFile
    from ..jobs.lines import LineSettings
    from ..jobs.output import Results
    from ..jobs.signals import Signals
    from ..loop.draft_length import AdaptiveDrafts
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
    adapter: str | None = None


@dataclass(frozen=True)
class Drafting:
    drafter: str
    exit_layers: int | None
    confidence: float
    rule: str
    num_drafts: int | AdaptiveDrafts
    tree: int | None  # nodes; None: chains


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
    as_json: bool  # whether results are printed as well

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
            **({} if d.tree is None else {"tree": d.tree}),  # jobs that began before there were trees go on
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
    if output.exists() and batch_file.exists() and output.samefile(batch_file):
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
    from ..jobs.output import Results
    from ..jobs.signals import Signals, Stopped
    from ..line_file import OutputError, WriteError

    results: Results | None = None
    with Signals() as signals:
        try:
            results = Results(command.output)
            file = _check(command, results)
            if results.totals.results < file.mark.prompts:
                _decode(command, file, results, signals)
            else:
                told = f"all {file.mark.prompts} prompts have results in {str(results.path)!r}: nothing to do"
                remark(told)
            return SOME_FAILED if results.totals.ends["failed"] else 0
        except InputError as error:
            raise typer.BadParameter(str(error), param_hint="--batch-file") from error
        except OutputError as error:
            raise typer.BadParameter(str(error), param_hint="--output") from error
        except (WriteError, Stopped) as error:
            signals.ignore()
            told = f"stopped by {error}" if isinstance(error, Stopped) else f"Error: {error}"
            remark(told, "red")
            if results is not None:
                remark(f"{results.totals.results} results are written; the same command goes on from there")
            return error.exit_code if isinstance(error, Stopped) else NOT_WRITTEN
        finally:
            signals.ignore()
            if results is not None:
                results.close()


def _check(command: Command, results: Results) -> JobFile:
    """Checks all that can be checked without models. The output is then ready for more results."""
    from ..checks import differences
    from ..jobs.input import InputMark, JobFile
    from ..jobs.lines import check_defaults
    from ..jobs.manifest import make_settings

    at = command.models
    paths = models.paths(at.target, at.draft, command.drafting.drafter, at.adapter)
    vocab_size = models.read_vocab_size(command.models.target)
    check_defaults(command.defaults, vocab_size)
    tokenizer = models.tokenizer_of(command.models.target)
    file = JobFile(command.batch_file, command.defaults, vocab_size, tokenizer)
    then = results.settings
    results.check_ids(file.check(None if then is None else InputMark(**then["input"])))
    settings = make_settings(command.decoding(), command.defaults, paths, command.rounding(), file.mark)
    results.begin(settings)
    for change in [] if then is None else differences(then["rounding"], settings["rounding"]):
        remark(f"Warning: {change}: near-ties may go another way, and other prompts may be too long", "red")
    return file


def _decode(command: Command, file: JobFile, results: Results, signals: Signals) -> None:
    from ..jobs.progress import Speed
    from ..jobs.run import run_job

    if results.done:
        remark(f"{len(results.done)} of {file.mark.prompts} prompts have results: going on")
    at, prompts, totals = command.models, file.mark.prompts, results.totals
    scrolling = command.as_json and on_terminal()  # results, which a bar would get in the way of
    with progress("loading models", command.progress and not scrolling) as show:
        loaded = models.load(at.target, at.draft, [command.drafting.drafter], at.device, at.dtype, at.adapter)
        scheduler = _scheduler(command, loaded)
        speed = Speed(totals)

        def tell(row: dict | None = None) -> None:
            if row is not None and command.as_json:
                typer.echo(json.dumps(row))
            show(totals.results, prompts, speed.describe(totals, scheduler.usage.busy))

        tell()
        try:
            drafter_error = run_job(scheduler, file.lines(), results, loaded.tokenizer, loaded.tail, signals, tell)
        finally:
            scheduler.close()
    if drafter_error is not None:
        print_drafter_error(drafter_error)
    ends = ", ".join(f"{count} {end}" for end, count in sorted(totals.ends.items()))
    told = f"{totals.emitted} tokens, tau {totals.tau:.2f}, {speed.describe(totals, scheduler.usage.busy)}"
    remark(f"all {prompts} prompts have results in {str(results.path)!r}: {ends}; {told}")


def _scheduler(command: Command, loaded: models.Models) -> Scheduler:
    from ..decoder import SpeculativeDecoder
    from ..serving.scheduler import Scheduler

    drafting = command.drafting
    drafter = loaded.drafter(drafting.drafter, drafting.exit_layers, confidence=drafting.confidence)
    decoder = SpeculativeDecoder(loaded.target, drafter, drafting.num_drafts, tree=drafting.tree)
    return Scheduler(decoder, rule=drafting.rule, **command.scheduling.given())

"""``specdec generate --output``: a job over a file of prompts, which the same command resumes after it was stopped."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from . import models
from .drafting import read_num_drafts
from .job_decoders import Here
from .option_groups import option
from .options import ROWS, SchedulingOptions
from .progress_bar import progress
from .show import print_drafter_error
from .terminal import on_terminal, remark
from .user_errors import check_counts, option_name, refuse

if TYPE_CHECKING:
    from ..jobs.input import JobFile
    from ..jobs.lines import LineSettings
    from ..jobs.output import Results
    from ..jobs.shard import Shard
    from ..jobs.signals import Signals
    from .drafting import GenerateDrafts
    from .ray_job import Actors, Cluster

SOME_FAILED, NOT_WRITTEN = 3, 4  # exit codes


@dataclass(frozen=True)
class JobOptions(SchedulingOptions):
    """A job"""

    output: Path | None = option(
        None, "Write results of --batch-file to this file as they end, and resume where it has some."
    )
    shard: str | None = option(
        None,
        "Only every n-th prompt, from number i on, counted from 0: for n processes with an --output each, whose "
        "results specdec merge joins.",
        metavar="i/n",
    )
    ray: str | None = option(
        None,
        "Decode on a Ray cluster: its address; auto, the one of this machine; local, one that is started here.",
        metavar="ADDRESS",
    )
    actors: int | None = option(None, "With --ray: decoders. Default: as many as the cluster has room for.")
    actor_cpus: int | None = option(
        None, "With --ray: CPUs of each. Default: 1 beside a GPU; else the smallest node's."
    )
    no_progress: bool = option(False, "Say nothing while a job runs.", "--no-progress")

    def check(self, batch_file: Path | None, num_return_sequences: int, **others: bool) -> None:
        """Refuses the options of a job without --output, and with it what does not go with a job: ``others``, options
        by name, and whether they were given."""
        if self.output is None:
            for name in (name for name, value in vars(self).items() if value is not None and value is not False):
                refuse(option_name(name), f"{option_name(name)} without --output", "both, or neither")
            return
        if batch_file is None:
            refuse("--output", "--output with PROMPT", "--output with --batch-file")
        if self.output.exists() and batch_file.exists() and self.output.samefile(batch_file):
            refuse("--output", f"{str(self.output)!r}, the --batch-file", "another file")
        for name, given in others.items():
            if given:
                allowed = "one of the two: results are JSON, with counts but no times"
                refuse(option_name(name), f"{option_name(name)} with --output", allowed)
        if num_return_sequences != 1:
            refuse("--num-return-sequences", f"{num_return_sequences} with --output", "1: give a prompt several lines")
        for name in ("actors", "actor_cpus"):
            if getattr(self, name) is not None and self.ray is None:
                refuse(option_name(name), f"{option_name(name)} without --ray", "both, or neither")
        check_counts(1, actors=self.actors, actor_cpus=self.actor_cpus)
        self.scheduling()
        self.part()

    def part(self) -> Shard:
        """Which prompts are run."""
        from ..jobs.shard import WHOLE, Shard

        try:
            return WHOLE if self.shard is None else Shard.parse(self.shard)
        except ValueError as error:
            raise typer.BadParameter(str(error), param_hint="--shard") from error


@dataclass(frozen=True)
class Job:
    """A command with --output."""

    batch_file: Path
    defaults: LineSettings  # for what a line leaves open
    at: models.ModelOptions
    drafts: GenerateDrafts
    options: JobOptions
    as_json: bool  # whether results are printed as well

    def decoding(self) -> dict[str, object]:
        """The settings that texts depend on, besides models and lines."""
        from specdec_kernels import __version__

        from ..jobs.manifest import SHARD

        d, nodes = self.drafts, self.drafts.nodes
        num_drafts = read_num_drafts(d.num_drafts, nodes=nodes)
        return {
            "specdec": __version__,
            **{name: getattr(d, name) for name in ("drafter", "exit_layers", "confidence")},
            "rule": d.accept_rule,
            "dtype": self.at.machine.dtype,
            **{name: bits for name, bits in self.at.all_bits.items() if bits is not None},
            "num_drafts": num_drafts if isinstance(num_drafts, int) else "auto",
            "max_length": self.options.max_length,
            # Jobs that began before there were these go on.
            **({} if nodes is None else {"tree": nodes}),
            **({} if d.draft_window is None else {"draft_window": d.draft_window}),
            **({} if self.options.shard is None else {SHARD: str(self.options.part())}),
        }

    def rounding(self) -> dict[str, object]:
        """What leaves the distribution as it is, but can change the last bits of logits, or what fits the caches."""
        import torch
        import transformers

        shapes = ("rows", "prefill_chunk", "cache_tokens", "cache_bytes")
        return {
            **{"torch": torch.__version__, "transformers": transformers.__version__},
            "device": torch.device(self.at.machine.chosen_device()).type,
            **{name: getattr(self.options, name) for name in shapes},
            **({} if self.at.tp is None else {"tp": self.at.tp}),  # jobs that began before there was this go on
        }

    def run(self) -> int:
        """Runs the job; returns the exit code."""
        from ..jobs.output import Results
        from ..jobs.signals import Signals, Stopped
        from ..line_file import WriteError

        results: Results | None = None
        assert self.options.output is not None
        with Signals() as signals:
            try:
                results = Results(self.options.output)
                cluster, job = self._placed()
                file = job._check(results)
                if results.totals.results < file.prompts:
                    job._decode(cluster, file, results, signals)
                else:
                    remark(f"all {file.prompts} prompts have results in {str(results.path)!r}: nothing to do")
                return SOME_FAILED if results.totals.ends["failed"] else 0
            except (WriteError, Stopped) as error:
                signals.ignore()
                code = tell_end(error)
                if results is not None:
                    remark(f"{results.totals.results} results are written; the same command goes on from there")
                return code
            finally:
                signals.ignore()
                if results is not None:
                    results.close()

    def _check(self, results: Results) -> JobFile:
        """Checks all that can be checked without models. The output is then ready for more results."""
        from ..checks import differences
        from ..jobs.input import InputMark, JobFile
        from ..jobs.lines import LineReader, check_defaults
        from ..jobs.manifest import make_settings

        check_defaults(self.defaults, self.at.vocab_size)
        tokenizer, size = (lambda: self.at.tokenizer), self.at.vocab_size
        file = JobFile(LineReader(self.batch_file, self.defaults, size, tokenizer=tokenizer), self.options.part())
        then = results.settings
        results.check_ids(file.check(None if then is None else InputMark(**then["input"])))
        paths = self.at.paths(self.drafts.drafter)
        settings = make_settings(self.decoding(), self.defaults, paths, self.rounding(), file.mark)
        results.begin(settings)
        for change in [] if then is None else differences(then["rounding"], settings["rounding"]):
            remark(f"Warning: {change}: near-ties may go another way, and other prompts may be too long", "red")
        return file

    def _placed(self) -> tuple[Cluster | None, Job]:
        """Where it is decoded, if not here, and the job with the device that is used there."""
        o, machine = self.options, self.at.machine
        if o.ray is None:
            return None, self
        from .ray_job import join

        if self.at.tp is not None:
            refuse("--ray", f"--ray with --tp {self.at.tp}", "one of the two")
        cluster = join(o.ray, machine.device, o.actors, o.actor_cpus)
        return cluster, replace(self, at=replace(self.at, machine=replace(machine, device=cluster.device)))

    def _decode(self, cluster: Cluster | None, file: JobFile, results: Results, signals: Signals) -> None:
        from ..jobs.run import Speed, write_results

        if results.done:
            remark(f"{len(results.done)} of {file.prompts} prompts have results: going on")
        prompts, totals = file.prompts, results.totals
        scrolling = self.as_json and on_terminal()  # results, which a bar would get in the way of
        with progress("loading models", not self.options.no_progress and not scrolling) as show:
            decoders = self._decoders(cluster, results)
            speed = Speed(totals)

            def tell(row: dict | None = None) -> None:
                if row is not None and self.as_json:
                    typer.echo(json.dumps(row))
                show(totals.results, prompts, f"{speed.describe(totals)}, {decoders.load}")

            tell()
            left = (line for line in file.lines() if line.id not in results.done)
            try:
                write_results(decoders.decode(left), results, signals, tell)
            finally:
                decoders.close()
        if decoders.drafter_error is not None:
            print_drafter_error(decoders.drafter_error)
        ends = ", ".join(f"{count} {end}" for end, count in sorted(totals.ends.items()))
        told = f"{totals.emitted} tokens, tau {totals.tau:.2f}, {speed.describe(totals)}, {decoders.load}"
        remark(f"all {prompts} prompts have results in {str(results.path)!r}: {ends}; {told}")

    def _decoders(self, cluster: Cluster | None, results: Results) -> Here | Actors:
        if cluster is None:
            return Here(self.at, self.drafts, self.options)
        from .ray_job import Actors, Checked

        assert results.settings is not None
        made_with = results.settings["settings"]
        return Actors(cluster, Checked(self.at, self.drafts, self.options, made_with), self.options.rows or ROWS)


def tell_end(error: BaseException) -> int:
    """Says that a signal or a full disk ended the command; returns the exit code."""
    code = getattr(error, "exit_code", None)
    remark(f"Error: {error}" if code is None else f"stopped by {error}", "red")
    return NOT_WRITTEN if code is None else code

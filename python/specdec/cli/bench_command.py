"""``specdec bench``: which way to decode is the fastest on these models and this machine, and why."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from . import bench_methods, bench_options, models
from .bench_served import ServedRun, refuse_others
from .option_groups import command
from .report_command import write as write_report
from .show_bench import print_results
from .user_errors import check_counts


@command
def bench(
    measured: bench_options.MethodOptions,
    settings: bench_options.SettingOptions,
    given: bench_options.QuestionOptions,
    rounds: bench_options.RoundOptions,
    at: models.ModelOptions,
    threads: bench_options.ThreadOptions,
    results: bench_options.ResultOptions,
    of: bench_options.MeasuredServer,
    prompt: Annotated[
        list[str] | None,
        typer.Argument(help="Default: a built-in set, one of each category. Of --suite its file.", show_default=False),
    ] = None,
) -> None:
    """Measures every way to decode on your models, in turns, and says which is the fastest where that is not noise.

    All methods continue the same prompts under each temperature, batch size and filter, and take turns prompt by
    prompt. Two baselines are always among them: transformers' generate, and specdec without drafts. Greedy texts are
    compared with those of transformers. After Ctrl-C or a kill the same command goes on where it was. docs/bench.md
    says what is measured, and how. Exits with 1 if a greedy text of specdec differs by more than rounding explains.
    With --url and --suite, what is measured is somebody's server instead.
    """
    if of.url is not None:
        refuse_others(measured, settings, given, rounds, at, threads, results)
        raise typer.Exit(ServedRun(of, given, settings, rounds, results).run(prompt))
    check_counts(1, max_new_tokens=settings.max_new_tokens)
    methods = bench_methods.read_methods(measured.method, at, measured.exit_layers)
    suite = given.asked
    axes = settings.axes(measured, suite)
    with_report = results.with_report
    questions = given.questions(prompt, at)

    import torch

    from ..evaluation.bench.session import BenchSettings
    from ..jobs.signals import Signals
    from .bench_run import BUG, BenchRun

    if threads.threads is not None:
        torch.set_num_threads(threads.threads)
    seconds = None if rounds.minutes is None else 60 * rounds.minutes
    new_tokens = settings.new_tokens(suite, at)
    of_session = BenchSettings(new_tokens, rounds.repeats, rounds.warm_up, settings.seed, seconds)
    whole_run = BenchRun(at, methods, axes, measured, questions, given, of_session, results)
    with Signals() as signals:
        code, whole = whole_run.run(signals)
    if whole is not None:
        if with_report and code in (0, BUG):
            write_report(whole, results.output)
        if results.as_json:
            typer.echo(json.dumps(whole))
        else:
            print_results(whole, results.output)
    raise typer.Exit(code)

"""``specdec bench``: which way to decode is the fastest on these models and this machine, and why."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, ClassVar

import typer

from . import bench_methods, models, options
from .drafters import HEAD
from .grouped import GroupedCommand
from .options import refuse
from .prompts import check_texts, read_questions
from .report import write as write_report
from .show_bench import print_results

BUILT_IN = Path(__file__).parents[1] / "evaluation" / "bench" / "prompts.jsonl"
NEW_TOKENS, SHORT_TEXTS = 64, 16  # the embedded pair's grid is to end in five minutes on two cores


class BenchCommand(GroupedCommand):
    groups: ClassVar[dict[str, tuple[str, ...]]] = {
        "What is measured": ("method", "num_drafts", "rule", "tree", "exit_layers", "compile"),
        "Settings": ("temperature", "batch_size", "top_k", "top_p", "min_p", "max_new_tokens", "seed"),
        "Prompts": ("batch_file", "category", "per_category", "chat", "cut_prompts"),
        "Rounds": ("repeats", "warm_up", "minutes"),
        "Models and machine": (
            *("target", "adapter", "draft", "load_in_8bit", "load_in_4bit", "device", "dtype", "threads"),
        ),
        "Results": ("output", "report", "log", "as_json"),
    }


def bench(
    prompt: Annotated[
        list[str] | None, typer.Argument(help="Default: built-in ones of twelve categories.", show_default=False)
    ] = None,
    method: Annotated[
        list[str] | None,
        typer.Option(
            help=f"Repeatable: {', '.join(bench_methods.NAMES)}, or {HEAD}. transformers and plain are always there. "
            "Default: assisted, model if there is a draft, lookup, and suffix, or eagle3 of the embedded target.",
            show_default=False,
        ),
    ] = None,
    num_drafts: Annotated[
        list[str] | None,
        typer.Option(
            "--num-drafts",
            "-k",
            help="Repeatable: a number, or auto. Default: of model 1, 2, 4, 8 and auto; of assisted 2 and auto; of "
            "trees 6; of others auto.",
            show_default=False,
        ),
    ] = None,
    rule: Annotated[
        list[str] | None, typer.Option(help="Repeatable: token, block, coupled. Default: token; of trees coupled.")
    ] = None,
    tree: Annotated[
        list[int] | None,
        typer.Option(metavar="N", help="Repeatable: nodes of trees; of other methods than tree, beside their chains."),
    ] = None,
    exit_layers: options.ExitLayers = None,
    compile: Annotated[
        bool, typer.Option("--compile", help="specdec's methods, plain among them, use torch.compile.")
    ] = False,
    temperature: Annotated[
        list[float] | None, typer.Option(help="Repeatable; 0 is greedy. Default: 0 and 1.", show_default=False)
    ] = None,
    batch_size: Annotated[
        list[int] | None, typer.Option(help="Repeatable: prompts at a time. Default: 1.", show_default=False)
    ] = None,
    top_k: Annotated[list[int] | None, typer.Option(help="Repeatable; 0 is off. Of sampled texts.")] = None,
    top_p: Annotated[list[float] | None, typer.Option(help="Repeatable; 1 is off. Of sampled texts.")] = None,
    min_p: Annotated[list[float] | None, typer.Option(help="Repeatable; 0 is off. Of sampled texts.")] = None,
    max_new_tokens: Annotated[
        int | None, typer.Option(help=f"Of each text. Default: {NEW_TOKENS}; of the embedded pair {SHORT_TEXTS}.")
    ] = None,
    seed: options.Seed = 0,
    batch_file: Annotated[
        Path | None,
        typer.Option(
            help="Prompts: as specdec generate reads them, with a category if you like; or questions of Spec-Bench or "
            "SPEED-Bench, as JSON lines."
        ),
    ] = None,
    category: Annotated[list[str] | None, typer.Option(help="Repeatable: prompts of these only.")] = None,
    per_category: Annotated[
        int | None, typer.Option(help="The first ones of each category. Default: 1 of the built-in ones, else all.")
    ] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Prompts are a user's messages, for the chat template.")] = False,
    cut_prompts: Annotated[
        bool, typer.Option("--cut-prompts", help="Cut prompts that are too long at their beginning.")
    ] = False,
    repeats: Annotated[int, typer.Option(help="Rounds; ratios are taken within each.")] = 5,
    warm_up: Annotated[int, typer.Option(help="Prompts that each method continues before, unmeasured.")] = 1,
    minutes: Annotated[
        float | None, typer.Option(help="Begin no round that would end later; the same command measures the rest.")
    ] = None,
    target: options.Target = None,
    adapter: options.Adapter = None,
    draft: options.Draft = None,
    load_in_8bit: Annotated[
        bool, typer.Option("--load-in-8bit", help="The target's weights in 8 bits, by bitsandbytes.")
    ] = False,
    load_in_4bit: Annotated[bool, typer.Option("--load-in-4bit", help="The same in 4 bits.")] = False,
    device: options.Device = None,
    dtype: options.Dtype = None,
    threads: Annotated[int | None, typer.Option(help="Of torch, on a CPU.", show_default=False)] = None,
    output: Annotated[
        Path, typer.Option(help="A folder for the results. What it has of the same benchmark is not measured again.")
    ] = Path("specdec-bench"),
    report: Annotated[
        bool | None,
        typer.Option("--report/--no-report", help="Write report.html and plots/. Default: where there is matplotlib."),
    ] = None,
    log: Annotated[bool, typer.Option("--log", help="Print seconds and tokens of every call.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print results.json instead of tables.")] = False,
) -> None:
    """Measures every way to decode on your models, in turns, and says which is the fastest where that is not noise.

    All methods continue the same prompts under each temperature, batch size and filter, and take turns prompt by
    prompt. Two baselines are always among them: transformers' generate, and specdec without drafts. Greedy texts are
    compared with those of transformers. After Ctrl-C or a kill the same command goes on where it was. docs/bench.md
    says what is measured, and how. Exits with 1 if a greedy text of specdec differs by more than rounding explains.
    """
    if prompt and batch_file is not None:
        refuse("PROMPT / --batch-file", "both", "at most one of the two")
    if load_in_8bit and load_in_4bit:
        refuse("--load-in-8bit / --load-in-4bit", "both", "at most one of the two")
    options.check_counts(1, max_new_tokens=max_new_tokens, repeats=repeats, per_category=per_category, threads=threads)
    options.check_counts(0, warm_up=warm_up)
    if minutes is not None and not minutes > 0:
        refuse("--minutes", minutes, "a number > 0")
    new_tokens = max_new_tokens or (SHORT_TEXTS if target is None else NEW_TOKENS)
    methods = bench_methods.read_methods(method, target, draft, exit_layers, adapter)
    axes: dict[str, Any] = {
        **{"num_drafts": num_drafts, "rules": rule, "trees": tree},
        **{"temperatures": temperature or [0.0, 1.0], "batches": batch_size or [1]},
        "filters": {"top_k": top_k, "top_p": top_p, "min_p": min_p},
    }
    with options.user_errors(batch_file):
        bench_methods.check_values(**axes)
        reports = _reports(report)
        file = batch_file or (None if prompt else BUILT_IN)
        if file is None:
            questions = bench_methods.questions_of(check_texts(prompt or []))
        else:
            questions = read_questions(file, models.tokenizer_of(target))
        most = per_category or (1 if file == BUILT_IN else None)
        chosen = bench_methods.choose(questions, category, most)

        import torch

        from ..evaluation.bench.session import BenchSettings
        from ..jobs.signals import Signals
        from .bench_run import BUG, Command, ModelsAt, run

        if threads is not None:
            torch.set_num_threads(threads)
        seconds = None if minutes is None else 60 * minutes
        command = Command(
            ModelsAt(target, draft, adapter, device, dtype, 8 if load_in_8bit else 4 if load_in_4bit else None),
            *(methods, axes, exit_layers, compile, chosen, chat, cut_prompts),
            BenchSettings(new_tokens, repeats, warm_up, seed, seconds),
            *(output, log),
        )
        with Signals() as signals:
            code, whole = run(command, signals)
        if whole is not None and reports and code in (0, BUG):
            write_report(whole, output)
    if whole is not None:
        if as_json:
            typer.echo(json.dumps(whole))
        else:
            print_results(whole, output)
    raise typer.Exit(code)


def _reports(asked: bool | None) -> bool:
    """Whether a report is written. Raises ValueError where it is asked for and cannot be."""
    from ..evaluation.report import check_matplotlib

    try:
        check_matplotlib()
    except ValueError:
        if asked:
            raise
        return False
    return asked is not False

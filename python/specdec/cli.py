"""The command line: ``specdec generate``, ``specdec compare`` and ``specdec doctor``.

Answers go to stdout, everything else to stderr. Whatever imports torch is imported inside the commands:
``--help`` is to be fast."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer
from rich.console import Console
from rich.table import Table

from . import report
from .streaming import continuation

if TYPE_CHECKING:
    from .loading import Pair

# Without rich's boxes, which would break long paths in error messages.
app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Speculative decoding, exact and fast.",
)
# Source code, which is what the embedded pair has seen.
CODE_PROMPTS = (
    "import os\nimport sys\n\n\ndef main():\n",
    'class Error(Exception):\n    """',
    "    def __init__(self, name, value=None):\n",
    "    def read(self, size=-1):\n        ",
)

Target = Annotated[str | None, typer.Option(help="Folder or hub name of the target. Default: the embedded pair.")]
Draft = Annotated[str | None, typer.Option(help="Folder or hub name of the draft.")]
Temperature = Annotated[float, typer.Option(help="0 is greedy.")]
Seed = Annotated[int, typer.Option(help="Of the first prompt; prompt i uses seed + i.")]
BatchFile = Annotated[
    Path | None,
    typer.Option(
        exists=True,
        dir_okay=False,
        readable=True,
        help='UTF-8, one prompt a line; in a .jsonl file a JSON string or {"prompt": ...} a line.',
    ),
]
Device = Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1 and so on. Default: a GPU if there is one.")]
Dtype = Annotated[
    str | None,
    typer.Option(help="float32, bfloat16, float16, float64. Default: as saved; float32 for the embedded pair."),
]


@app.command()
def generate(
    prompt: Annotated[str | None, typer.Argument(help="The text to continue.", show_default=False)] = None,
    target: Target = None,
    draft: Draft = None,
    max_new_tokens: int = 128,
    temperature: Temperature = 0.0,
    seed: Seed = 0,
    num_drafts: Annotated[
        int, typer.Option("--num-drafts", "-k", help="K, drafted tokens a step; 0 decodes plainly.")
    ] = 4,
    batch_file: BatchFile = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a prompt, a line each.")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Colour tokens by what produced them.")] = False,
    device: Device = None,
    dtype: Dtype = None,
) -> None:
    """Continues PROMPT, or all prompts of a file in one batch."""
    if (prompt is None) == (batch_file is None):
        _refuse("PROMPT / --batch-file", "neither" if prompt is None else "both", "one of the two")
    texts = _read_texts([] if prompt is None else [prompt], batch_file)
    _check_temperature(temperature)
    _check_counts(0, num_drafts=num_drafts, max_new_tokens=max_new_tokens)
    with _user_errors(batch_file):
        target_model, draft_model, tokenizer = _load(target, draft, device, dtype)
        from specdec_kernels import SamplingParams

        from .decoder import SpeculativeDecoder

        prompts = tokenizer(texts).input_ids
        pages = [report.Page(tokenizer, *args, verbose) for args in zip(texts, prompts, strict=True)]
        streamed = not as_json and batch_file is None
        result = SpeculativeDecoder(target_model, draft_model, num_drafts).generate(
            prompts,
            max_new_tokens=max_new_tokens,
            params=SamplingParams(temperature=temperature),
            seed=[seed + i for i in range(len(prompts))],
            on_emit=(lambda e: pages[0].show(e.tokens, e.produced_by)) if streamed else None,
        )
    rows = zip(prompts, result.tokens, result.produced_by, result.sequence_stats, strict=True)
    for i, (ids, tokens, produced_by, stats) in enumerate(rows):
        if as_json:
            # The sequences of a batch share its time.
            stats = dataclasses.replace(stats, seconds=result.stats.seconds)
            row = {
                "text": continuation(tokenizer, ids, tokens),
                "token_ids": tokens,
                "produced_by": [str(producer) for producer in produced_by],
                "stats": stats.to_dict(),
            }
            typer.echo(json.dumps(row))
        else:
            if not streamed:
                typer.secho(f"--- {i + 1} of {len(texts)} ---", dim=True)
                pages[i].show(tokens, produced_by)
            pages[i].finish()
        if result.status[i]:
            typer.secho(f"Warning: prompt {i}: {result.status[i].name}", fg="red", err=True)
    if not as_json:
        report.print_stats(result, verbose)


@app.command()
def compare(
    prompt: Annotated[
        list[str] | None, typer.Argument(help="Default: some beginnings of code.", show_default=False)
    ] = None,
    batch_file: BatchFile = None,
    target: Target = None,
    draft: Draft = None,
    max_new_tokens: int = 128,
    temperature: Temperature = 0.0,
    seed: Seed = 0,
    num_drafts: Annotated[
        int | None, typer.Option("--num-drafts", "-k", help="Default: the fastest of several.")
    ] = None,
    repeats: Annotated[int, typer.Option(help="Rounds; ratios are taken within each.")] = 5,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
    device: Device = None,
    dtype: Dtype = None,
) -> None:
    """Measures specdec beside transformers: the target alone ("plain") and assisted generation.

    All three continue the same prompts in turns, one at a time, in one process. Assisted generation gets the
    number of drafts a step that is fastest here; so does specdec unless -k is given. Exits with 1 if a greedy
    text of specdec differs from plain's by more than rounding explains.
    """
    if prompt and batch_file is not None:
        _refuse("PROMPT / --batch-file", "both", "at most one of the two")
    texts = _read_texts(prompt or ([] if batch_file else list(CODE_PROMPTS)), batch_file)
    _check_temperature(temperature)
    _check_counts(1, num_drafts=num_drafts, max_new_tokens=max_new_tokens, repeats=repeats)
    with _user_errors(batch_file):
        target_model, draft_model, tokenizer = _load(target, draft, device, dtype)
        from .compare import compare
        from .methods import Settings

        prompts = tokenizer(texts).input_ids
        settings = Settings(max_new_tokens, temperature, seed, repeats, num_drafts)
        with Console(stderr=True).status("") as status:
            comparison = compare(target_model, draft_model, prompts, settings, status.update)
    if as_json:
        typer.echo(json.dumps(comparison.to_dict()))
    else:
        report.print_comparison(comparison, tokenizer, prompts)
    if any(d.verdict == "bug" and "specdec" in d.methods for d in comparison.differences):
        raise typer.Exit(1)


@app.command()
def doctor() -> None:
    """Prints what was built, which backends can run on this machine, and why another cannot."""
    from specdec_kernels import build_info

    info = build_info()
    console = Console()
    for name in ("version", "python", "platform", "torch", "triton", "cuda_device", "native"):
        console.print(f"{name}: {info[name]}")
    table = Table("backend", "device", "runs here", "why not")
    for row in info["backends"]:
        table.add_row(row["backend"], row["device"], "yes" if row["available"] else "no", row["reason"] or "")
    console.print(table)


def _refuse(option: str, given: object, allowed: str) -> NoReturn:
    raise typer.BadParameter(f"got {given}, allowed: {allowed}", param_hint=option)


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")


def _check_counts(smallest: int, **counts: int | None) -> None:
    """Not left to typer, whose message does not say what was given; nor to the library, which would load the
    models first."""
    for name, count in counts.items():
        if count is not None and count < smallest:
            _refuse(_option(name), count, f"an integer >= {smallest}")


def _check_temperature(temperature: float) -> None:
    if not (math.isfinite(temperature) and temperature >= 0):
        _refuse("--temperature", temperature, "0 (greedy) or a finite number > 0")


@contextmanager
def _user_errors(batch_file: Path | None) -> Iterator[None]:
    """The library's errors begin with the name of an argument: they end the command with exit code 2 and name
    the option instead. Any other error is a bug and keeps its traceback."""
    options = ("target", "draft", "num_drafts", "max_new_tokens", "temperature", "seed", "device", "dtype")
    names = {name: _option(name) for name in options}
    names["input_ids"] = "PROMPT" if batch_file is None else "--batch-file"
    try:
        yield
    except (ValueError, OSError) as error:
        argument, _, what = str(error).partition(": ")
        if argument not in names:
            raise
        raise typer.BadParameter(what, param_hint=names[argument]) from error


def _read_texts(texts: list[str], batch_file: Path | None) -> list[str]:
    """The prompts of the arguments or of the file."""
    if batch_file is not None:
        try:
            # Not splitlines, which takes form feeds and others for ends of lines.
            lines = batch_file.read_text("utf-8-sig").split("\n")
        except UnicodeDecodeError as error:
            _refuse("--batch-file", f"{str(batch_file)!r}, which is not UTF-8 ({error})", "UTF-8")
        numbered = [(i, line) for i, line in enumerate(lines, 1) if line.strip()]
        if batch_file.suffix == ".jsonl":
            texts = [_read_json_line(batch_file, i, line) for i, line in numbered]
        else:
            texts = [line for _, line in numbered]
        if not texts:
            _refuse("--batch-file", f"{str(batch_file)!r} without a prompt", "at least one line that is not empty")
    source = "PROMPT" if batch_file is None else "--batch-file"
    for text in texts:
        if not text:
            _refuse(source, "an empty prompt", "at least one character")
        # From a JSON escape, or an argument that is not UTF-8; no tokenizer takes them.
        if any("\ud800" <= c <= "\udfff" for c in text):
            _refuse(source, ascii(text[:60]), "text without lone surrogates")
    return texts


def _read_json_line(batch_file: Path, number: int, line: str) -> str:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):  # not only JSONDecodeError: also numbers and nesting beyond python's
        value = None
    text = value.get("prompt") if isinstance(value, dict) else value
    if not isinstance(text, str):
        given = f"line {number} of {str(batch_file)!r}: {line[:60]!r}"
        _refuse("--batch-file", given, 'a JSON string or {"prompt": "..."} a line')
    return text


def _load(target: str | None, draft: str | None, device: str | None, dtype: str | None) -> Pair:
    if (target is None) != (draft is None):
        given = "--target without --draft" if draft is None else "--draft without --target"
        _refuse("--target / --draft", given, "both, or neither (the embedded pair)")
    import torch
    from transformers.utils import logging

    from .loading import load_embedded_pair, load_pair

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if target is None:
        return load_embedded_pair(dtype or torch.float32, device)
    return load_pair(target, draft, dtype or "auto", device)

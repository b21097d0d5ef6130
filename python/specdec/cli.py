"""The command line: ``specdec generate``, ``specdec compare`` and ``specdec doctor``.

Answers go to stdout, everything else to stderr. Whatever imports torch is imported inside the commands:
``--help`` is to be fast."""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from . import options, report
from .options import refuse
from .streaming import continuation
from .texts import read_texts

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


@app.command()
def generate(
    prompt: Annotated[str | None, typer.Argument(help="The text to continue.", show_default=False)] = None,
    target: options.Target = None,
    draft: options.Draft = None,
    max_new_tokens: int = 128,
    temperature: options.Temperature = 0.0,
    top_k: options.TopK = None,
    top_p: options.TopP = None,
    min_p: options.MinP = None,
    repetition_penalty: options.RepetitionPenalty = None,
    presence_penalty: options.PresencePenalty = None,
    frequency_penalty: options.FrequencyPenalty = None,
    logit_bias: options.LogitBias = None,
    ban: options.Ban = None,
    min_new_tokens: options.MinNewTokens = 0,
    rule: options.AcceptRule = "token",
    seed: options.Seed = 0,
    num_drafts: Annotated[
        int, typer.Option("--num-drafts", "-k", help="K, drafted tokens a step; 0 decodes plainly.")
    ] = 4,
    batch_file: options.BatchFile = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a prompt, a line each.")] = False,
    log_probs: Annotated[bool, typer.Option("--log-probs", help="Add log-probabilities to the JSON.")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Colour tokens by what produced them.")] = False,
    device: options.Device = None,
    dtype: options.Dtype = None,
) -> None:
    """Continues PROMPT, or all prompts of a file in one batch."""
    if (prompt is None) == (batch_file is None):
        refuse("PROMPT / --batch-file", "neither" if prompt is None else "both", "one of the two")
    texts = read_texts([] if prompt is None else [prompt], batch_file)
    if log_probs and not as_json:
        refuse("--log-probs", "--log-probs without --json", "both")
    bias = options.read_logit_bias(logit_bias or ())
    options.check_counts(0, num_drafts=num_drafts, max_new_tokens=max_new_tokens, min_new_tokens=min_new_tokens)
    with options.user_errors(batch_file):
        params = options.read_sampling(
            rule,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            repetition_penalty=repetition_penalty,
            presence_penalty=presence_penalty,
            frequency_penalty=frequency_penalty,
        )
        target_model, draft_model, tokenizer = _load(target, draft, device, dtype)
        from .decoder import SpeculativeDecoder

        prompts = tokenizer(texts).input_ids
        pages = [report.Page(tokenizer, *args, verbose) for args in zip(texts, prompts, strict=True)]
        streamed = not as_json and batch_file is None
        result = SpeculativeDecoder(target_model, draft_model, num_drafts).generate(
            prompts,
            max_new_tokens=max_new_tokens,
            params=params,
            seed=[seed + i for i in range(len(prompts))],
            rule=rule,
            logit_bias=bias,
            banned_tokens=ban,
            min_new_tokens=min_new_tokens,
            log_probs=log_probs,
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
            if log_probs:
                row |= {"log_probs": result.log_probs[i], "raw_log_probs": result.raw_log_probs[i]}
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
    batch_file: options.BatchFile = None,
    target: options.Target = None,
    draft: options.Draft = None,
    max_new_tokens: int = 128,
    temperature: options.Temperature = 0.0,
    top_k: options.TopK = None,
    top_p: options.TopP = None,
    min_p: options.MinP = None,
    repetition_penalty: options.RepetitionPenalty = None,
    rule: options.AcceptRule = "token",
    seed: options.Seed = 0,
    num_drafts: Annotated[
        int | None, typer.Option("--num-drafts", "-k", help="Default: the fastest of several.")
    ] = None,
    repeats: Annotated[int, typer.Option(help="Rounds; ratios are taken within each.")] = 5,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
    device: options.Device = None,
    dtype: options.Dtype = None,
) -> None:
    """Measures specdec beside transformers: the target alone ("plain") and assisted generation.

    All three continue the same prompts in turns, one at a time, in one process. Assisted generation gets the
    number of drafts a step that is fastest here; so does specdec unless -k is given. Exits with 1 if a greedy
    text of specdec differs from plain's by more than rounding explains.
    """
    if prompt and batch_file is not None:
        refuse("PROMPT / --batch-file", "both", "at most one of the two")
    texts = read_texts(prompt or ([] if batch_file else list(CODE_PROMPTS)), batch_file)
    options.check_counts(1, num_drafts=num_drafts, max_new_tokens=max_new_tokens, repeats=repeats)
    with options.user_errors(batch_file):
        filters = {"top_k": top_k, "top_p": top_p, "min_p": min_p}
        law = {"temperature": temperature, **filters, "repetition_penalty": repetition_penalty}
        options.read_sampling(rule, **law)
        target_model, draft_model, tokenizer = _load(target, draft, device, dtype)
        from .compare import compare
        from .methods import Settings

        prompts = tokenizer(texts).input_ids
        counts = {"max_new_tokens": max_new_tokens, "repeats": repeats, "num_drafts": num_drafts}
        settings = Settings(**counts, seed=seed, rule=rule, **law)
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
    for name in ("version", "python", "platform", "torch", "triton", "cuda_device", "native", "native_cuda"):
        console.print(f"{name}: {info[name]}")
    table = Table("backend", "device", "runs here", "why not")
    for row in info["backends"]:
        table.add_row(row["backend"], row["device"], "yes" if row["available"] else "no", row["reason"] or "")
    console.print(table)


def _load(target: str | None, draft: str | None, device: str | None, dtype: str | None) -> Pair:
    if (target is None) != (draft is None):
        given = "--target without --draft" if draft is None else "--draft without --target"
        refuse("--target / --draft", given, "both, or neither (the embedded pair)")
    import torch
    from transformers.utils import logging

    from .loading import load_embedded_pair, load_pair

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if target is None:
        return load_embedded_pair(dtype or torch.float32, device)
    return load_pair(target, draft, dtype or "auto", device)

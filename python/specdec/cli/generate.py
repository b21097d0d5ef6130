"""``specdec generate``: continues prompts."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Annotated

import typer

from .. import options, report
from ..options import refuse
from ..streaming import continuation
from ..texts import read_texts
from . import models
from .profiling import check_trace, traced


def generate(
    prompt: Annotated[str | None, typer.Argument(help="The text to continue.", show_default=False)] = None,
    target: options.Target = None,
    draft: options.Draft = None,
    drafter: options.Drafter = "model",
    exit_layers: options.ExitLayers = None,
    confidence: options.Confidence = 0.0,
    max_new_tokens: int = 128,
    stop: options.Stop = None,
    num_return_sequences: Annotated[int, typer.Option(help="Texts for each prompt.")] = 1,
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
    num_drafts: options.NumDrafts = "4",
    batch_file: options.BatchFile = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a text, a line each.")] = False,
    log_probs: Annotated[bool, typer.Option("--log-probs", help="Add log-probabilities to the JSON.")] = False,
    verbose: options.Verbose = False,
    profile: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write a trace of the generation, for chrome://tracing.")
    ] = None,
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
    options.check_counts(0, max_new_tokens=max_new_tokens, min_new_tokens=min_new_tokens)
    options.check_counts(1, num_return_sequences=num_return_sequences)
    options.check_drafters([drafter], target, draft, exit_layers)
    options.check_confidence(confidence, drafter)
    if "" in (stop := stop or []):
        refuse("--stop", "an empty text", "at least one character")
    if profile is not None:
        check_trace(profile)
    lengths = options.read_num_drafts(num_drafts)
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
        loaded = models.load(target, draft, [drafter], device, dtype)
        from ..decoder import SpeculativeDecoder

        tokenizer, n = loaded.tokenizer, num_return_sequences
        prompts = tokenizer(texts).input_ids
        rows = [(text, ids) for text, ids in zip(texts, prompts, strict=True) for _ in range(n)]
        pages = [report.Page(tokenizer, text, ids, verbose, stop) for text, ids in rows]
        streamed = not as_json and len(rows) == 1 and batch_file is None
        proposer = loaded.drafter(drafter, exit_layers, confidence=confidence)
        decoder = SpeculativeDecoder(loaded.target, proposer, lengths)
        with traced(profile):
            result = decoder.generate(
                prompts,
                max_new_tokens=max_new_tokens,
                params=params,
                seed=[seed + i * n for i in range(len(prompts))],
                rule=rule,
                logit_bias=bias,
                banned_tokens=[*(ban or ()), *loaded.tail],
                min_new_tokens=min_new_tokens,
                log_probs=log_probs,
                num_return_sequences=n,
                stop=options.read_stop(stop, tokenizer),
                on_emit=(lambda e: pages[0].show(e.tokens, e.produced_by)) if streamed else None,
            )
    for i, (text, ids) in enumerate(rows):
        tokens, produced_by = result.tokens[i], result.produced_by[i]
        if as_json:
            # The sequences of a batch share its time.
            stats = dataclasses.replace(result.sequence_stats[i], seconds=result.stats.seconds)
            row = {
                "text": report.cut(continuation(tokenizer, ids, tokens), stop, text),
                "token_ids": tokens,
                "produced_by": [str(producer) for producer in produced_by],
                "stats": stats.to_dict(),
            }
            if log_probs:
                row |= {"log_probs": result.log_probs[i], "raw_log_probs": result.raw_log_probs[i]}
            typer.echo(json.dumps(row))
        else:
            if not streamed:
                typer.secho(f"--- {i + 1} of {len(rows)} ---", dim=True)
                pages[i].show(tokens, produced_by)
            pages[i].finish()
    report.print_troubles(result, n)
    if not as_json:
        report.print_stats(result, verbose)

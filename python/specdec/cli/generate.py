"""``specdec generate``: continues prompts."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Annotated

import typer

from ..detokenize import continuation
from ..stopping import cut_after
from . import job, models, options
from .options import refuse
from .profiling import check_trace, traced
from .prompts import read_texts
from .show import Page, print_stats, print_troubles


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
    output: options.Output = None,
    rows: options.Rows = None,
    max_length: options.MaxLength = None,
    cache_tokens: options.CacheTokens = None,
    cache_bytes: options.CacheBytes = None,
    prefill_chunk: options.PrefillChunk = None,
    no_progress: options.NoProgress = False,
) -> None:
    """Continues PROMPT, or all prompts of a file in one batch.

    With --output, a job: the prompts of a file of any length stream through --rows rows, and each result is written as
    it ends, one JSON object a line. A job that was stopped or killed goes on when the same command is run again. Exit
    codes: 0, all prompts have their texts; 3, some failed and say why; 4, the output could not be written; 130 and 143,
    stopped by Ctrl-C or SIGTERM.
    """
    if (prompt is None) == (batch_file is None):
        refuse("PROMPT / --batch-file", "neither" if prompt is None else "both", "one of the two")
    scheduling = job.Scheduling(rows, max_length, cache_tokens, cache_bytes, prefill_chunk)
    if output is None:
        job.refuse_options(scheduling, no_progress)
        texts = read_texts([] if prompt is None else [prompt], batch_file)
    else:
        others = {"--json": as_json, "--log-probs": log_probs, "--verbose": verbose, "--profile": profile is not None}
        job.check_options(batch_file, output, scheduling, num_return_sequences, others)
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
    sampling = {
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "min_p": min_p,
        "repetition_penalty": repetition_penalty,
        "presence_penalty": presence_penalty,
        "frequency_penalty": frequency_penalty,
    }
    with options.user_errors(batch_file):
        params = options.read_sampling(rule, **sampling)
        if output is not None:
            lines = {"max_new_tokens": max_new_tokens, "min_new_tokens": min_new_tokens, "seed": seed, **sampling}
            lines |= {"stop": tuple(stop), "logit_bias": bias or None, "banned_tokens": tuple(ban or ())}
            drafting = (drafter, exit_layers, confidence, rule, lengths)
            models_at = (target, draft, device, dtype)
            command = job.Command(batch_file, output, lines, *models_at, *drafting, scheduling, not no_progress)
            raise typer.Exit(job.run(command))
        loaded = models.load(target, draft, [drafter], device, dtype)
        from ..decoder import SpeculativeDecoder

        tokenizer, n = loaded.tokenizer, num_return_sequences
        prompts = tokenizer(texts).input_ids
        rows = [(text, ids) for text, ids in zip(texts, prompts, strict=True) for _ in range(n)]
        pages = [Page(tokenizer, text, ids, verbose, stop) for text, ids in rows]
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
                "text": cut_after(continuation(tokenizer, ids, tokens), stop, text),
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
    print_troubles(result, n)
    if not as_json:
        print_stats(result, verbose)

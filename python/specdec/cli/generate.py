"""``specdec generate``: continues prompts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from . import drafting, job, models, options
from .drafters import nodes_of
from .options import refuse
from .profiling import STEPS, check_trace, traced
from .prompts import check_texts, read_lines, read_prompt_file
from .show import Page, print_stats, print_troubles
from .terminal import write

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from ..loop.sequence import Output
    from .batch import Text


def generate(
    prompt: Annotated[str | None, typer.Argument(help="The text to continue.", show_default=False)] = None,
    target: options.Target = None,
    adapter: options.Adapter = None,
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
    rule: options.AcceptRule = None,
    seed: options.Seed = 0,
    num_drafts: options.NumDrafts = None,
    tree: options.Tree = None,
    batch_file: options.BatchFile = None,
    prompt_file: options.PromptFile = None,
    as_json: options.AsJson = False,
    log_probs: options.LogProbs = False,
    top_log_probs: options.TopLogProbs = None,
    prompt_log_probs: options.PromptLogProbs = None,
    verbose: options.Verbose = False,
    profile: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.json.gz",
            help=f"Write a trace of the first {STEPS} steps, for Perfetto or chrome://tracing, and print which "
            "operations took longest.",
        ),
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
    """Continues PROMPT, the prompt in a file (--prompt-file), or all prompts of a file at once (--batch-file). In a
    .jsonl file a line may have chat messages instead of a prompt, and settings of its own.

    With --output it is a job: the prompts of a file of any length stream through --rows rows, and each result is
    written as soon as it ends, one JSON object a line. A job that was stopped or killed goes on when the same command
    is run again. Exit codes: 0, all prompts have their texts; 3, some failed, and their results say why; 4, the output
    could not be written; 130 and 143, stopped by Ctrl-C or SIGTERM.
    """
    given = sum(each is not None for each in (prompt, batch_file, prompt_file))
    if given != 1:
        found = "none" if given == 0 else "several"
        refuse("PROMPT / --batch-file / --prompt-file", found, "one of them")
    scheduling = job.Scheduling(rows, max_length, cache_tokens, cache_bytes, prefill_chunk)
    if output is None:
        job.refuse_options(scheduling, no_progress)
        check_texts([] if prompt is None else [prompt])
    else:
        others = {"--verbose": verbose, "--profile": profile is not None}
        job.check_options(batch_file, output, scheduling, num_return_sequences, others)
    printed = as_json or output is not None
    asked = {"--log-probs": log_probs or None, "--top-log-probs": top_log_probs, "--prompt-log-probs": prompt_log_probs}
    for option, value in asked.items():
        if value is not None and not printed:
            refuse(option, f"{option} without --json", "both, or --output")
    bias = options.read_logit_bias(logit_bias or ())
    options.check_counts(0, max_new_tokens=max_new_tokens, min_new_tokens=min_new_tokens)
    options.check_counts(1, num_return_sequences=num_return_sequences)
    drafting.check_drafters([drafter], target, draft, exit_layers, adapter, tree)
    drafting.check_confidence(confidence, drafter)
    if "" in (stop := stop or []):
        refuse("--stop", "an empty text", "at least one character")
    if profile is not None:
        check_trace(profile)
    nodes = nodes_of(drafter, tree)
    rule = drafting.read_rule(rule, nodes)
    of_job = "4" if output is not None and nodes is None else None
    lengths = drafting.read_num_drafts(num_drafts or of_job, nodes=nodes)
    sampling: dict[str, Any] = {
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "min_p": min_p,
        "repetition_penalty": repetition_penalty,
        "presence_penalty": presence_penalty,
        "frequency_penalty": frequency_penalty,
    }
    with options.user_errors(batch_file, prompt_file):
        params = options.read_sampling(rule, **sampling)
        from ..jobs.lines import JobLine, LineSettings, check_defaults

        defaults = LineSettings(
            max_new_tokens=max_new_tokens,
            min_new_tokens=min_new_tokens,
            seed=seed,
            stop=tuple(stop),
            logit_bias=bias or None,
            banned_tokens=tuple(ban or ()),
            log_probs=log_probs,
            top_log_probs=top_log_probs,
            prompt_log_probs=prompt_log_probs,
            **sampling,
        )
        if prompt_file is not None:
            prompt = read_prompt_file(prompt_file)
        defaults.asked()
        if batch_file is None:
            lines = [JobLine(0, 0, prompt or "", defaults, params)]
        elif output is not None:
            decoding = job.Drafting(drafter, exit_layers, confidence, rule, lengths, nodes)
            models_at = job.ModelsAt(target, draft, device, dtype, adapter)
            command = job.Command(
                batch_file, output, defaults, models_at, decoding, scheduling, not no_progress, as_json
            )
            raise typer.Exit(job.run(command))
        else:
            vocab_size = models.read_vocab_size(target)
            check_defaults(defaults, vocab_size)
            lines = read_lines(batch_file, defaults, vocab_size, num_return_sequences, models.tokenizer_of(target))
            if not printed and any(line.settings.asked() != defaults.asked() for line in lines):
                refuse("--batch-file", "lines that ask for log-probabilities, without --json", "both, or --output")
        loaded = models.load(target, draft, [drafter], device, dtype, adapter)
        from ..decoder import SpeculativeDecoder
        from .batch import decode

        proposer = loaded.drafter(drafter, exit_layers, confidence=confidence)
        decoder = SpeculativeDecoder(loaded.target, proposer, lengths, tree=nodes)
        page: Page | None = None
        if prompt is not None and num_return_sequences == 1 and not as_json:
            page = Page(loaded.tokenizer, prompt, lines[0].tokens(loaded.tokenizer), verbose, stop)
        with traced(profile) as trace:
            listeners = [each for each in (trace, page) if each is not None]

            def on_emit(output: Output) -> None:
                for listener in listeners:
                    listener.on_emit(output)

            decoded = decode(
                decoder,
                loaded.tokenizer,
                lines,
                rule=rule,
                banned=loaded.tail,
                texts_per_line=num_return_sequences,
                on_emit=on_emit,
            )
    if as_json:
        for text in decoded.texts:
            typer.echo(json.dumps(_row(text, loaded.tokenizer)))
    elif page is not None:
        page.finish()
    else:
        for i, text in enumerate(decoded.texts, 1):
            write(f"--- {i} of {len(decoded.texts)} ---\n", dim=True)
            page = Page(loaded.tokenizer, text.line.prompt, text.prompt, verbose, text.line.settings.stop)
            page.show(text.tokens, text.produced_by)
            page.finish()
    print_troubles(decoded.drafter_error, [text.status for text in decoded.texts], num_return_sequences)
    if trace is not None:
        trace.print_operations()
    if not as_json:
        print_stats(decoded.stats, [text.produced_by for text in decoded.texts], verbose, nodes=decoder.nodes)


def _row(text: Text, tokenizer: PreTrainedTokenizerBase) -> dict:
    """The JSON object of one text."""
    from ..jobs.result_line import result_line

    stats = text.stats.to_dict()
    return result_line(
        text.line, text.prompt, text.tokens, text.produced_by, text.finish_reason, text.status, stats, tokenizer, text
    )

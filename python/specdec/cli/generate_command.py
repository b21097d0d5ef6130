"""``specdec generate``: continues prompts."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from . import drafting, models, options
from .given_prompts import ChatOptions
from .job import Job, JobOptions
from .option_groups import command, option
from .profiling import STEPS, check_trace, traced
from .show import Page, print_stats, print_troubles
from .terminal import write
from .user_errors import check_counts, option_name, refuse

if TYPE_CHECKING:
    from ..decoder import Decoded, SpeculativeDecoder
    from ..jobs.lines import JobLine, LineSettings
    from ..loop.sequence import Output
    from .profiling import Trace


@dataclass(frozen=True)
class PromptOptions(ChatOptions):
    """Prompts"""

    system: str | None = option(None, "What the model is told before the prompt, as a chat.", metavar="TEXT")
    batch_file: Path | None = option(
        None,
        'UTF-8, one prompt a line; in a .jsonl file and in standard input (-) a JSON string or {"prompt": ...} a line '
        "(docs/jobs.md). A line says itself whether it has a prompt or messages.",
    )
    prompt_file: Path | None = option(
        None, "A text file that is one prompt as it stands, its last line end included; - is standard input."
    )

    def check(self, prompt: str | None) -> None:
        sources = [each for each in (prompt, self.batch_file, self.prompt_file) if each is not None]
        if len(sources) != 1:
            refuse("PROMPT / --batch-file / --prompt-file", "several" if sources else "none", "one of them")
        options.check_texts([each for each in (prompt, self.system) if each is not None])
        if self.batch_file is not None and (self.chat is not None or self.system is not None):
            given = "one of them with --batch-file"
            refuse("--chat / --no-chat / --system", given, "PROMPT or --prompt-file; lines of a file have messages")
        if self.chat is False and self.system is not None:
            refuse("--no-chat / --system", "both", "one of the two: a text to continue has no system message")

    def line(self, prompt: str | None, at: models.ModelOptions, settings: LineSettings) -> JobLine:
        """The one prompt, as the line of a file would be."""
        from ..chat_template import chat_text
        from ..jobs.lines import JobLine

        text = prompt or _read_prompt(self.prompt_file)
        if chat := self.is_chat(at.tokenizer, own_prompts=self.system is None):
            system = [] if self.system is None else [{"role": "system", "content": self.system}]
            text = chat_text(at.tokenizer, [*system, {"role": "user", "content": text}])
        elif self.system is not None:
            refuse("--system", "a text for a target without a chat template", "none there")
        return JobLine(0, 0, text, chat, settings=settings)


@dataclass(frozen=True)
class TextOptions(options.StopOptions):
    """The text"""

    max_new_tokens: int = option(128, "Of each text.")
    min_new_tokens: int = option(0, "No end of sequence before so many tokens.")
    num_return_sequences: int = option(1, "Texts for each prompt.")
    logit_bias: list[str] | None = option(None, "Added to the logit of a token. Repeatable.", metavar="ID=VALUE")
    ban: list[int] | None = option(None, "A token that is never generated. Repeatable.", metavar="ID")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_counts(0, max_new_tokens=self.max_new_tokens, min_new_tokens=self.min_new_tokens)
        check_counts(1, num_return_sequences=self.num_return_sequences)

    def settings(self) -> dict[str, Any]:
        """As ``LineSettings`` has them."""
        names = ("max_new_tokens", "min_new_tokens", "seed")
        lists = {"stop": (*(self.stop or ()),), "banned_tokens": (*(self.ban or ()),)}
        bias = read_logit_bias(self.logit_bias or ()) or None
        own = {name: getattr(self, name) for name in names}
        return {**own, **lists, "logit_bias": bias, "json_schema": self.read_schema(), "regex": self.regex}


@dataclass(frozen=True)
class LogProbOptions:
    """Log-probabilities"""

    log_probs: bool = option(False, "Add log-probabilities of the tokens to the JSON.", "--log-probs")
    top_log_probs: int | None = option(
        None, "The same, and of every token its rank and the N most likely ones, up to 20.", metavar="N"
    )
    prompt_log_probs: int | None = option(
        None, "Add the same of the prompt's tokens, each given those before it.", metavar="N"
    )


@dataclass(frozen=True)
class LineOptions:
    """What a line of a file may set for itself."""

    sampling: options.SamplingOptions
    text: TextOptions
    log_probs: LogProbOptions

    def settings(self) -> LineSettings:
        from ..jobs.lines import LineSettings, check_defaults

        settings = LineSettings(**self.text.settings(), **vars(self.sampling), **vars(self.log_probs))
        check_defaults(settings)
        return settings


@dataclass(frozen=True)
class ShownOptions:
    """Results"""

    as_json: bool = options.as_json(
        "Print results, one JSON object a text, a line each. With --output: those that it writes."
    )
    profile: Path | None = option(
        None,
        f"Write a trace of the first {STEPS} steps, for Perfetto or chrome://tracing, and print which operations took "
        "longest.",
        metavar="FILE.json.gz",
    )


@command
def generate(
    given: PromptOptions,
    at: models.DividedModelOptions,
    drafts: drafting.GenerateDrafts,
    of_lines: LineOptions,
    shown: ShownOptions,
    job: JobOptions,
    prompt: Annotated[str | None, typer.Argument(help="What is answered or continued.", show_default=False)] = None,
) -> None:
    """Answers PROMPT where the target has a chat template, and continues it elsewhere; or the prompt in a file
    (--prompt-file), or all prompts of a file at once (--batch-file). In a .jsonl file a line may have chat messages
    instead of a prompt, and settings of its own.

    With --output it is a job: the prompts of a file of any length stream through --rows rows, and each result is
    written as soon as it ends, one JSON object a line. A job that was stopped or killed goes on when the same command
    is run again. Exit codes: 0, all prompts have their texts; 3, some failed, and their results say why; 4, the output
    could not be written; 130 and 143, stopped by Ctrl-C or SIGTERM.
    """
    at.join()
    text = of_lines.text
    given.check(prompt)
    job.check(given.batch_file, text.num_return_sequences, verbose=text.verbose, profile=shown.profile is not None)
    printed = shown.as_json or job.output is not None
    for name, value in vars(of_lines.log_probs).items():
        if value is not None and value is not False and not printed:
            refuse(option_name(name), f"{option_name(name)} without --json", "both, or --output")
    drafts = drafts.chosen(at) if job.output is None else drafts.for_a_job(at)
    drafts.check(at)
    if shown.profile is not None:
        check_trace(shown.profile)
    num_drafts = drafting.read_num_drafts(drafts.num_drafts, nodes=drafts.nodes)
    of_lines.sampling.params(drafts.accept_rule)  # checks them with the rule
    defaults = of_lines.settings()
    if given.batch_file is not None and job.output is not None:
        whole = Job(given.batch_file, defaults, at, drafts, job, shown.as_json)
        raise typer.Exit(whole.run())
    if given.batch_file is not None:
        lines = _read_lines(given.batch_file, defaults, at, text.num_return_sequences, printed)
    else:
        lines = [given.line(prompt, at, defaults)]
    loaded = models.load(at, [drafts.drafter])
    proposer = drafts.made(loaded)
    decoder = loaded.decoder(proposer, num_drafts, drafts.nodes)
    page: Page | None = None
    if given.batch_file is None and text.num_return_sequences == 1 and not shown.as_json:
        page = _page(loaded, lines[0], lines[0].tokens(loaded.tokenizer), text.verbose)
    with traced(shown.profile) as trace:
        decoded = _decode(decoder, loaded, lines, drafts.accept_rule, text.num_return_sequences, trace, page)
    if shown.as_json:
        _print_json(decoded, loaded)
    elif page is not None:
        page.finish()
    else:
        _print_texts(decoded, loaded, text.verbose)
    print_troubles(decoded.drafter_error, decoded.sequences, text.num_return_sequences)
    if trace is not None:
        trace.print_operations()
    if not shown.as_json:
        produced_by = [each.produced_by for each in decoded.sequences]
        print_stats(decoded.stats, produced_by, text.verbose, nodes=decoder.nodes)


def _read_lines(
    path: Path, defaults: LineSettings, at: models.ModelOptions, texts: int, printed: bool
) -> list[JobLine]:
    from ..jobs.input import read_batch
    from ..jobs.lines import LineReader, check_defaults

    check_defaults(defaults, at.vocab_size)
    lines = read_batch(LineReader(path, defaults, at.vocab_size, texts, lambda: at.tokenizer))
    if not printed and any(line.settings.asked != defaults.asked for line in lines):
        refuse("--batch-file", "lines that ask for log-probabilities, without --json", "both, or --output")
    return lines


def _read_prompt(path: Path | None) -> str:
    from ..jobs.input import read_prompt

    assert path is not None
    return read_prompt(path)


def _decode(
    decoder: SpeculativeDecoder,
    loaded: models.Models,
    lines: Sequence[JobLine],
    rule: str,
    texts: int,
    *listeners: Trace | Page | None,
) -> Decoded:
    from ..jobs.run import RequestMaker

    def on_emit(output: Output) -> None:
        for listener in listeners:
            if listener is not None:
                listener.on_emit(output)

    make = RequestMaker(loaded.tokenizer, loaded.tail, decoder.grammar_compiler)
    return decoder.decode([make(line, i) for line in lines for i in range(texts)], rule, on_emit)


def _print_json(decoded: Decoded, loaded: models.Models) -> None:
    from ..jobs.result_line import result_line

    for each in decoded.sequences:
        stats = replace(each.stats, seconds=decoded.stats.seconds).to_dict()  # of the whole batch
        line: Any = each.request.id
        typer.echo(json.dumps(result_line(line, each, stats, loaded.tokenizer)))


def _print_texts(decoded: Decoded, loaded: models.Models, verbose: bool) -> None:
    for i, each in enumerate(decoded.sequences, 1):
        line: Any = each.request.id
        write(f"--- {i} of {len(decoded.sequences)} ---\n", dim=True)
        page = _page(loaded, line, each.request.prompt, verbose)
        page.show(each.tokens, each.produced_by)
        page.finish()


def _page(loaded: models.Models, line: JobLine, prompt: Sequence[int], verbose: bool) -> Page:
    """Shows a prompt and its continuation, or of a chat the answer alone: its prompt is the template's text."""
    return Page(loaded.tokenizer, line.prompt, prompt, verbose, line.settings.stop, shows_prompt=not line.chat)


def read_logit_bias(given: Sequence[str]) -> dict[int, float]:
    bias: dict[int, float] = {}
    for text in given:
        before, _, after = text.partition("=")
        try:
            token, value = int(before), float(after)
        except ValueError:
            token, value = 0, math.nan
        if math.isnan(value) or token in bias:
            refuse("--logit-bias", repr(text), "ID=VALUE, an integer and a number, each ID once")
        bias[token] = value
    return bias

"""``specdec chat``: a conversation on the terminal, or piped in."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

from . import drafting, models, options
from .option_groups import command, option
from .terminal import remark
from .user_errors import check_counts

if TYPE_CHECKING:
    from .talk import Talk


@dataclass(frozen=True)
class AnswerOptions(options.StopOptions):
    """Answers"""

    max_new_tokens: int = option(256, "Of an answer.")


@command
def chat(
    at: models.DividedModelOptions,
    drafts: drafting.DraftOptions,
    sampling: options.SamplingOptions,
    answers: AnswerOptions,
) -> None:
    """Talks with the target, which remembers the conversation. It uses the chat template of the tokenizer; without one,
    everything is one long text.

    Answers are streamed, and followed by their speed and acceptance. /help lists the commands, which change drafter, k,
    tree, rule and sampling between answers. Ctrl-C stops an answer; /exit or the end of input ends the chat.
    """
    check_counts(1, max_new_tokens=answers.max_new_tokens)
    grammar = answers.grammar()
    at.join()
    if grammar is not None:
        from ..sampling.grammar import check_source

        check_source(grammar, grammar.kind)
    drafts = drafts.chosen(at)
    drafting.check_drafters([drafts.drafter], at, drafts.exit_layers, drafts.tree)
    params = sampling.params(drafting.read_rule(drafts.rule, drafts.tree))
    num_drafts = None if drafts.num_drafts is None else drafting.read_num_drafts(drafts.num_drafts)
    from .talk import ChatSettings, Talk

    settings = ChatSettings(
        params=params, seed=answers.seed, max_new_tokens=answers.max_new_tokens, verbose=answers.verbose,
        stop=answers.stop or [], rule=drafts.rule, drafter=drafts.drafter, num_drafts=num_drafts,
        exit_layers=drafts.exit_layers, tree=drafts.tree, grammar=grammar,
    )  # fmt: skip
    # A later answer may use another drafter, so the draft of the embedded pair is loaded in any case.
    _converse(Talk(models.load(at, [drafts.drafter]), settings))


def _converse(talk: Talk) -> None:
    """Reads lines from standard input, with a prompt on a terminal, until its end or /exit."""
    from .talk import Done

    interactive = sys.stdin.isatty()
    if interactive:
        remark("/help lists commands, Ctrl-D ends", "dim")
    while True:
        try:
            line = input("> ") if interactive else sys.stdin.readline()
            if not interactive and not line:
                break
            talk.take(line.rstrip("\n"))
        except KeyboardInterrupt:
            remark("(/exit or Ctrl-D ends)", "dim")
        except (EOFError, Done):
            break

"""``specdec chat``: a conversation on the terminal, or piped in."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

import typer

from . import drafting, models, options
from .option_groups import command, option
from .talk import ChatSettings, converse
from .terminal import visible
from .user_errors import check_counts, option_name, refuse

if TYPE_CHECKING:
    from .remote_chat import RemoteTalk


@dataclass(frozen=True)
class AnswerOptions(options.StopOptions):
    """Answers"""

    max_new_tokens: int = option(256, "Of an answer.")


@dataclass(frozen=True)
class ServerOptions:
    """A model of a server"""

    url: str | None = option(
        None, "Of a server with OpenAI's interface: http://127.0.0.1:8000/v1. --target is then a name of a model there."
    )
    api_key: str | None = option(
        None, "Of that server. Other users see it in the list of processes, unlike the variable SPECDEC_API_KEY."
    )

    def talk(self, model: str | None, settings: ChatSettings) -> RemoteTalk:
        """Raises typer.BadParameter if there is nobody to talk with."""
        from .remote import Remote, RemoteError
        from .remote_chat import RemoteTalk

        try:
            remote = Remote(self.url or "", self.api_key or os.environ.get("SPECDEC_API_KEY"))
            return RemoteTalk(remote, model, settings)
        except RemoteError as error:
            raise typer.BadParameter(visible(str(error)), param_hint="--url") from error


@command
def chat(
    at: models.DividedModelOptions,
    drafts: drafting.DraftOptions,
    sampling: options.SamplingOptions,
    answers: AnswerOptions,
    server: ServerOptions,
) -> None:
    """Talks with the target, which remembers the conversation. It uses the chat template of the tokenizer; without one,
    everything is one long text.

    Answers are streamed, and followed by their speed and acceptance. /help lists the commands, which change drafter, k,
    tree, rule and sampling between answers. Ctrl-C stops an answer; /exit or the end of input ends the chat.

    With --url, the model is a server's: specdec serve, or another one with OpenAI's interface.
    """
    check_counts(1, max_new_tokens=answers.max_new_tokens)
    settings = ChatSettings(
        sampling, answers.seed, answers.max_new_tokens, answers.verbose, answers.stop or [], drafts.rule
    )
    settings.grammar = answers.grammar()
    if server.url is not None:
        settings.drafter = drafts.drafter or None  # None: the server's own
        without = {
            "adapter": at.adapter,
            "draft": at.draft,
            "draft_bits": at.draft_bits,
            "load_in_8bit": at.load_in_8bit or None,
            "load_in_4bit": at.load_in_4bit or None,
            "exit_layers": drafts.exit_layers,
            "tree": drafts.tree,
            "tp": at.tp,
        }
        for name, value in {**without, **vars(at.machine)}.items():
            if value is not None:
                refuse(option_name(name), f"{value} with --url", "this option without --url")
        if drafts.num_drafts not in (None, "auto"):
            settings.num_drafts = drafting.read_num_drafts(drafts.num_drafts)
        converse(server.talk(at.target, settings))
        return
    at.join()
    if server.api_key is not None:
        refuse("--api-key", "a key", "one with --url")
    if settings.grammar is not None:
        from ..sampling.grammar import check_source

        check_source(settings.grammar, settings.grammar.kind)
    drafts = drafts.chosen(at)
    settings.drafter, settings.rule = drafts.drafter, drafts.rule
    settings.exit_layers, settings.tree = drafts.exit_layers, drafts.tree
    drafting.check_drafters([drafts.drafter], at, drafts.exit_layers, drafts.tree)
    if drafts.num_drafts is not None:
        settings.num_drafts = drafting.read_num_drafts(drafts.num_drafts)
    settings.params = sampling.params(drafting.read_rule(drafts.rule, drafts.tree))
    from .local_chat import LocalTalk

    # A later answer may use another drafter, so the draft of the embedded pair is loaded in any case.
    converse(LocalTalk(models.load(at, [drafts.drafter]), settings))

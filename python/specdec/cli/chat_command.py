"""``specdec chat``: a conversation on the terminal, or piped in."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass
from types import FrameType
from typing import TYPE_CHECKING

import typer

from . import drafting, models, options
from .drafters import HEAD, NAMES, nodes_of
from .option_groups import command, option
from .show import Page, print_stats, print_troubles
from .slash_commands import ChatCommands, ChatSettings, Totals, converse, obey_or_answer
from .terminal import remark, visible
from .user_errors import check_counts, option_name, refuse

if TYPE_CHECKING:
    from ..decoder import SpeculativeDecoder
    from ..drafters.protocol import Drafter
    from ..drafters.suffix import SuffixMemory
    from ..result import GenerationResult
    from ..stopping import StoppingCriteria
    from .remote_chat import RemoteTalk


@dataclass(frozen=True)
class ChatDrafts(drafting.DraftOptions):
    """Drafting"""

    drafter: str | None = option(  # type: ignore[assignment]
        None, f"Who proposes tokens: {', '.join(NAMES)}, or {HEAD}. Default: model; with --url, the server's."
    )


@dataclass(frozen=True)
class AnswerOptions(options.StopOptions):
    """Answers"""

    max_new_tokens: int = option(256)


@dataclass(frozen=True)
class ServerOptions:
    """A model of a server"""

    url: str | None = option(
        None,
        "Of a server with OpenAI's interface: http://127.0.0.1:8000/v1. --target is then a name of a model there.",
    )
    api_key: str | None = option(
        None, "Of that server. Other users see it in the list of processes, unlike the variable SPECDEC_API_KEY."
    )


@command
def chat(
    at: models.ModelOptions,
    drafts: ChatDrafts,
    sampling: options.SamplingOptions,
    answers: AnswerOptions,
    server: ServerOptions,
    machine: options.MachineOptions,
) -> None:
    """Talks with the target, which remembers the conversation. It uses the chat template of the tokenizer; without one,
    everything is one long text.

    Answers are streamed, and followed by their speed and acceptance. /help lists the commands, which change drafter, k,
    tree, rule and sampling between answers. Ctrl-C stops an answer; /exit or the end of input ends the chat.

    With --url, the model is a server's: specdec serve, or another one with OpenAI's interface.
    """
    check_counts(1, max_new_tokens=answers.max_new_tokens)
    if server.url is not None:
        without = {"adapter": at.adapter, "draft": at.draft, "exit_layers": drafts.exit_layers, "tree": drafts.tree}
        for name, value in {**without, **vars(machine)}.items():
            if value is not None:
                refuse(option_name(name), f"{value} with --url", "this option without --url")
        converse(remote_talk(server, at.target, drafts, sampling, answers).take)
        return
    if server.api_key is not None:
        refuse("--api-key", "a key", "one with --url")
    drafter = drafts.drafter or "model"
    drafting.check_drafters([drafter], at, drafts.exit_layers, drafts.tree)
    num_drafts = None if drafts.num_drafts is None else drafting.read_num_drafts(drafts.num_drafts)
    params = sampling.params(drafting.read_rule(drafts.rule, drafts.tree))
    # A later answer may use another drafter, so the draft of the embedded pair is loaded in any case.
    loaded = models.load(at, machine, [drafter])
    of_answers = (params, answers.seed, answers.max_new_tokens, answers.verbose)
    settings = ChatSettings(*of_answers, drafts.rule, drafter, drafts.exit_layers, drafts.tree, num_drafts)
    converse(Talk(loaded, settings, answers.stop or []).take)


def remote_talk(
    server: ServerOptions,
    model: str | None,
    drafts: ChatDrafts,
    sampling: options.SamplingOptions,
    answers: AnswerOptions,
) -> RemoteTalk:
    """Raises typer.BadParameter if there is nobody to talk with."""
    from .remote import Remote, RemoteError
    from .remote_chat import RemoteSettings, RemoteTalk

    given = drafts.num_drafts
    num_drafts = None if given in (None, "auto") else drafting.read_num_drafts(given)
    assert num_drafts is None or isinstance(num_drafts, int)
    of_answers = (sampling, answers.seed, answers.max_new_tokens, answers.verbose)
    settings = RemoteSettings(*of_answers, drafts.drafter, drafts.rule, num_drafts)
    try:
        remote = Remote(server.url or "", server.api_key or os.environ.get("SPECDEC_API_KEY"))
        return RemoteTalk(remote, model, settings, answers.stop or [])
    except RemoteError as error:
        raise typer.BadParameter(visible(str(error)), param_hint="--url") from error


class Interrupt:
    """Inside the block the first Ctrl-C ends the text with the tokens of the next report, as any stop does, so that
    nothing that was counted is lost. A second one raises KeyboardInterrupt at once.

    Args:
        stop: what else ends the text; None: nothing.
    """

    def __init__(self, stop: StoppingCriteria | None):
        self._stop, self.pressed = stop, False

    def __enter__(self) -> None:
        self._before = signal.signal(signal.SIGINT, self._take)

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGINT, self._before)

    def _take(self, number: int, frame: FrameType | None) -> None:
        self.pressed = True
        signal.signal(signal.SIGINT, signal.default_int_handler)

    def first_end(self, sequence: int, text: list[int], new: int) -> int | None:
        """As ``StoppingCriteria`` has it."""
        kept = None if self._stop is None else self._stop.first_end(sequence, text, new)
        return new if kept is None and self.pressed else kept


class Talk:
    """A conversation, the settings of its next answer, and the drafter that is used for it."""

    def __init__(self, loaded: models.Models, settings: ChatSettings, stop: list[str]):
        from ..stopping import StopStrings
        from .conversation import Conversation

        self._models, self._settings, self._stop = loaded, settings, stop
        self._stopping = StopStrings(loaded.tokenizer, stop) if stop else None
        self._memory: SuffixMemory | None = None
        self._conversation, self._totals = Conversation(loaded.tokenizer), Totals()
        self._commands = ChatCommands(settings, self._conversation, self._totals, self._use_drafter)
        self._use_drafter(settings.drafter, settings.exit_layers, settings.tree)

    def take(self, line: str) -> None:
        """Obeys a command or answers a message. Errors are printed and change nothing."""
        obey_or_answer(line, self._commands.run, self._answer)

    def _use_drafter(self, name: str, exit_layers: int | None, tree: int | None) -> None:
        if name == "suffix" and self._memory is None:
            from ..drafters.suffix import SuffixMemory

            self._memory = SuffixMemory()
        drafter = self._models.drafter(name, exit_layers, self._memory if name == "suffix" else None)
        # Refuses a drafter that cannot draft for this target, or that proposes no trees.
        self._decoder = self._decoder_of(drafter, nodes_of(name, tree))

    def _decoder_of(self, drafter: Drafter | None, nodes: int | None) -> SpeculativeDecoder:
        from ..decoder import SpeculativeDecoder

        return SpeculativeDecoder(self._models.target, drafter, self._settings.drafts(nodes), tree=nodes)

    def _answer(self, said: str) -> None:
        s, tokenizer = self._settings, self._models.tokenizer
        nodes = nodes_of(s.drafter, s.tree)
        if self._decoder.num_drafts != s.drafts(nodes):  # otherwise it is kept, with what it has learned of steps
            self._decoder = self._decoder_of(self._decoder.drafter, nodes)
        prompt = self._conversation.prompt(said)
        page = Page(tokenizer, "", prompt, s.verbose, self._stop, shows_prompt=False)

        result: GenerationResult | None = None
        interrupt = Interrupt(self._stopping)
        try:
            with interrupt:
                result = self._decoder.generate(
                    [prompt],
                    None,
                    s.max_new_tokens,
                    s.params,
                    s.seed,
                    rule=drafting.read_rule(s.rule, nodes),
                    banned_tokens=self._models.tail,
                    stop=interrupt,
                    on_emit=page.on_emit,
                )
        except KeyboardInterrupt:
            pass  # the part of the answer that was shown counts
        page.finish()
        self._conversation.add(said, page.shown)
        s.next_seed()
        if interrupt.pressed:
            remark("(stopped)", "dim")
        if result is None:
            return
        self._totals.answers += 1
        self._totals.stats.append(result.stats)
        print_troubles(result.drafter_error, result.status)
        print_stats(result.stats, result.produced_by, s.verbose, with_speed=True, nodes=self._decoder.nodes)

"""``specdec chat``: a conversation on the terminal, or piped in."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import typer

from . import drafting, models, options
from .chat_commands import ChatCommands, ChatSettings, Totals
from .drafters import nodes_of
from .interrupt import Interrupt
from .show import Page, print_stats, print_troubles
from .talking import converse, obey_or_answer
from .terminal import remark, visible

if TYPE_CHECKING:
    from ..decoder import SpeculativeDecoder
    from ..drafters.protocol import Drafter
    from ..drafters.suffix import SuffixMemory
    from ..result import GenerationResult
    from .remote_chat import RemoteTalk


def chat(
    target: options.Target = None,
    adapter: options.Adapter = None,
    draft: options.Draft = None,
    drafter: options.ChatDrafter = None,
    exit_layers: options.ExitLayers = None,
    max_new_tokens: int = 256,
    temperature: options.Temperature = 0.0,
    top_k: options.TopK = None,
    top_p: options.TopP = None,
    min_p: options.MinP = None,
    repetition_penalty: options.RepetitionPenalty = None,
    presence_penalty: options.PresencePenalty = None,
    frequency_penalty: options.FrequencyPenalty = None,
    rule: options.AcceptRule = None,
    seed: options.Seed = 0,
    num_drafts: options.NumDrafts = None,
    tree: options.Tree = None,
    stop: options.Stop = None,
    verbose: options.Verbose = False,
    url: options.Url = None,
    api_key: options.ApiKey = None,
    device: options.Device = None,
    dtype: options.Dtype = None,
) -> None:
    """Talks with the target, which remembers the conversation. It uses the chat template of the tokenizer; without one,
    everything is one long text.

    Answers are streamed, and followed by their speed and acceptance. /help lists the commands, which change drafter, k,
    tree, rule and sampling between answers. Ctrl-C stops an answer; /exit or the end of input ends the chat.

    With --url, the model is a server's: specdec serve, or another one with OpenAI's interface.
    """
    options.check_counts(1, max_new_tokens=max_new_tokens)
    sampling = {
        "temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p,
        "repetition_penalty": repetition_penalty, "presence_penalty": presence_penalty,
        "frequency_penalty": frequency_penalty,
    }  # fmt: skip
    if "" in (stop := stop or []):
        options.refuse("--stop", "an empty text", "at least one character")
    if url is not None:
        options.refuse_with(
            "--url", adapter=adapter, draft=draft, exit_layers=exit_layers, tree=tree, device=device, dtype=dtype
        )
        talking = (seed, max_new_tokens, verbose, drafter, rule, num_drafts, stop)
        converse(remote_talk(url, api_key, target, sampling, *talking).take)
        return
    if api_key is not None:
        options.refuse("--api-key", "a key", "one with --url")
    drafter = drafter or "model"
    drafting.check_drafters([drafter], target, draft, exit_layers, adapter, tree)
    lengths = None if num_drafts is None else drafting.read_num_drafts(num_drafts)
    with options.user_errors():
        params = options.read_sampling(drafting.read_rule(rule, tree), **sampling)
        # A later answer may use another drafter, so the draft of the embedded pair is loaded in any case.
        loaded = models.load(target, draft, [drafter], device, dtype, adapter)
        settings = ChatSettings(params, seed, max_new_tokens, verbose, rule, drafter, exit_layers, tree, lengths)
        talk = Talk(loaded, settings, stop)
    with options.without_warnings():
        converse(talk.take)


def remote_talk(
    url: str, api_key: str | None, model: str | None, sampling: dict[str, Any], seed: int, max_new_tokens: int,
    verbose: bool, drafter: str | None, rule: str | None, num_drafts: str | None, stop: list[str],
) -> RemoteTalk:  # fmt: skip
    """Raises typer.BadParameter if there is nobody to talk with."""
    from .remote import Remote, RemoteError
    from .remote_chat import RemoteSettings, RemoteTalk, Sampling

    lengths = None if num_drafts in (None, "auto") else drafting.read_num_drafts(num_drafts)
    assert lengths is None or isinstance(lengths, int)
    settings = RemoteSettings(Sampling(**sampling), seed, max_new_tokens, verbose, drafter, rule, lengths)
    try:
        return RemoteTalk(Remote(url, api_key or os.environ.get("SPECDEC_API_KEY")), model, settings, stop)
    except RemoteError as error:
        raise typer.BadParameter(visible(str(error)), param_hint="--url") from error


class Talk:
    """A conversation, the settings of its next answer, and the drafter that is used for it."""

    def __init__(self, loaded: models.Models, settings: ChatSettings, stop: list[str]):
        from .conversation import Conversation

        self._models, self._settings, self._stop = loaded, settings, stop
        self._stopping = options.read_stop(stop, loaded.tokenizer)
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

"""``specdec chat``: a conversation on the terminal, or piped in."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from . import drafting, models, options
from .chat_commands import ChatCommands, ChatSettings, Done, Totals
from .drafters import nodes_of
from .interrupt import Interrupt
from .show import Page, print_stats, print_troubles
from .terminal import remark

if TYPE_CHECKING:
    from ..decoder import SpeculativeDecoder
    from ..drafters.protocol import Drafter
    from ..drafters.suffix import SuffixMemory
    from ..result import GenerationResult


def chat(
    target: options.Target = None,
    adapter: options.Adapter = None,
    draft: options.Draft = None,
    drafter: options.Drafter = "model",
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
    device: options.Device = None,
    dtype: options.Dtype = None,
) -> None:
    """Talks with the target, which remembers the conversation. It uses the chat template of the tokenizer; without one,
    everything is one long text.

    Answers are streamed, and followed by their speed and acceptance. /help lists the commands, which change drafter, k,
    tree, rule and sampling between answers. Ctrl-C stops an answer; /exit or the end of input ends the chat.
    """
    options.check_counts(1, max_new_tokens=max_new_tokens)
    drafting.check_drafters([drafter], target, draft, exit_layers, adapter, tree)
    if "" in (stop := stop or []):
        options.refuse("--stop", "an empty text", "at least one character")
    lengths = None if num_drafts is None else drafting.read_num_drafts(num_drafts)
    with options.user_errors():
        params = options.read_sampling(
            drafting.read_rule(rule, tree),
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            repetition_penalty=repetition_penalty,
            presence_penalty=presence_penalty,
            frequency_penalty=frequency_penalty,
        )
        # A later answer may use another drafter, so the draft of the embedded pair is loaded in any case.
        loaded = models.load(target, draft, [drafter], device, dtype, adapter)
        settings = ChatSettings(params, rule, seed, max_new_tokens, drafter, exit_layers, tree, lengths, verbose)
        talk = Talk(loaded, settings, stop)
    interactive = sys.stdin.isatty()
    if interactive:
        remark("/help lists commands, Ctrl-D ends", "dim")
    with options.without_warnings():
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
        if not line.strip():
            return
        try:
            if line.startswith("/"):
                remark(self._commands.run(line), "dim")
            else:
                self._answer(line)
        except ValueError as error:
            remark(f"{line.split()[0] if line.startswith('/') else 'not answered'}: {error}", "red")

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
        s.seed = s.seed + 1 if s.seed < 2**63 - 1 else -(2**63)
        if interrupt.pressed:
            remark("(stopped)", "dim")
        if result is None:
            return
        self._totals.answers += 1
        self._totals.stats.append(result.stats)
        print_troubles(result.drafter_error, result.status)
        print_stats(result.stats, result.produced_by, s.verbose, with_speed=True, nodes=self._decoder.nodes)

"""``specdec chat`` with a model in this process."""

from __future__ import annotations

from collections.abc import Callable

from ..decoder import SpeculativeDecoder
from ..drafters.protocol import Drafter
from ..drafters.suffix import SuffixMemory
from ..loop.draft_length import AdaptiveDrafts
from ..loop.request import Request
from ..sampling.grammar import Grammar
from ..stopping import StoppingCriteria, StopStrings
from . import drafting, models
from .conversation import Conversation
from .drafters import HEAD, NAMES, is_head, nodes_of
from .interrupt import stop_once
from .one_row import OneRow
from .show import Page, print_stats, print_troubles
from .talk import ChatSettings, Talk, Totals, read_integer


class StopOr:
    """Stopping criteria that end the text where others do, or where Ctrl-C was pressed, with the tokens of the next
    report."""

    def __init__(self, others: StoppingCriteria | None, pressed: Callable[[], bool]):
        self._others, self._pressed = others, pressed

    def first_end(self, sequence: int, text: list[int], new: int) -> int | None:
        """As ``StoppingCriteria`` has it."""
        kept = None if self._others is None else self._others.first_end(sequence, text, new)
        return new if kept is None and self._pressed() else kept


class LocalTalk(Talk):
    """A conversation with loaded models, and the drafter of its next answer."""

    said: Conversation

    def __init__(self, loaded: models.Models, settings: ChatSettings):
        own = {
            "drafter": (self._drafter, f"NAME: {', '.join(NAMES)}; early-exit LAYERS"),
            "k": (self._k, "N or auto: drafted tokens a step, or of a path through a tree; 0 decodes plainly"),
            "tree": (self._tree, "N or off: each step verifies a tree of up to N drafts"),
            "rule": (self._rule, "token, block or coupled"),
        }
        super().__init__(settings, Conversation(loaded.tokenizer), own)
        self._models, self._memory = loaded, SuffixMemory()
        self._stopping = StopStrings(loaded.tokenizer, settings.stop) if settings.stop else None
        self._grammar: Grammar | None = None
        self._row: OneRow | None = None  # of the decoder and the rule of the last answer
        self._use(settings.drafter or "model", settings.exit_layers, settings.tree)
        if settings.grammar is not None:
            self._grammar = self._decoder.grammar_compiler(loaded.tokenizer).compile(settings.grammar)

    def _use(self, name: str, exit_layers: int | None, tree: int | None) -> None:
        """Changes to a drafter. Raises ValueError, and changes nothing, if it cannot draft for this target, or proposes
        no trees."""
        drafter = self._models.drafter(name, exit_layers, self._memory if name == "suffix" else None)
        self._decoder = self._decoder_of(drafter, nodes_of(name, tree))
        self.settings.drafter, self.settings.exit_layers, self.settings.tree = name, exit_layers, tree

    def _decoder_of(self, drafter: Drafter | None, nodes: int | None) -> SpeculativeDecoder:
        return self._models.decoder(drafter, self._num_drafts(nodes), nodes)

    def _num_drafts(self, nodes: int | None) -> int | AdaptiveDrafts:
        given = self.settings.num_drafts
        return drafting.read_num_drafts(None, nodes=nodes) if given is None else given

    @property
    def _nodes(self) -> int | None:
        return nodes_of(self.settings.drafter or "model", self.settings.tree)

    def answer(self, said: str) -> None:
        s, nodes = self.settings, self._nodes
        drafter = self._decoder.drafter
        # Otherwise the decoder is kept, with what it knows of steps.
        if drafter is not None and self._decoder.num_drafts != self._num_drafts(nodes):
            self._decoder = self._decoder_of(drafter, nodes)
        prompt = self.said.prompt(said)
        page = Page(self._models.tokenizer, "", prompt, s.verbose, s.stop, shows_prompt=False)
        rule, result = drafting.read_rule(s.rule, nodes), None
        if self._row is None or (self._row.decoder, self._row.rule) != (self._decoder, rule):
            self._row = OneRow(self._decoder, rule)
        with stop_once() as pressed:
            stop, banned = StopOr(self._stopping, pressed), self._models.tail
            asked = Request(
                prompt, s.max_new_tokens, s.params, s.seed, stop=stop, banned_tokens=banned, grammar=self._grammar
            )
            try:
                result = self._row.decode(asked, page.on_emit)
            except KeyboardInterrupt:
                pass  # the part of the answer that was shown counts
        page.finish()
        self.ended(said, page.shown, pressed())
        if result is None:
            return
        of = result.stats
        (sequence,) = result.sequences
        self.totals.add(Totals(1, of.emitted, of.seconds["total"], of.steps, of.drafted, of.accepted, of.tested))
        print_troubles(result.drafter_error, result.sequences)
        print_stats(of, [sequence.produced_by], s.verbose, with_speed=True, nodes=self._decoder.nodes)

    def chosen(self) -> str:
        s, nodes, k = self.settings, self._nodes, self._num_drafts(self._nodes)
        exits = "" if s.exit_layers is None else f" {s.exit_layers}"
        tree = "" if nodes is None else f", tree {nodes}"
        drafts = k if isinstance(k, int) else "auto"
        return f"drafter {s.drafter}{exits}, k {drafts}{tree}, rule {drafting.read_rule(s.rule, nodes)}"

    def _drafter(self, argument: str) -> str:
        name, _, layers = argument.partition(" ")
        if name not in NAMES and not is_head(name):
            raise ValueError(f"got {name!r}, allowed: {', '.join(NAMES)}, or {HEAD}")
        self._use(name, read_integer(layers, 1) if layers else None, self.settings.tree)
        return f"drafter {argument}"

    def _k(self, argument: str) -> str:
        k = AdaptiveDrafts() if argument == "auto" else read_integer(argument, 0, ", or auto")
        self.settings.num_drafts = k
        return f"k {argument}"

    def _tree(self, argument: str) -> str:
        nodes, drafter = None if argument == "off" else read_integer(argument, 1, ", or off"), self.settings.drafter
        if nodes is None and drafter == "tree":
            raise ValueError(f"got off with drafter {drafter}, allowed: an integer >= 1, or another /drafter")
        self._use(drafter or "model", self.settings.exit_layers, nodes)
        return f"tree {argument}"

    def _rule(self, argument: str) -> str:
        from specdec_kernels import Rule

        Rule(argument)  # refuses others
        self.settings.rule = argument
        return f"rule {argument}"

"""A chat with the target: what was said, and the settings, which commands change between answers."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specdec_kernels import Rule, SamplingParams

from ..decoder import SpeculativeDecoder
from ..drafters.suffix import SuffixMemory
from ..jobs.signals import stop_once
from ..loop.draft_length import AdaptiveDrafts
from ..loop.sequence import Request
from ..sampling.grammar import Grammar
from ..sampling.grammar_source import GrammarSource
from ..stats import Stats
from ..stopping import StoppingCriteria, StopStrings
from . import drafting, models
from .conversation import Conversation
from .drafters import CHOICES, NAMES, is_drafter, nodes_of, parts_of
from .one_row import OneRow
from .show import Page, in_short, print_stats, print_troubles
from .terminal import remark

SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")


@dataclass
class ChatSettings:
    """Of the next answer."""

    params: SamplingParams
    seed: int  # each further answer has the next seed
    max_new_tokens: int
    verbose: bool
    stop: list[str]
    rule: str | None
    drafter: str
    num_drafts: int | AdaptiveDrafts | None
    exit_layers: int | None
    tree: int | None  # nodes; None: chains, or what the drafter has
    grammar: GrammarSource | None  # what answers have to be

    @property
    def nodes(self) -> int | None:
        return nodes_of(self.drafter, self.tree)

    @property
    def most_drafts(self) -> int | AdaptiveDrafts:
        given = self.num_drafts
        return drafting.read_num_drafts(None, nodes=self.nodes) if given is None else given


class Done(Exception):
    """The chat is over."""


class StopOr:
    """Stopping criteria that end the text where others do, or where Ctrl-C was pressed, with the tokens of the next
    report."""

    def __init__(self, others: StoppingCriteria | None, pressed: Callable[[], bool]):
        self._others, self._pressed = others, pressed

    def first_end(self, sequence: int, text: list[int], new: int) -> int | None:
        """As ``StoppingCriteria`` has it."""
        kept = None if self._others is None else self._others.first_end(sequence, text, new)
        return new if kept is None and self._pressed() else kept


class Talk:
    """A conversation with loaded models, and the drafter of its next answer.

    Args:
        settings: of the first answer.
    """

    _decoder: SpeculativeDecoder

    def __init__(self, loaded: models.Models, settings: ChatSettings):
        self.settings, self._models = settings, loaded
        self._said, self._memory = Conversation(loaded.tokenizer), SuffixMemory()
        self._answers: list[Stats] = []  # of those that came to their end
        self._stopping = StopStrings(loaded.tokenizer, settings.stop) if settings.stop else None
        self._row: OneRow | None = None  # of the decoder and the rule of the last answer
        self._use(settings.drafter, settings.exit_layers, settings.tree)
        self._grammar: Grammar | None = None
        if settings.grammar is not None:
            self._grammar = self._decoder.grammar_compiler(loaded.tokenizer).compile(settings.grammar)
        # What obeys a command, and what /help says of it.
        self._commands: dict[str, tuple[Callable[[str], str], str]] = {
            "help": (self._help, "this list"),
            "drafter": (self._drafter, f"NAME: {', '.join(NAMES)}; early-exit LAYERS"),
            "k": (self._k, "N or auto: drafted tokens a step, or of a path through a tree; 0 decodes plainly"),
            "tree": (self._tree, "N or off: each step verifies a tree of up to N drafts"),
            "rule": (self._rule, "token, block or coupled"),
            **{
                name.replace("_", "-"): (self._sampling(name), "NUMBER" + "; 0 is greedy" * (name == SAMPLING[0]))
                for name in SAMPLING
            },
            "seed": (self._seed, "N: of the next answer; the one after it has N + 1"),
            "max-new-tokens": (self._max_new_tokens, "N: length of an answer, at most"),
            "system": (self._system, "TEXT: the system message; without TEXT: none"),
            "stats": (self._stats, "all settings, and counts of all answers"),
            "verbose": (self._verbose, "on or off: colour tokens by what produced them"),
            "clear": (self._clear, "forget what was said (also /reset)"),
            "save": (self._save, "FILE: write what was said, as JSON"),
            "exit": (self._exit, "end (also /quit, or end of input)"),
        }
        self._aliases = {"reset": "clear", "quit": "exit", "?": "help"}

    def take(self, line: str) -> None:
        """Obeys a command or answers a message. Errors are printed and change nothing. Raises Done at /exit."""
        if not line.strip():
            return
        try:
            if line.startswith("/"):
                remark(self._obey(line), "dim")
            else:
                self._answer(line)
        except ValueError as error:
            remark(f"{line.split()[0] if line.startswith('/') else 'not answered'}: {error}", "red")

    def _answer(self, said: str) -> None:
        """Prints the answer and remembers it, or the part of it that there is. Raises ValueError if there is none."""
        s = self.settings
        # Otherwise the decoder is kept, with what it knows of steps.
        if (drafter := self._decoder.drafter) is not None and self._decoder.num_drafts != s.most_drafts:
            self._decoder = self._models.decoder(drafter, s.most_drafts, s.nodes)
        prompt = self._said.prompt(said)
        page = Page(self._models.tokenizer, "", prompt, s.verbose, s.stop, shows_prompt=False)
        rule, result = drafting.read_rule(s.rule, s.nodes), None
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
        self._said.add(said, page.shown)
        s.seed = s.seed + 1 if s.seed < 2**63 - 1 else -(2**63)
        if pressed():
            remark("(stopped)", "dim")
        if result is None:
            return
        self._answers.append(result.stats)
        print_troubles(result.drafter_error, result.sequences)
        (sequence,) = result.sequences
        print_stats(result.stats, [sequence.produced_by], s.verbose, with_speed=True, nodes=self._decoder.nodes)

    def _use(self, name: str, exit_layers: int | None, tree: int | None) -> None:
        """Changes to a drafter. Raises ValueError, and changes nothing, if it cannot draft for this target, or proposes
        no trees."""
        new = dataclasses.replace(self.settings, drafter=name, exit_layers=exit_layers, tree=tree)
        memory = self._memory if parts_of(name)[0] == "suffix" else None
        drafter = self._models.drafter(name, exit_layers, memory=memory)
        self._decoder = self._models.decoder(drafter, new.most_drafts, new.nodes)
        self.settings = new

    def _obey(self, line: str) -> str:
        """Obeys a line that begins with a slash; returns what to tell. Raises ValueError, which says what was given and
        what is allowed; nothing has changed then."""
        name, _, argument = line[1:].strip().partition(" ")
        name = self._aliases.get(name, name)
        if name not in self._commands:
            raise ValueError(f"got /{name}, allowed: {', '.join('/' + n for n in self._commands)}")
        return self._commands[name][0](argument.strip())

    def _help(self, _: str) -> str:
        return "\n".join(f"/{name}: {what}" for name, (_, what) in self._commands.items())

    def _drafter(self, argument: str) -> str:
        name, _, layers = argument.partition(" ")
        if not is_drafter(name):
            raise ValueError(f"got {name!r}, allowed: {CHOICES}")
        self._use(name, _integer(layers, 1) if layers else None, self.settings.tree)
        return f"drafter {argument}"

    def _k(self, argument: str) -> str:
        self.settings.num_drafts = AdaptiveDrafts() if argument == "auto" else _integer(argument, 0, ", or auto")
        return f"k {argument}"

    def _tree(self, argument: str) -> str:
        nodes, drafter = None if argument == "off" else _integer(argument, 1, ", or off"), self.settings.drafter
        if nodes is None and drafter == "tree":
            raise ValueError(f"got off with drafter {drafter}, allowed: an integer >= 1, or another /drafter")
        self._use(drafter, self.settings.exit_layers, nodes)
        return f"tree {argument}"

    def _rule(self, argument: str) -> str:
        Rule(argument)  # refuses others
        self.settings.rule = argument
        return f"rule {argument}"

    def _sampling(self, name: str) -> Callable[[str], str]:
        read, kind = (int, "an integer") if name == "top_k" else (float, "a number")

        def change(argument: str) -> str:
            try:
                changed: dict[str, Any] = {name: read(argument)}
            except ValueError:
                raise ValueError(f"got {argument!r}, allowed: {kind}") from None
            self.settings.params = dataclasses.replace(self.settings.params, **changed)
            return f"{name.replace('_', '-')} {argument}"

        return change

    def _seed(self, argument: str) -> str:
        self.settings.seed = _integer(argument, -(2**63), most=2**63 - 1)
        return f"seed {argument}"

    def _max_new_tokens(self, argument: str) -> str:
        self.settings.max_new_tokens = _integer(argument, 1)
        return f"max-new-tokens {argument}"

    def _system(self, argument: str) -> str:
        if argument and not self._said.has_roles:
            raise ValueError("got a text, allowed: none, as this model has no chat template")
        self._said.system = argument or None
        return "system message set" if argument else "no system message"

    def _stats(self, _: str) -> str:
        s = self.settings
        exits = "" if s.exit_layers is None else f" {s.exit_layers}"
        tree = "" if s.nodes is None else f", tree {s.nodes}"
        k, rule = s.most_drafts, drafting.read_rule(s.rule, s.nodes)
        drafting_now = f"drafter {s.drafter}{exits}, k {k if isinstance(k, int) else 'auto'}{tree}, rule {rule}"
        values = {name: getattr(s.params, name) for name in SAMPLING}
        told = (f"{name.replace('_', '-')} {value:g}" for name, value in values.items() if value is not None)
        lines = [f"{drafting_now}, seed {s.seed}, max-new-tokens {s.max_new_tokens}", ", ".join(told)]
        if answers := self._answers:
            # Without places, of which answers have several numbers.
            parts = [
                Stats(a.steps, a.cut_steps, a.emitted, a.nodes, [a.drafted], [a.tested], [a.accepted]) for a in answers
            ]
            of_all, seconds = Stats.total(parts, 1), sum(a.seconds["total"] for a in answers)
            lines.append(f"{len(answers)} answers, {in_short(of_all, seconds)}")
        return "\n".join(lines)

    def _verbose(self, argument: str) -> str:
        states = {"on": True, "off": False, "": not self.settings.verbose}
        if argument not in states:
            raise ValueError(f"got {argument!r}, allowed: on, off")
        self.settings.verbose = states[argument]
        return f"verbose {'on' if self.settings.verbose else 'off'}"

    def _clear(self, _: str) -> str:
        self._said.clear()
        return "cleared"

    def _save(self, argument: str) -> str:
        if not argument:
            raise ValueError("got no file, allowed: /save FILE")
        whole = json.dumps(self._said.to_dict(), indent=1, ensure_ascii=False) + "\n"
        try:
            Path(argument).write_text(whole, "utf-8")
        except OSError as error:
            raise ValueError(f"got {argument!r} ({error.strerror}), allowed: a file that can be written") from error
        return f"saved to {argument}"

    def _exit(self, _: str) -> str:
        raise Done


def _integer(text: str, least: int, more: str = "", most: float = math.inf) -> int:
    try:
        value = int(text)
    except ValueError:
        value = None
    if value is None or not least <= value <= most:
        limits = f">= {least}" if most == math.inf else f"from {least} to {most}"
        raise ValueError(f"got {text!r}, allowed: an integer {limits}{more}")
    return value

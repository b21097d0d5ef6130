"""The commands of ``specdec chat``, which begin with a slash, and what they change."""

from __future__ import annotations

import dataclasses
import json
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import drafting
from .drafters import HEAD, NAMES, is_head, nodes_of
from .terminal import remark

if TYPE_CHECKING:
    from specdec_kernels import SamplingParams

    from ..loop.draft_length import AdaptiveDrafts
    from ..stats import Stats
    from .conversation import Said

SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")


@dataclass
class Settings:
    """What can be set wherever the model is."""

    params: Any  # a dataclass that has SAMPLING
    seed: int  # of the next answer; each further answer has the next seed
    max_new_tokens: int
    verbose: bool

    def next_seed(self) -> None:
        self.seed = self.seed + 1 if self.seed < 2**63 - 1 else -(2**63)


@dataclass
class ChatSettings(Settings):
    params: SamplingParams
    rule: str | None  # None: the default
    drafter: str
    exit_layers: int | None
    tree: int | None  # nodes; None: chains, or what the drafter has
    num_drafts: int | AdaptiveDrafts | None  # None: the default

    def drafts(self, nodes: int | None) -> int | AdaptiveDrafts:
        """K, with trees of so many nodes."""
        return drafting.read_num_drafts(None, nodes=nodes) if self.num_drafts is None else self.num_drafts


@dataclass
class Totals:
    """Sums over all answers."""

    answers: int = 0
    stats: list[Stats] = field(default_factory=list)


class Done(Exception):
    """The chat is over."""


Command = tuple[Callable[[str], str], str]  # what obeys it, and what /help says


class Commands:
    """Those that are the same wherever the model is.

    Args:
        settings: that the commands change, in place.
        conversation: likewise.
        own: the others, by name.
    """

    def __init__(self, settings: Settings, conversation: Said, own: dict[str, Command]):
        self._common, self.conversation = settings, conversation
        self._commands: dict[str, Command] = {
            "help": (self._help, "this list"),
            **own,
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

    def run(self, line: str) -> str:
        """Obeys a line that begins with a slash; returns what to tell.

        Raises:
            ValueError: says what was given and what is allowed; nothing has changed.
            Done: the chat is over.
        """
        name, _, argument = line[1:].strip().partition(" ")
        name = self._aliases.get(name, name)
        if name not in self._commands:
            raise ValueError(f"got /{name}, allowed: {', '.join('/' + n for n in self._commands)}")
        return self._commands[name][0](argument.strip())

    def _help(self, _: str) -> str:
        return "\n".join(f"/{name}: {what}" for name, (_, what) in self._commands.items())

    def _sampling(self, name: str) -> Callable[[str], str]:
        def change(argument: str) -> str:
            value: Any
            try:
                value = int(argument) if name == "top_k" else float(argument)
            except ValueError:
                kind = "an integer" if name == "top_k" else "a number"
                raise ValueError(f"got {argument!r}, allowed: {kind}") from None
            self._common.params = dataclasses.replace(self._common.params, **{name: value})
            return f"{name.replace('_', '-')} {argument}"

        return change

    def _seed(self, argument: str) -> str:
        self._common.seed = read_integer(argument, -(2**63), most=2**63 - 1)
        return f"seed {argument}"

    def _max_new_tokens(self, argument: str) -> str:
        self._common.max_new_tokens = read_integer(argument, 1)
        return f"max-new-tokens {argument}"

    def _system(self, argument: str) -> str:
        if argument and not self.conversation.has_roles:
            raise ValueError("got a text, allowed: none, as this model has no chat template")
        self.conversation.system = argument or None
        return "system message set" if argument else "no system message"

    def _stats(self, _: str) -> str:
        raise NotImplementedError

    def _distribution(self) -> str:
        values = {name: getattr(self._common.params, name) for name in SAMPLING}
        return ", ".join(f"{name.replace('_', '-')} {value:g}" for name, value in values.items() if value is not None)

    def _verbose(self, argument: str) -> str:
        states = {"on": True, "off": False, "": not self._common.verbose}
        if argument not in states:
            raise ValueError(f"got {argument!r}, allowed: on, off")
        self._common.verbose = states[argument]
        return f"verbose {'on' if self._common.verbose else 'off'}"

    def _clear(self, _: str) -> str:
        self.conversation.clear()
        return "cleared"

    def _save(self, argument: str) -> str:
        if not argument:
            raise ValueError("got no file, allowed: /save FILE")
        try:
            Path(argument).write_text(
                json.dumps(self.conversation.to_dict(), indent=1, ensure_ascii=False) + "\n", "utf-8"
            )
        except OSError as error:
            raise ValueError(f"got {argument!r} ({error.strerror}), allowed: a file that can be written") from error
        return f"saved to {argument}"

    def _exit(self, _: str) -> str:
        raise Done


class ChatCommands(Commands):
    """
    Args:
        settings: that the commands change, in place.
        conversation: likewise.
        totals: for /stats.
        use_drafter: changes to a drafter, by name, layers (or None) and nodes of a tree (or None), or raises ValueError
            and changes nothing.
    """

    def __init__(
        self,
        settings: ChatSettings,
        conversation: Said,
        totals: Totals,
        use_drafter: Callable[[str, int | None, int | None], None],
    ):
        self.settings, self.totals, self._use_drafter = settings, totals, use_drafter
        own: dict[str, Command] = {
            "drafter": (self._drafter, f"NAME: {', '.join(NAMES)}; early-exit LAYERS"),
            "k": (self._k, "N or auto: drafted tokens a step, or of a path through a tree; 0 decodes plainly"),
            "tree": (self._tree, "N or off: each step verifies a tree of up to N drafts"),
            "rule": (self._rule, "token, block or coupled"),
        }
        super().__init__(settings, conversation, own)

    def _drafter(self, argument: str) -> str:
        name, _, layers = argument.partition(" ")
        if name not in NAMES and not is_head(name):
            raise ValueError(f"got {name!r}, allowed: {', '.join(NAMES)}, or {HEAD}")
        exit_layers = read_integer(layers, 1) if layers else None
        self._use_drafter(name, exit_layers, self.settings.tree)
        self.settings.drafter, self.settings.exit_layers = name, exit_layers
        return f"drafter {argument}"

    def _k(self, argument: str) -> str:
        if argument == "auto":
            from ..loop.draft_length import AdaptiveDrafts

            self.settings.num_drafts = AdaptiveDrafts()
        else:
            self.settings.num_drafts = read_integer(argument, 0, ", or auto")
        return f"k {argument}"

    def _tree(self, argument: str) -> str:
        s, nodes = self.settings, None if argument == "off" else read_integer(argument, 1, ", or off")
        if nodes is None and nodes_of(s.drafter, None) is not None:
            raise ValueError(f"got off with drafter {s.drafter}, allowed: an integer >= 1, or another /drafter")
        self._use_drafter(s.drafter, s.exit_layers, nodes)
        s.tree = nodes
        return f"tree {argument}"

    def _rule(self, argument: str) -> str:
        from specdec_kernels import Rule

        Rule(argument)  # refuses others
        self.settings.rule = argument
        return f"rule {argument}"

    def _stats(self, _: str) -> str:
        s, stats = self.settings, self.totals.stats
        nodes = nodes_of(s.drafter, s.tree)
        k = s.drafts(nodes)
        drafts = k if isinstance(k, int) else "auto"
        exits = "" if s.exit_layers is None else f" {s.exit_layers}"
        tree = "" if nodes is None else f", tree {nodes}"
        lines = [
            f"drafter {s.drafter}{exits}, k {drafts}{tree}, rule {drafting.read_rule(s.rule, nodes)}, seed {s.seed}, "
            f"max-new-tokens {s.max_new_tokens}",
            self._distribution(),
        ]
        emitted, steps, drafted, tested, accepted = (
            sum(getattr(part, name) for part in stats) for name in ("emitted", "steps", "drafted", "tested", "accepted")
        )
        seconds = sum(part.seconds["total"] for part in stats)
        if steps:
            lines.append(
                f"{self.totals.answers} answers, {emitted} tokens in {steps} steps, {emitted / seconds:.1f} tokens/s: "
                f"tau {emitted / steps:.2f}, acceptance rate {accepted / max(drafted, 1):.2f}, "
                f"alpha {accepted / max(tested, 1):.2f}"
            )
        return "\n".join(lines)


def read_integer(text: str, least: int, more: str = "", most: float = math.inf) -> int:
    try:
        value = int(text)
    except ValueError:
        value = None
    if value is None or not least <= value <= most:
        limits = f">= {least}" if most == math.inf else f"from {least} to {most}"
        raise ValueError(f"got {text!r}, allowed: an integer {limits}{more}")
    return value


def converse(take: Callable[[str], None]) -> None:
    """Reads lines from standard input, with a prompt on a terminal, until its end or /exit."""
    interactive = sys.stdin.isatty()
    if interactive:
        remark("/help lists commands, Ctrl-D ends", "dim")
    while True:
        try:
            line = input("> ") if interactive else sys.stdin.readline()
            if not interactive and not line:
                break
            take(line.rstrip("\n"))
        except KeyboardInterrupt:
            remark("(/exit or Ctrl-D ends)", "dim")
        except (EOFError, Done):
            break


def obey_or_answer(line: str, obey: Callable[[str], str], answer: Callable[[str], None]) -> None:
    """Obeys a command or answers a message. Errors are printed and change nothing."""
    if not line.strip():
        return
    try:
        if line.startswith("/"):
            remark(obey(line), "dim")
        else:
            answer(line)
    except ValueError as error:
        remark(f"{line.split()[0] if line.startswith('/') else 'not answered'}: {error}", "red")

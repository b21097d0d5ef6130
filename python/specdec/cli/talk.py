"""What chats have in common, wherever the model is: a conversation, its settings, and the commands that change them."""

from __future__ import annotations

import dataclasses
import json
import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .conversation import Said
from .terminal import remark

if TYPE_CHECKING:
    from ..loop.draft_length import AdaptiveDrafts
    from ..sampling.grammar_source import GrammarSource

SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")


@dataclass
class ChatSettings:
    """Of the next answer. None: the default, of the server if the model is there."""

    params: Any  # a dataclass that has SAMPLING
    seed: int  # each further answer has the next seed
    max_new_tokens: int
    verbose: bool
    stop: list[str]
    rule: str | None = None
    drafter: str | None = None
    num_drafts: int | AdaptiveDrafts | None = None
    exit_layers: int | None = None
    tree: int | None = None  # nodes; None: chains, or what the drafter has
    grammar: GrammarSource | None = None  # what answers have to be


@dataclass
class Totals:
    """Sums over answers; 0: not told."""

    answers: int = 0
    tokens: int = 0
    seconds: float = 0.0
    steps: int = 0
    drafted: int = 0
    accepted: int = 0
    tested: int = 0

    def add(self, other: Totals) -> None:
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + value)

    def line(self) -> str:
        speed = f"{self.tokens / self.seconds:.1f} tokens/s"
        if not self.steps:
            return f"{self.tokens} tokens, {speed}"
        tau = f"tau {self.tokens / self.steps:.2f} tokens a step"
        rate = f"acceptance rate {self.accepted / max(self.drafted, 1):.2f} (accepted / drafted)"
        alpha = f", alpha {self.accepted / self.tested:.2f} (accepted / tested)" if self.tested else ""
        return f"{self.tokens} tokens in {self.steps} steps, {speed}: {tau}, {rate}{alpha}"


class Done(Exception):
    """The chat is over."""


Command = tuple[Callable[[str], str], str]  # what obeys it, and what /help says


class Talk:
    """A conversation with a model.

    Args:
        settings: that the commands change, in place.
        said: likewise.
        own: commands beside those that are the same wherever the model is, by name.
    """

    def __init__(self, settings: ChatSettings, said: Said, own: Mapping[str, Command]):
        self.settings, self.said, self.totals = settings, said, Totals()
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

    def take(self, line: str) -> None:
        """Obeys a command or answers a message. Errors are printed and change nothing. Raises Done at /exit."""
        if not line.strip():
            return
        try:
            if line.startswith("/"):
                remark(self._obey(line), "dim")
            else:
                self.answer(line)
        except ValueError as error:
            remark(f"{line.split()[0] if line.startswith('/') else 'not answered'}: {error}", "red")

    def answer(self, said: str) -> None:
        """Prints the answer, and passes it to ``ended``. Raises ValueError if there is none."""
        raise NotImplementedError

    def ended(self, said: str, answer: str, interrupted: bool) -> None:
        """Remembers an answer, of which there may be only a part."""
        self.said.add(said, answer)
        s = self.settings
        s.seed = s.seed + 1 if s.seed < 2**63 - 1 else -(2**63)
        if interrupted:
            remark("(stopped)", "dim")

    def chosen(self) -> str:
        """The settings of drafting, for /stats."""
        raise NotImplementedError

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

    def _sampling(self, name: str) -> Callable[[str], str]:
        read, kind = (int, "an integer") if name == "top_k" else (float, "a number")

        def change(argument: str) -> str:
            try:
                value = read(argument)
            except ValueError:
                raise ValueError(f"got {argument!r}, allowed: {kind}") from None
            self.settings.params = dataclasses.replace(self.settings.params, **{name: value})
            return f"{name.replace('_', '-')} {argument}"

        return change

    def _seed(self, argument: str) -> str:
        self.settings.seed = read_integer(argument, -(2**63), most=2**63 - 1)
        return f"seed {argument}"

    def _max_new_tokens(self, argument: str) -> str:
        self.settings.max_new_tokens = read_integer(argument, 1)
        return f"max-new-tokens {argument}"

    def _system(self, argument: str) -> str:
        if argument and not self.said.has_roles:
            raise ValueError("got a text, allowed: none, as this model has no chat template")
        self.said.system = argument or None
        return "system message set" if argument else "no system message"

    def _stats(self, _: str) -> str:
        s = self.settings
        values = {name: getattr(s.params, name) for name in SAMPLING}
        told = (f"{name.replace('_', '-')} {value:g}" for name, value in values.items() if value is not None)
        lines = [f"{self.chosen()}, seed {s.seed}, max-new-tokens {s.max_new_tokens}", ", ".join(told)]
        if self.totals.answers:
            lines.append(f"{self.totals.answers} answers, {self.totals.line()}")
        return "\n".join(lines)

    def _verbose(self, argument: str) -> str:
        states = {"on": True, "off": False, "": not self.settings.verbose}
        if argument not in states:
            raise ValueError(f"got {argument!r}, allowed: on, off")
        self.settings.verbose = states[argument]
        return f"verbose {'on' if self.settings.verbose else 'off'}"

    def _clear(self, _: str) -> str:
        self.said.clear()
        return "cleared"

    def _save(self, argument: str) -> str:
        if not argument:
            raise ValueError("got no file, allowed: /save FILE")
        whole = json.dumps(self.said.to_dict(), indent=1, ensure_ascii=False) + "\n"
        try:
            Path(argument).write_text(whole, "utf-8")
        except OSError as error:
            raise ValueError(f"got {argument!r} ({error.strerror}), allowed: a file that can be written") from error
        return f"saved to {argument}"

    def _exit(self, _: str) -> str:
        raise Done


def read_integer(text: str, least: int, more: str = "", most: float = math.inf) -> int:
    try:
        value = int(text)
    except ValueError:
        value = None
    if value is None or not least <= value <= most:
        limits = f">= {least}" if most == math.inf else f"from {least} to {most}"
        raise ValueError(f"got {text!r}, allowed: an integer {limits}{more}")
    return value


def converse(talk: Talk) -> None:
    """Reads lines from standard input, with a prompt on a terminal, until its end or /exit."""
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

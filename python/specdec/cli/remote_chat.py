"""``specdec chat --url``: the same conversation, with a model that a server has. Nothing here loads a model."""

from __future__ import annotations

import json
import time
from contextlib import closing
from typing import TYPE_CHECKING, Any

from rich.text import Text

from .conversation import Said
from .remote import Remote, RemoteError
from .show import COLOURS
from .talk import ChatSettings, Talk, Totals, read_integer
from .terminal import remark, whisper, write

if TYPE_CHECKING:
    from ..sampling.grammar_source import GrammarSource


class RemoteTalk(Talk):
    """A conversation with one model of a server.

    Args:
        model: its name; None: the first that the server lists.

    Raises:
        RemoteError: the server cannot be reached, or has no such model, or not what the settings ask for.
    """

    def __init__(self, server: Remote, model: str | None, settings: ChatSettings):
        models = [str(told["id"]) for told in server.models()]
        if model is not None and model not in models:
            raise RemoteError(f"got model {model!r}, allowed: {', '.join(models)}")
        self.name = model or models[0]
        self._server, self._ours = server, server.specdec()  # what a server of specdec offers; None: another one
        own = {
            "drafter": (self._drafter, f"NAME: {', '.join(self._offered('drafters')) or 'not with this server'}"),
            "k": (self._k, "N or auto: drafted tokens a step, at most; 0 decodes plainly"),
            "rule": (self._rule, ", ".join(self._offered("rules")) or "not with this server"),
            "tree": (self._tree, "not here: the server has it as an option"),
        }
        super().__init__(settings, Said(self._ours is None or bool(self._ours.get("chat"))), own)
        for name in ("drafter", "rule", "num_drafts"):
            if (given := getattr(settings, name)) is not None:
                self._check(name, given, f"{name}: ")

    def answer(self, said: str) -> None:
        page, interrupted = _Answer(self.settings.verbose and self._ours is not None), False
        path, body = self._request(said)
        began = time.perf_counter()
        try:
            with closing(self._server.stream(path, body)) as chunks:
                for chunk in chunks:
                    page.take(chunk)
        except KeyboardInterrupt:  # the connection is closed by now, so the server stops, too
            interrupted = True
        except RemoteError:
            if page.text:
                page.finish()
            raise
        own = Totals(1, page.tokens, time.perf_counter() - began, **page.counts)
        page.finish()
        self.ended(said, page.text, interrupted)
        if not interrupted:
            self.totals.add(own)
            page.print_counts()
            remark(own.line(), "dim")

    def _request(self, said: str) -> tuple[str, dict[str, Any]]:
        s = self.settings
        given = {
            **vars(s.params),
            **{name: getattr(s, name) for name in ("drafter", "rule", "num_drafts")},
            "stop": s.stop or None,
            **_form_of(s.grammar),
        }
        body = {
            "model": self.name,
            "max_tokens": s.max_new_tokens,
            "seed": s.seed,
            "stream_options": {"include_usage": True},
            **{name: value for name, value in given.items() if value is not None},
        }
        if self._ours is not None:
            body["specdec"] = {"steps": s.verbose}
            if s.stop:
                body["include_stop_str_in_output"] = True  # as a local chat does
        if self.said.has_roles:
            return "/chat/completions", {**body, "messages": self.said.messages_with(said)}
        return "/completions", {**body, "prompt": self.said.text_with(said)}

    def chosen(self) -> str:
        s = self.settings
        given = {"drafter": s.drafter, "rule": s.rule, "k": "auto" if s.num_drafts is None else s.num_drafts}
        return ", ".join(f"{name} {value}" for name, value in given.items() if value is not None)

    def _check(self, name: str, value: object, before: str = "") -> None:
        """Raises RemoteError unless the server offers it. Its message begins with ``before``."""
        if self._ours is None:
            raise RemoteError(f"{before}got {value!r}, allowed: nothing, as this is no server of specdec")
        allowed = self._offered(f"{name}s")
        if name != "num_drafts" and value not in allowed:
            raise RemoteError(f"{before}got {value!r}, allowed: {', '.join(allowed)}")

    def _offered(self, names: str) -> list[str]:
        return [] if self._ours is None else list(map(str, self._ours.get(names, ())))

    def _drafter(self, argument: str) -> str:
        self._check("drafter", argument)
        self.settings.drafter = argument
        return f"drafter {argument}"

    def _rule(self, argument: str) -> str:
        self._check("rule", argument)
        self.settings.rule = argument
        return f"rule {argument}"

    def _k(self, argument: str) -> str:
        drafts = None if argument == "auto" else read_integer(argument, 0, ", or auto")
        self._check("num_drafts", argument)
        self.settings.num_drafts = drafts
        return f"k {argument}"

    def _tree(self, argument: str) -> str:
        allowed = "nothing; trees are an option of the server: specdec serve --tree N"
        raise RemoteError(f"got {argument!r}, allowed: {allowed}")


def _form_of(grammar: GrammarSource | None) -> dict[str, Any]:
    """The fields that ask for it: OpenAI's for a schema, vLLM's for a regex, which OpenAI's interface lacks."""
    if grammar is None:
        return {}
    if grammar.kind == "json_schema":
        asked = {"name": "answer", "schema": json.loads(grammar.text)}
        return {"response_format": {"type": "json_schema", "json_schema": asked}}
    return {"structured_outputs": {grammar.kind: grammar.text}}


class _Answer:
    """Prints an answer as it comes, and keeps what the server tells of it.

    Args:
        coloured: each token in the colour of what produced it, as the server's steps say.
    """

    def __init__(self, coloured: bool):
        self.coloured, self.text, self.producers = coloured, "", list[str]()
        self.tokens = 0
        self.counts: dict[str, int] = {}  # steps, drafted and accepted; {}: not told
        self.by_position: list[float] = []
        self._shown, self._thinks = 0, False

    def take(self, chunk: dict[str, Any]) -> None:
        """Raises RemoteError."""
        try:
            self.tokens = int((chunk.get("usage") or {}).get("completion_tokens", self.tokens))
            for choice in chunk.get("choices") or []:
                self._take(choice)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise RemoteError("the server sent a chunk that is not as OpenAI's interface has it") from error

    def _take(self, choice: dict[str, Any]) -> None:
        delta, told = choice.get("delta") or {}, choice.get("specdec") or {}
        if not self.coloured:  # else the steps have it, too
            self._think(delta.get("reasoning") or delta.get("reasoning_content") or "")
        part = choice.get("text") or delta.get("content") or ""
        self.text += part
        if not self.coloured:
            self._show(part)
        for step in told.get("steps") or []:
            for _, text, producer in step["tokens"]:
                self.producers.append(producer)
                self._show(text, COLOURS.get(producer))
        if stats := told.get("stats"):
            self.counts = {name: int(stats[name]) for name in ("steps", "drafted", "accepted")}
            self.by_position = [float(rate) for rate in stats["by_position"]]

    def finish(self) -> None:
        """Prints what no step had: bytes that never became a character, or the text before an interruption."""
        self._show(self.text[self._shown :] + "\n")

    def print_counts(self) -> None:
        """Tells on stderr where tokens came from, if they were coloured."""
        if not self.coloured:
            return
        told = (Text(f"{name} {self.producers.count(name)}", colour) for name, colour in COLOURS.items())
        remark(Text("tokens: ") + Text(", ").join([*told, Text(f"plain {self.producers.count('plain')}")]))
        places = (f"{i}: {rate:.0%}" for i, rate in enumerate(self.by_position, 1) if rate)
        remark("accepted by place, of those drafted: " + (", ".join(places) or "–"), "dim")

    def _think(self, text: str) -> None:
        if text:
            whisper(text)
            self._thinks = True

    def _show(self, text: str, colour: str | None = None) -> None:
        if text and self._thinks:
            whisper("\n")
            self._thinks = False
        write(text, colour)
        self._shown += len(text)

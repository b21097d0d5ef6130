"""Somebody's server, asked by OpenAI's ``/v1/completions``: which fields it takes, texts without any filter, and
which tokens these are made of."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from transformers import PreTrainedTokenizerBase

from ...checks import one_line
from ...serving.server.token_names import TokenBytes, TokenNames
from ..server_connection import ServerConnection, ServerError

# Fields by which servers weaken or filter tokens when a request says nothing, with values that ask for nothing (of
# several, the first one that is taken); then those that keep a text going, and those that tell its tokens.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "top_p": (1.0,),
    "top_k": (-1, 0),
    "min_p": (0.0,),
    "typical_p": (1.0,),
    "repetition_penalty": (1.0,),
    "repeat_penalty": (1.0,),
    "presence_penalty": (0.0,),
    "frequency_penalty": (0.0,),
}
TOKEN_IDS = ("return_token_ids", "return_tokens")  # vLLM's; llama.cpp's
BUSY = (408, 429, 502, 503, 504)
TRIES = 4


@dataclass(frozen=True)
class Answer:
    """One text of a server."""

    text: str
    ids: tuple[int, ...] | None  # of its tokens, where the server tells them
    names: tuple[str, ...] | None  # the texts of its tokens, from ``logprobs``
    ended: bool  # by the model, before max_tokens
    prompt_tokens: int | None  # as the server counts them
    tokens: int | None


class ServerClient(ServerConnection):
    """A server that completes texts. The arguments are those of
    :class:`~specdec.evaluation.server_connection.ServerConnection`."""

    def __init__(self, url: str, key: str | None = None, model: str | None = None, timeout: float = 300.0):
        super().__init__(url, key, model, timeout)
        self.fields: dict[str, Any] = {}  # optional ones that the server takes
        self.refused: list[str] = []
        self.takes_ids, self._ignores_end = True, False

    def probe(self, prompt: Sequence[int], text: str) -> None:
        """Learns what the server takes, by requests of one token. A field that it refuses cannot be meant by default,
        or is not known to it, and is left out."""
        try:
            self._once(self._body(prompt, text, 1, 0.0, 0))
        except ServerError as error:
            if error.status is None or error.status in (401, 403, 404):
                raise
            self.takes_ids = False
            self._once(self._body(prompt, text, 1, 0.0, 0))
        for name, values in NEUTRAL.items():
            self._try(name, values, prompt, text)
        self._ignores_end = self._try("ignore_eos", (True,), prompt, text) is not None
        self.fields.pop("ignore_eos", None)
        for name in TOKEN_IDS:
            answer = self._try(name, (True,), prompt, text)
            if answer is not None and answer.ids is not None:
                return
            self.fields.pop(name, None)
        answer = self._try("logprobs", (1,), prompt, text)
        if answer is None or answer.names is None:
            self.fields.pop("logprobs", None)

    def complete(
        self, prompt: Sequence[int], text: str, max_tokens: int, temperature: float, seed: int, ignore_end: bool = False
    ) -> Answer:
        """The server's continuation of a prompt, which is sent as ``text`` where it takes no token ids. What a busy
        server refuses is asked again, TRIES times in all.

        Args:
            ignore_end: goes on after an end token, where the server knows ``ignore_eos``.
        """
        body = self._body(prompt, text, max_tokens, temperature, seed)
        if ignore_end and self._ignores_end:
            body["ignore_eos"] = True
        for again in range(TRIES):
            try:
                answer = self._once(body)
                break
            except ServerError as error:
                if again == TRIES - 1 or (error.status is not None and error.status not in BUSY):
                    raise
                time.sleep(0.5 * 2**again)
        if answer.prompt_tokens is not None and answer.prompt_tokens != len(prompt):
            what = f"reads {text[:40]!r} as {answer.prompt_tokens} tokens, the reference's tokenizer as {len(prompt)}"
            raise ServerError(self.url, what)
        return answer

    def _try(self, name: str, values: Sequence[Any], prompt: Sequence[int], text: str) -> Answer | None:
        """The answer with a field, which is kept if there is one."""
        for value in values:
            try:
                answer = self._once({**self._body(prompt, text, 1, 0.0, 0), name: value})
            except ServerError as error:
                if error.status is None:
                    raise
                continue
            self.fields[name] = value
            return answer
        self.refused.append(name)
        return None

    def _body(self, prompt: Sequence[int], text: str, max_tokens: int, temperature: float, seed: int) -> dict[str, Any]:
        asked: Any = list(prompt) if self.takes_ids else text
        own = {"prompt": asked, "max_tokens": max_tokens, "temperature": temperature, "seed": seed}
        return {"model": self.model, **own, **self.fields}

    def _once(self, body: dict[str, Any]) -> Answer:
        told = self.ask("/completions", body)
        try:
            choice, usage = told["choices"][0], told.get("usage") or {}
            ids, log_probs = choice.get("token_ids") or choice.get("tokens"), choice.get("logprobs") or {}
            names = log_probs.get("tokens") or [each["token"] for each in log_probs.get("content") or ()]
            return Answer(
                text=choice["text"],
                ids=None if ids is None else tuple(map(int, ids)),
                names=tuple(names) if names else None,
                ended=choice.get("finish_reason") == "stop",
                prompt_tokens=usage.get("prompt_tokens"),
                tokens=usage.get("completion_tokens"),
            )
        except (AttributeError, IndexError, KeyError, TypeError, ValueError):
            raise ServerError(self.url, f"answers what is no completion: {one_line(told, 100)}") from None


ReadBy = Literal["ids", "logprobs", "text"]


class TokenReader:
    """Reads answers up to the first token that is not among ``allowed``.

    A token without a text of its own, such as a part of a character, cannot be told from others by its text. Whether a
    token is allowed depends on its id alone, so given that the tokens before it and it itself are, its law is the
    model's, restricted to ``allowed``: no test is biased by what was not read. That does not hold for ``text``, where a
    text is read as its tokenizer would write it: whoever sampled other tokens of the same text is misread.

    Args:
        tokenizer: the reference's.
        vocabulary: V of the reference.
        ends: ids that end a text. They are never allowed, since servers treat them in various ways.
        by: what answers have.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, vocabulary: int, ends: Sequence[int], by: ReadBy):
        self.by, self._tokenizer, self._ids = by, tokenizer, dict[str, int]()
        self.allowed = torch.ones(vocabulary, dtype=torch.bool)
        if by != "ids":
            known = TokenBytes(tokenizer)
            names = [TokenNames(known).text(token, "\0") for token in range(vocabulary)]
            times = Counter(names)
            special = set(tokenizer.all_special_ids)
            for token, name in enumerate(names):
                # "\0" begins the names of parts of characters.
                self.allowed[token] = times[name] == 1 and name[:1] not in ("", "\0") and token not in special
            self._ids = {name: token for token, name in enumerate(names) if self.allowed[token]}
        self.allowed[list(ends)] = False

    def read(self, answer: Answer) -> tuple[tuple[int, ...], bool]:
        """The tokens before the first one that cannot be read, and whether these are all of them, but for an end."""
        ids: Sequence[int | None]
        if answer.ids is not None:
            ids = answer.ids
        elif answer.names is not None:
            ids = [self._named(name) for name in answer.names]
        else:
            ids = self._tokenizer(answer.text, add_special_tokens=False).input_ids
            if answer.tokens is not None and answer.tokens - len(ids) not in (0, int(answer.ended)):
                return (), False
        for i, token in enumerate(ids):
            if token is None or not 0 <= token < len(self.allowed) or not self.allowed[token]:
                return tuple(ids[:i]), answer.ended and i == len(ids) - 1  # type: ignore[arg-type]  # no None before i
        return tuple(ids), True  # type: ignore[arg-type]

    def _named(self, name: str) -> int | None:
        by_id = re.fullmatch(r"token_id:(\d+)", name)
        return int(by_id[1]) if by_id else self._ids.get(name)

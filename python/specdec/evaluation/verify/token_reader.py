"""Which tokens a server's answer is made of."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from typing import Literal

import torch
from transformers import PreTrainedTokenizerBase

from ...serving.server.token_names import TokenBytes, TokenNames
from .server_client import Answer

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

"""Log-probabilities as OpenAI's two endpoints and vLLM's ``prompt_logprobs`` have them. All are of the model's own
distribution, before temperature, penalties and filters. Tokens are named by the bytes that they stand for in texts."""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from ...detokenize import BYTE_TOKEN
from ...result import TokenLogProb
from .decoded_text import Token

LOWEST = -9999.0  # OpenAI's number for tokens that cannot occur; JSON has no -inf


class TokenNames:
    """How tokens are named in responses: by their text, or where they are parts of a character, by their bytes."""

    def __init__(self, of: TokenBytes):
        self._of = of

    def bytes(self, token: int) -> bytes:
        return self._of(token) or b""

    def text(self, token: int, prefix: str = "") -> str:
        """The text of a whole number of characters; else ``prefix`` and an escape for each byte."""
        data = self.bytes(token)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return prefix + "".join(f"\\x{byte:02x}" for byte in data)

    def completion(self, tokens: Sequence[Token]) -> dict[str, list]:
        """``logprobs`` of a choice of /v1/completions."""
        names = [self._completion_name(token.id) for token in tokens]
        return {
            "tokens": names,
            "token_logprobs": [None if t.scores is None else _finite(t.scores.log_prob) for t in tokens],
            "top_logprobs": [None if token.scores is None else self._top(token.id, token.scores) for token in tokens],
            "text_offset": [token.start for token in tokens],
        }

    def chat(self, tokens: Sequence[Token]) -> dict[str, Any]:
        """``logprobs`` of a choice of /v1/chat/completions."""
        content = []
        for token in tokens:
            assert token.scores is not None, "the request was not made with top_log_probs"
            top = [self._chat_entry(*each) for each in token.scores.top]
            content.append({**self._chat_entry(token.id, token.scores.log_prob), "top_logprobs": top})
        return {"content": content, "refusal": None}

    def prompt(self, tokens: Sequence[int], scores: Sequence[TokenLogProb | None]) -> list[dict[str, dict] | None]:
        """vLLM's ``prompt_logprobs``: of each token of the prompt itself and the most likely ones there, by id."""
        found: list[dict[str, dict] | None] = []
        for token, score in zip(tokens, scores, strict=True):
            if score is None:
                found.append(None)
                continue
            ranked = {t: (value, rank) for rank, (t, value) in enumerate(score.top, 1)}
            ranked[token] = (score.log_prob, score.rank)
            found.append(
                {
                    str(t): {"logprob": _finite(value), "rank": rank, "decoded_token": self.text(t)}
                    for t, (value, rank) in ranked.items()
                }
            )
        return found

    def _completion_name(self, token: int) -> str:
        return self.text(token, "bytes:") or _by_id(token)

    def _top(self, drawn: int, scores: TokenLogProb) -> dict[str, float]:
        """By name: of several tokens with one text, the one that was drawn has it, or else the most likely one."""
        top, own = {}, self._completion_name(drawn)
        for token, value in dict([*scores.top, (drawn, scores.log_prob)]).items():
            name = self._completion_name(token)
            taken = name in top or name == own and token != drawn
            top[_by_id(token) if taken else name] = _finite(value)
        return top

    def _chat_entry(self, token: int, log_prob: float) -> dict[str, Any]:
        return {"token": self.text(token), "logprob": _finite(log_prob), "bytes": list(self.bytes(token))}


def _by_id(token: int) -> str:
    """The name of a token without text, such as a row of the output without a token; vLLM writes it in this way."""
    return f"token_id:{token}"


def _finite(log_prob: float) -> float:
    return max(log_prob, LOWEST)


class TokenBytes:
    """Token id -> the UTF-8 bytes that it adds to a text; None for an id without a token."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase):
        self._tokenizer = tokenizer
        kinds = _decoder_kinds(tokenizer)
        self._bytes_of: dict[str, int] | None = None
        if "ByteLevel" in kinds and "ByteFallback" not in kinds:
            self._bytes_of = _byte_level_alphabet()
        self._fallback = "ByteFallback" in kinds
        # A token is read after others, because decoders treat a first one differently (a leading space, "##"). Which
        # these are does not matter: a vocabulary of words reads "abcdef" as its unknown token.
        ids = tokenizer("abcdef", add_special_tokens=False).input_ids
        self._before = list(tokenizer.convert_ids_to_tokens(ids))
        self._before_text = tokenizer.convert_tokens_to_string(self._before)
        self._known: dict[int, bytes | None] = {}

    def __call__(self, token: int) -> bytes | None:
        if token not in self._known:
            self._known[token] = self._of(token)
        return self._known[token]

    def _of(self, token: int) -> bytes | None:
        try:
            name: str | None = list(self._tokenizer.convert_ids_to_tokens([token]))[0]
        except (IndexError, KeyError, OverflowError, ValueError):
            name = None
        if name is None:
            return None
        if self._bytes_of is not None and all(c in self._bytes_of for c in name):
            return bytes(self._bytes_of[c] for c in name)
        if self._fallback and (byte := BYTE_TOKEN.fullmatch(name)):
            return bytes([int(byte[1], 16)])
        text = self._tokenizer.convert_tokens_to_string([*self._before, name])
        if not text.startswith(self._before_text):  # the decoder treats a last one differently
            return self._tokenizer.convert_tokens_to_string([name]).encode()
        return text[len(self._before_text) :].encode()


def _decoder_kinds(tokenizer: PreTrainedTokenizerBase) -> set[str]:
    """The names of the parts of a fast tokenizer's decoder."""
    decoder = getattr(getattr(tokenizer, "backend_tokenizer", None), "decoder", None)
    if decoder is None:
        return set()
    kinds = {type(decoder).__name__}
    try:
        waiting = [json.loads(decoder.__getstate__())]
    except (AttributeError, TypeError, ValueError):  # a decoder written in Python shows no parts
        return kinds
    while waiting:
        part = waiting.pop()
        if isinstance(part, dict):
            kinds.add(str(part.get("type")))
            waiting += part.values()
        elif isinstance(part, list):
            waiting += part
    return kinds


@functools.cache
def _byte_level_alphabet() -> dict[str, int]:
    """Character -> byte in byte-level vocabularies (GPT-2's): printable Latin-1 is itself, the rest is U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(b): b for b in printable} | {chr(0x100 + i): b for i, b in enumerate(others)}

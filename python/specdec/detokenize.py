"""Text out of tokens that arrive a few at a time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_INCOMPLETE = "\ufffd"  # what a decoder shows for bytes that are no character yet


class IncrementalText:
    """The text that continues a prompt. Pieces are final: joined, they are the whole text.

    A token can be part of a character, and what a token reads as can depend on the one before it (a leading
    space in sentencepiece). So all tokens are decoded each time, the prompt's included, and only the new end
    is handed out. Special tokens (the end of a sequence) have no text.

    Args:
        tokenizer: the target's.
        prompt: the token ids that are continued; their text is not handed out.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, prompt: Sequence[int] = ()):
        self._tokenizer = tokenizer
        self._tokens = list(prompt)
        self._shown = len(self._decode())

    def push(self, tokens: Sequence[int]) -> str:
        """Takes the next tokens and returns the text that they completed, maybe none."""
        self._tokens += tokens
        return self._new(self._decode().rstrip(_INCOMPLETE))

    def finish(self) -> str:
        """The rest: what never became a character."""
        return self._new(self._decode())

    def _new(self, text: str) -> str:
        new, self._shown = text[self._shown :], max(self._shown, len(text))
        return new

    def _decode(self) -> str:
        return self._tokenizer.decode(self._tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)


def continuation(tokenizer: PreTrainedTokenizerBase, prompt: Sequence[int], tokens: Sequence[int]) -> str:
    """The text of ``tokens`` after ``prompt``, both token ids: the same text that streaming them shows."""
    text = IncrementalText(tokenizer, prompt)
    return text.push(tokens) + text.finish()

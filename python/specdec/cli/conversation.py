"""A conversation as token ids: by the tokenizer's chat template, or as one long text where there is none."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..chat_template import chat_prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Conversation:
    """What was said so far.

    Args:
        tokenizer: messages go through its chat template, if it has one.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase):
        self._tokenizer, self.has_roles = tokenizer, bool(tokenizer.chat_template)
        self.system: str | None = None
        self.messages: list[dict[str, str]] = []

    def clear(self) -> None:
        """Forgets all messages but the system message."""
        self.messages = []

    def prompt(self, said: str) -> list[int]:
        """The ids that the answer to ``said`` continues. Changes nothing. Raises ValueError as ``chat_prompt``."""
        messages = [*self.messages, {"role": "user", "content": said}]
        if self.has_roles:
            system = [] if self.system is None else [{"role": "system", "content": self.system}]
            return chat_prompt(self._tokenizer, [*system, *messages])
        text = ""
        for message in messages:  # with a line break between an answer and the next message
            between = "\n" if message["role"] == "user" and text and not text.endswith("\n") else ""
            text += between + message["content"]
        return self._tokenizer(text).input_ids

    def add(self, said: str, answer: str) -> None:
        self.messages += ({"role": "user", "content": said}, {"role": "assistant", "content": answer})

    def to_dict(self) -> dict:
        return {"system": self.system, "messages": self.messages}

"""A conversation: as messages, as one long text, or as token ids by the tokenizer's chat template."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..chat_template import chat_prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Said:
    """What was said so far.

    Args:
        has_roles: whether the model knows messages; otherwise the conversation is one text for it.
    """

    def __init__(self, has_roles: bool):
        self.has_roles = has_roles
        self.system: str | None = None
        self.messages: list[dict[str, str]] = []

    def clear(self) -> None:
        """Forgets all messages but the system message."""
        self.messages = []

    def messages_with(self, said: str) -> list[dict[str, str]]:
        """The messages that the answer to ``said`` continues. Changes nothing."""
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        return [*system, *self.messages, {"role": "user", "content": said}]

    def text_with(self, said: str) -> str:
        """The same as one text, with a line break between an answer and the next message."""
        text = ""
        for message in [*self.messages, {"role": "user", "content": said}]:
            between = "\n" if message["role"] == "user" and text and not text.endswith("\n") else ""
            text += between + message["content"]
        return text

    def add(self, said: str, answer: str) -> None:
        self.messages += ({"role": "user", "content": said}, {"role": "assistant", "content": answer})

    def to_dict(self) -> dict:
        return {"system": self.system, "messages": self.messages}


class Conversation(Said):
    """
    Args:
        tokenizer: messages go through its chat template, if it has one.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase):
        super().__init__(bool(tokenizer.chat_template))
        self._tokenizer = tokenizer

    def prompt(self, said: str) -> list[int]:
        """The ids that the answer to ``said`` continues. Changes nothing. Raises ValueError as ``chat_prompt``."""
        if not self.has_roles:
            return self._tokenizer(self.text_with(said)).input_ids
        return chat_prompt(self._tokenizer, self.messages_with(said))

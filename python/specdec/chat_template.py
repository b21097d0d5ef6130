"""Chat messages as a prompt, by the chat template of the tokenizer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from .checks import refuse, shown

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Some templates leave out a message whose role they do not know, so a role that is misspelt would go unnoticed.
ROLES = ("system", "developer", "user", "assistant")
_ALLOWED = f'a list of {{"role": {" or ".join(ROLES)}, "content": a text}}'


def chat_prompt(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Mapping[str, str]]) -> list[int]:
    """Returns the token ids that the next answer of a conversation continues.

    Args:
        tokenizer: the target's. It needs a chat template, which is rendered with ``add_generation_prompt=True``.
        messages: at least one, in the order in which they were said, each with a ``role`` (system, developer, user or
            assistant) and a ``content``, which is text.

    Raises:
        ValueError: names ``messages``: they are not of that form, the tokenizer has no chat template, or the template
            refuses them.

    Example:
        >>> from specdec import chat_prompt, load_embedded_pair
        >>> tokenizer = load_embedded_pair()[2]
        >>> tokenizer.chat_template = "{% for m in messages %}# {{ m.role }}: {{ m.content }}\\n{% endfor %}"
        >>> tokenizer.decode(chat_prompt(tokenizer, [{"role": "user", "content": "Why is the sky blue?"}]))
        '# user: Why is the sky blue?\\n'
    """
    return chat_tokens(tokenizer, chat_text(tokenizer, messages))


def chat_text(tokenizer: PreTrainedTokenizerBase, messages: object, answered: bool = False) -> str:
    """The text of :func:`chat_prompt`, with the names of the template's special tokens in it. Where the conversation is
    ``answered``, nothing is to come after it."""
    return template_text(tokenizer, _read_messages(messages), answered)


def template_text(
    tokenizer: PreTrainedTokenizerBase,
    given: list[dict[str, Any]],
    answered: bool = False,
    variables: Mapping[str, Any] = MappingProxyType({}),
) -> str:
    """What the chat template makes of messages of any form.

    Args:
        variables: what else it reads, ``tools`` perhaps.
    """
    if not tokenizer.chat_template:
        name = f"{type(tokenizer).__name__} of {tokenizer.name_or_path!r}"
        refuse("messages", f"messages for a tokenizer without a chat template ({name})", "a prompt, as text")
    try:
        settings = {**variables, "add_generation_prompt": not answered, "tokenize": False}
        text = str(tokenizer.apply_chat_template(given, **settings))
    except Exception as error:  # a template is a program that came with the model, and can raise anything
        refuse("messages", f"{shown(given)}, which the chat template refuses ({error})", "what it takes")
    if not text:
        refuse("messages", f"{shown(given)}, of which the chat template makes no text", "what it takes")
    return text


def chat_tokens(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """The ids of what :func:`chat_text` returned. Templates write special tokens themselves, so none are added."""
    return tokenizer(text, add_special_tokens=False).input_ids


def _read_messages(messages: object) -> list[dict[str, str]]:
    if not isinstance(messages, Sequence) or isinstance(messages, (str, bytes)) or not messages:
        refuse("messages", shown(messages), f"{_ALLOWED}, at least one")
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping) or {*message} != {"role", "content"}:
            refuse("messages", f"{shown(message)} as message {i}", _ALLOWED)
        if message["role"] not in ROLES or not isinstance(message["content"], str):
            refuse("messages", f"{shown(dict(message))} as message {i}", _ALLOWED)
        try:
            message["content"].encode()
        except UnicodeEncodeError:  # from a JSON escape; no tokenizer takes them
            refuse("messages", f"{shown(message['content'])} in message {i}", "text without lone surrogates")
    return [dict(message) for message in messages]

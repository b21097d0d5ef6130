"""The tokenizer that a GGUF file describes, by transformers' own conversion of what the file says."""

from __future__ import annotations

import json
from typing import Any

from tokenizers import Tokenizer, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.modeling_gguf_pytorch_utils import GGUF_TO_TRANSFORMERS_MAPPING

from .file import GgufFile

# How byte-level BPE divides a text before it merges: like GPT-2, or the same with each digit by itself.
_LIKE_GPT2 = frozenset(("gpt-2", "phi-2", "mpt", "olmo", "jais", "trillion"))
_SINGLE_DIGITS = frozenset(("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone"))
_SPECIAL = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}


def gguf_tokenizer(file: GgufFile) -> PreTrainedTokenizerFast:
    """Takes seconds where the merges have to be found from the tokens' scores (Gemma, Llama 2).

    Raises:
        OSError: names the file: transformers cannot make a tokenizer of what it says.
        ValueError: names the file: its texts are divided as no tokenizer of transformers does.
    """
    for trouble in _troubles(file):
        file.refuse(trouble)
    tables: Any = GGUF_TO_TRANSFORMERS_MAPPING["tokenizer"]
    said = {
        entry: file.metadata.get(f"tokenizer.{key}")
        for key, entry in tables["tokenizer"].items()
        if f"tokenizer.{key}" in file.metadata or entry.endswith("_id")
    }
    try:
        backend, more = _convert(file.architecture, said)
    except Exception as error:  # tokenizers raises plain Exceptions
        raise OSError(f"{file.name}: cannot make a tokenizer of {str(file.path)!r}: {error}") from error
    tokens = file.of_tokenizer("tokens")
    if file.of_tokenizer("pre") in _SINGLE_DIGITS:
        digits = pre_tokenizers.Digits(individual_digits=True)
        backend.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    special = {name: file.token_id(key) for name, key in _SPECIAL.items()}
    return PreTrainedTokenizerFast(
        tokenizer_object=_without_others(backend, len(tokens)),
        name_or_path=str(file.path),
        chat_template=file.metadata.get("tokenizer.chat_template"),
        # llama.cpp begins a text so where an older file does not say whether it does.
        add_bos_token=file.of_tokenizer("add_bos_token", file.of_tokenizer("model") == "llama"),
        add_eos_token=file.of_tokenizer("add_eos_token", False),
        **{**more, **{name: None if i is None else tokens[i] for name, i in special.items()}},
    )


def _convert(architecture: str, said: dict[str, Any]) -> tuple[Tokenizer, dict[str, Any]]:
    from transformers.integrations import ggml, gguf

    home: Any = gguf
    if not hasattr(home, "convert_gguf_tokenizer"):  # an earlier transformers
        home, architecture = ggml, architecture.replace("gemma3", "gemma3_text")
    return home.convert_gguf_tokenizer(architecture, said)


def _without_others(backend: Tokenizer, tokens: int) -> Tokenizer:
    """transformers adds special tokens of its own classes, with ids that the model does not have."""
    if all(i < tokens for i in backend.get_added_tokens_decoder()):
        return backend
    whole = json.loads(backend.to_str())
    whole["added_tokens"] = [token for token in whole["added_tokens"] if token["id"] < tokens]
    return Tokenizer.from_str(json.dumps(whole))


def _troubles(file: GgufFile) -> list[str]:
    kind, pre = file.of_tokenizer("model"), file.of_tokenizer("pre")
    found = []
    if kind == "gpt2" and pre not in _LIKE_GPT2 | _SINGLE_DIGITS | _other_splits():
        found.append(f"transformers does not know how its tokenizer divides texts (tokenizer.ggml.pre {pre})")
    prefix = file.of_tokenizer("add_space_prefix", True)
    if kind == "llama" and not prefix and file.architecture in ("llama", "qwen2", "qwen3"):
        found.append("its tokenizer puts no space before a text (tokenizer.ggml.add_space_prefix), transformers' does")
    return found


def _other_splits() -> frozenset[str]:
    try:
        from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS
    except ImportError:  # an earlier transformers, which has GPT-2's way alone
        return frozenset()
    return frozenset(GGUF_PRE_TOKENIZER_SPLITS)

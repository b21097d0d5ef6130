"""Tokenizers of a few tokens, with the decoders that models have."""

from __future__ import annotations

from collections.abc import Callable

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

WORDS = ["a", "b", "the", "ing", "é", "日", "\n", "x\ufffdy", ".", "'", "1"]
BYTES = "é日 A".encode() + bytes([0x80, 0xFF])


def byte_fallback() -> Tokenizer:
    """As Llama 2's: spaces are marked, the first one is stripped, unknown characters are runs of bytes."""
    names = [*WORDS, *(f"▁{word}" for word in WORDS), "▁", "▁▁", *(f"<0x{byte:02X}>" for byte in BYTES)]
    tokenizer = Tokenizer(models.BPE({name: i for i, name in enumerate(names)}, []))
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(parts)
    return tokenizer


def strips_two_spaces() -> Tokenizer:
    tokenizer = byte_fallback()
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 2, 0)]
    tokenizer.decoder = decoders.Sequence(parts)
    return tokenizer


def metaspace() -> Tokenizer:
    """As T5's: the marks of a first token are dropped."""
    names = [*WORDS, *(f"▁{word}" for word in WORDS), "▁", "▁▁"]
    tokenizer = Tokenizer(models.BPE({name: i for i, name in enumerate(names)}, []))
    tokenizer.decoder = decoders.Metaspace()
    return tokenizer


def wordpiece(cleanup: bool = False) -> Tokenizer:
    """As BERT's: tokens continue a word after ``##``, others start with a space but for the first."""
    names = [*WORDS, *(f"##{word}" for word in WORDS)]
    tokenizer = Tokenizer(models.WordPiece({name: i for i, name in enumerate(names)}, unk_token="a"))
    tokenizer.decoder = decoders.WordPiece(cleanup=cleanup)
    return tokenizer


def word_ends() -> Tokenizer:
    """As GPT-1's: a mark at the end of a word is a space, but for the last token."""
    names = [*WORDS, *(f"{word}</w>" for word in WORDS)]
    tokenizer = Tokenizer(models.BPE({name: i for i, name in enumerate(names)}, []))
    tokenizer.decoder = decoders.BPEDecoder()
    return tokenizer


def byte_level() -> Tokenizer:
    """Every byte is a token, and so are some halves of characters beside spaces."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    names = [*alphabet, "Ġæ", "Ĺ¥", "Ġthe", "æĹ", "¥a", "ĠĠĠĠ"]
    tokenizer = Tokenizer(models.BPE({name: i for i, name in enumerate(names)}, []))
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def no_decoder() -> Tokenizer:
    return Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="a"))


def cleaned_wordpiece() -> Tokenizer:
    return wordpiece(True)


MADE = (
    *(byte_fallback, strips_two_spaces, metaspace, wordpiece, cleaned_wordpiece, word_ends, byte_level),
    no_decoder,
)


def made(make: Callable[[], Tokenizer]) -> PreTrainedTokenizerFast:
    """One of these, with special tokens and an added one that is not special."""
    tokenizer = make()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.add_tokens(["<added>"])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")

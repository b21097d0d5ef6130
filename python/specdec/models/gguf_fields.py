"""What the keys of a GGUF file may say, in one table that is asked before anything is made of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from ..checks import shown

_MOST = 2**31 - 1


class _Number(NamedTuple):
    low: float
    high: float
    whole: bool = True

    def __str__(self) -> str:
        return f"{'an integer' if self.whole else 'a number'} from {self.low} to {self.high}"

    def fits(self, value: Any) -> bool:
        kinds = int if self.whole else (int, float)
        return isinstance(value, kinds) and not isinstance(value, bool) and self.low <= value <= self.high


class _Kind(NamedTuple):
    of: type
    items: tuple[type, ...] = ()  # of a list, whose items have one type, as they come from a typed array

    def __str__(self) -> str:
        return {bool: "true or false", str: "a text"}.get(self.of, f"a list of {self._items()}")

    def _items(self) -> str:
        return "texts" if str in self.items else "numbers"

    def fits(self, value: Any) -> bool:
        return isinstance(value, self.of) and (self.of is not list or all(type(item) in self.items for item in value))


_TEXT, _FLAG, _TEXTS, _NUMBERS = _Kind(str), _Kind(bool), _Kind(list, (str,)), _Kind(list, (int, float))
_SIZE, _HEADS, _TOKENS = _Number(1, 2**24), _Number(1, 2**16), _Number(1, _MOST)
_POSITIVE, _CAP = _Number(1e-30, 1e30, whole=False), _Number(0, 1e30, whole=False)
_ID = _Number(-1, 2**32 - 1)  # one that the vocabulary does not have counts as none
_OF_MODEL: Mapping[str, _Number | _Kind] = {
    "block_count": _Number(1, 2**16),
    "context_length": _TOKENS,
    "embedding_length": _SIZE,
    "feed_forward_length": _SIZE,
    "attention.head_count": _HEADS,
    "attention.head_count_kv": _HEADS,
    "attention.key_length": _HEADS,
    "attention.value_length": _HEADS,
    "attention.layer_norm_rms_epsilon": _Number(0, 1, whole=False),
    "attention.sliding_window": _Number(0, _MOST),
    "attention.sliding_window_pattern": _TOKENS,
    "attn_logit_softcapping": _CAP,
    "final_logit_softcapping": _CAP,
    "rope.dimension_count": _HEADS,
    "rope.freq_base": _POSITIVE,
    "rope.freq_base_swa": _POSITIVE,
    "rope.scaling.type": _TEXT,
    "rope.scaling.factor": _CAP,
    "rope.scaling.original_context_length": _Number(0, _MOST),
    "rope.scaling.attn_factor": _CAP,
    "rope.scaling.yarn_beta_fast": _CAP,
    "rope.scaling.yarn_beta_slow": _CAP,
    "rope.scaling.finetuned": _FLAG,
}
_OF_ALL: Mapping[str, _Number | _Kind] = {
    "general.architecture": _TEXT,
    "split.count": _Number(0, 2**16 - 1),
    "tokenizer.chat_template": _TEXT,
    "tokenizer.ggml.model": _TEXT,
    "tokenizer.ggml.pre": _TEXT,
    "tokenizer.ggml.tokens": _TEXTS,
    "tokenizer.ggml.merges": _TEXTS,
    "tokenizer.ggml.scores": _NUMBERS,
    "tokenizer.ggml.token_type": _NUMBERS,
    **{f"tokenizer.ggml.{name}_token_id": _ID for name in ("bos", "eos", "eot", "eom", "unknown", "padding")},
    **{f"tokenizer.ggml.add_{name}": _FLAG for name in ("bos_token", "eos_token", "space_prefix")},
}


def wrong_fields(metadata: Mapping[str, Any], tensors: int) -> Iterator[str]:
    """Yields what is wrong with a key that is read: its name, value and range. A key that is not there is another
    matter. ``tensors``: how many the file has, since each block has some."""
    architecture = metadata.get("general.architecture")
    allowed = {**_OF_ALL, **{f"{architecture}.{key}": allowed for key, allowed in _OF_MODEL.items()}}
    for key, value in metadata.items():
        if (fits := allowed.get(key)) is not None and not fits.fits(value):
            yield f"{key} is {shown(value)}, and has to be {fits}"
    blocks = metadata.get(f"{architecture}.block_count")
    if isinstance(blocks, int) and blocks > max(tensors, 1):
        yield f"{architecture}.block_count is {blocks}, and it has {tensors} tensors"

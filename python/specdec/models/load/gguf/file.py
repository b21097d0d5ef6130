"""What a GGUF file says of its model, what its keys may say, and a refusal by name of files that cannot be read as they
are."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from .... import fields
from ....checks import refuse
from .header import StoredTensor, read_header

# Dense decoders, of which tests/models/test_gguf_model.py loads one each. Mistral's files say llama.
ARCHITECTURES = ("gemma2", "gemma3", "llama", "phi3", "qwen2", "qwen3")
# Text between two turns of a chat, at which an answer ends. Older files do not name the token by a key of its own.
_TURN_ENDS = ("<|im_end|>", "<|eot_id|>", "<|end|>", "<end_of_turn>", "<|end_of_text|>", "<|endoftext|>")


@dataclass(frozen=True)
class GgufFile:
    """
    Attributes:
        name: the caller's name for ``path``, for errors.
        architecture: llama, qwen2, gemma3 and so on.
        metadata: by key. Lists, such as the vocabulary, are whole.
        tensors: by the file's names, mapped from it.
    """

    name: str
    path: Path
    architecture: str
    metadata: Mapping[str, Any]
    tensors: Mapping[str, StoredTensor]

    @property
    def packed(self) -> list[str]:
        """The types of its tensors, without F32."""
        return sorted({tensor.type_name for tensor in self.tensors.values()} - {"F32"})

    def of_model(self) -> dict[str, Any]:
        """What it says of the model's computation, by the keys without the architecture before them."""
        prefix = f"{self.architecture}."
        return {key.removeprefix(prefix): v for key, v in self.metadata.items() if key.startswith(prefix)}

    def of_tokenizer(self, key: str, default: Any = None) -> Any:
        return self.metadata.get(f"tokenizer.ggml.{key}", default)

    def token_id(self, key: str) -> int | None:
        """Of a token that has a key of its own: bos, eos and so on. One that is not there counts as none."""
        i = self.of_tokenizer(f"{key}_token_id")
        return i if i is not None and 0 <= i < len(self.of_tokenizer("tokens")) else None

    @property
    def ends(self) -> list[int]:
        """The ids of the tokens that end a text, or a turn of a chat."""
        named = [self.token_id(key) for key in ("eos", "eot", "eom")]
        tokens, template = self.of_tokenizer("tokens", ()), self.metadata.get("tokenizer.chat_template")
        written = [tokens.index(end) for end in _TURN_ENDS if end in (template or "") and end in tokens]
        return [i for i in dict.fromkeys((*named, *written)) if i is not None]

    def refuse(self, trouble: str) -> NoReturn:
        """Raises ValueError naming ``name``."""
        refuse(self.name, f"{str(self.path)!r}: {trouble}", "a file without that, or the model of which it was made")


def read_gguf(path: str | os.PathLike, name: str = "path") -> GgufFile:
    """Reads the header. Takes a tenth of a second, mostly for the vocabulary.

    Args:
        name: the caller's name for ``path``, for errors.

    Raises:
        OSError: names ``name``: there is no such file, it is none of GGUF, or a package that reads them is missing.
        ValueError: names ``name``: it is of an architecture that cannot be read, or one file of several.
    """
    if importlib.util.find_spec("gguf") is None:
        raise OSError(f"{name}: a GGUF file takes gguf to read: pip install 'specdec-kernels[gguf]'")
    path = Path(path).expanduser()
    if not path.is_file():
        raise OSError(f"{name}: there is no file {str(path)!r}")
    try:
        metadata, tensors = read_header(path)
    except (OSError, ValueError) as error:
        raise OSError(f"{name}: cannot read {str(path)!r} as a GGUF file: {error}") from error
    file = GgufFile(name, path, str(metadata.get("general.architecture")), metadata, tensors)
    for trouble in _troubles(file):
        file.refuse(trouble)
    return file


def _troubles(file: GgufFile) -> Iterator[str]:
    yield from wrong_keys(file.metadata, len(file.tensors))
    parts = file.metadata.get("split.count", 1)
    if parts > 1:
        yield f"one of {parts} files of a model (split.count); llama-gguf-split --merge joins them"
    if file.architecture not in ARCHITECTURES:
        yield f"architecture {file.architecture!r} (what can be read: {', '.join(ARCHITECTURES)})"
    if not file.of_tokenizer("tokens"):
        yield "it has no vocabulary (tokenizer.ggml.tokens)"


# ---- What the keys may say

_ID = fields.Number(-1, 2**32 - 1)  # one that the vocabulary does not have counts as none
OF_MODEL: Mapping[str, fields.Field] = {
    "block_count": fields.Number(1, 2**16),
    "context_length": fields.TOKENS,
    "embedding_length": fields.SIZE,
    "feed_forward_length": fields.SIZE,
    "attention.head_count": fields.HEADS,
    "attention.head_count_kv": fields.HEADS,
    "attention.key_length": fields.HEADS,
    "attention.value_length": fields.HEADS,
    "attention.layer_norm_rms_epsilon": fields.EPSILON,
    "attention.sliding_window": fields.Number(0, fields.MOST),
    "attention.sliding_window_pattern": fields.TOKENS,
    "attn_logit_softcapping": fields.NOT_NEGATIVE,
    "final_logit_softcapping": fields.NOT_NEGATIVE,
    "rope.dimension_count": fields.HEADS,
    "rope.freq_base": fields.POSITIVE,
    "rope.freq_base_swa": fields.POSITIVE,
    "rope.scaling.type": fields.TEXT,
    "rope.scaling.factor": fields.NOT_NEGATIVE,
    "rope.scaling.original_context_length": fields.Number(0, fields.MOST),
    "rope.scaling.attn_factor": fields.NOT_NEGATIVE,
    "rope.scaling.yarn_beta_fast": fields.NOT_NEGATIVE,
    "rope.scaling.yarn_beta_slow": fields.NOT_NEGATIVE,
    "rope.scaling.finetuned": fields.FLAG,
}
OF_FILE: Mapping[str, fields.Field] = {
    "general.architecture": fields.TEXT,
    "split.count": fields.Number(0, 2**16 - 1),
    "tokenizer.chat_template": fields.TEXT,
    "tokenizer.ggml.model": fields.TEXT,
    "tokenizer.ggml.pre": fields.TEXT,
    "tokenizer.ggml.tokens": fields.TEXTS,
    "tokenizer.ggml.merges": fields.TEXTS,
    "tokenizer.ggml.scores": fields.NUMBERS,
    "tokenizer.ggml.token_type": fields.NUMBERS,
    **{f"tokenizer.ggml.{name}_token_id": _ID for name in ("bos", "eos", "eot", "eom", "unknown", "padding")},
    **{f"tokenizer.ggml.add_{name}": fields.FLAG for name in ("bos_token", "eos_token", "space_prefix")},
}


def wrong_keys(metadata: Mapping[str, Any], tensors: int) -> Iterator[str]:
    """Yields what is wrong with a key that is there. ``tensors``: how many the file has, some for each block."""
    architecture = metadata.get("general.architecture")
    of_model = {f"{architecture}.{key}": field for key, field in OF_MODEL.items()}
    for name, value, allowed in fields.wrong(metadata, {**OF_FILE, **of_model}):
        yield f"{name} is {value}, and has to be {allowed}"
    blocks = metadata.get(f"{architecture}.block_count")
    if isinstance(blocks, int) and blocks > max(tensors, 1):
        yield f"{architecture}.block_count is {blocks}, and it has {tensors} tensors"

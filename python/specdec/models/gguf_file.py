"""What a GGUF file says of its model, and a refusal of what transformers' loader would leave out without a word."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig
from transformers.modeling_gguf_pytorch_utils import GGUF_TO_TRANSFORMERS_MAPPING

from ..checks import refuse

NEEDED = ("gguf", "accelerate")  # packages
# Dense decoders, of which tests/models/test_convert_gguf.py converts one each. Mistral's files say llama.
ARCHITECTURES = ("gemma2", "gemma3", "llama", "phi3", "qwen2", "qwen3")
# Keys that the loader does not read, and the entries of the configuration that are set from them.
_SET = {
    "attention.key_length": "head_dim",
    "attention.sliding_window": "sliding_window",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
}
# How byte-level BPE divides a text before it merges: like GPT-2, or the same with each digit by itself.
_LIKE_GPT2 = frozenset(("gpt-2", "phi-2", "mpt", "olmo", "jais", "trillion"))
SINGLE_DIGITS = frozenset(("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone"))
# Text between two turns of a chat, at which an answer ends. Older files do not name the token by a key of its own.
_TURN_ENDS = ("<|im_end|>", "<|eot_id|>", "<|end|>", "<end_of_turn>", "<|end_of_text|>", "<|endoftext|>")


@dataclass(frozen=True)
class GgufFile:
    """
    Attributes:
        architecture: llama, qwen2, gemma3 and so on.
        metadata: by key. Lists, such as the vocabulary, are whole.
        tensors: their names.
        packed: the types of its tensors, without F32.
    """

    path: Path
    architecture: str
    metadata: dict[str, Any]
    tensors: frozenset[str]
    packed: tuple[str, ...]

    def of_model(self) -> dict[str, Any]:
        """What it says of the model's computation, by the keys without the architecture before them."""
        prefix = f"{self.architecture}."
        return {key.removeprefix(prefix): v for key, v in self.metadata.items() if key.startswith(prefix)}

    @property
    def ends(self) -> list[int]:
        """The ids of the tokens that end a text, or a turn of a chat."""
        named = [self.metadata.get(f"tokenizer.ggml.{key}_token_id") for key in ("eos", "eot", "eom")]
        tokens, template = self.metadata.get("tokenizer.ggml.tokens", ()), self.metadata.get("tokenizer.chat_template")
        written = [tokens.index(end) for end in _TURN_ENDS if end in (template or "") and end in tokens]
        return [i for i in dict.fromkeys((*named, *written)) if i is not None]


def read_gguf(path: Path) -> GgufFile:
    """
    Raises:
        OSError: names ``path``: there is no such file, it is none of GGUF, or a package that reads them is missing.
        ValueError: names ``path``: the file cannot be converted as it is, and why.
    """
    if missing := [package for package in NEEDED if importlib.util.find_spec(package) is None]:
        raise OSError(f"path: a GGUF file takes {' and '.join(missing)} to read: pip install 'specdec[gguf]'")
    from gguf import GGUFReader

    if not path.is_file():
        raise OSError(f"path: there is no file {str(path)!r}")
    try:
        reader = GGUFReader(path)
        metadata = {key: field.contents() for key, field in reader.fields.items()}
    except (ValueError, IndexError, KeyError) as error:
        raise OSError(f"path: cannot read {str(path)!r} as a GGUF file: {error}") from error
    names = frozenset(tensor.name for tensor in reader.tensors)
    types = sorted({tensor.tensor_type.name for tensor in reader.tensors} - {"F32"})
    file = GgufFile(path, str(metadata.get("general.architecture")), metadata, names, tuple(types))
    for trouble in _troubles(file):
        refuse_gguf_file(path, trouble)
    return file


def refuse_gguf_file(path: Path, trouble: str) -> None:
    """Raises ValueError naming ``path``."""
    refuse("path", f"{str(path)!r}: {trouble}", "a file without that, or the model of which it was made")


def _troubles(file: GgufFile) -> Iterator[str]:
    """Why the file cannot be converted."""
    parts = file.metadata.get("split.count", 1)
    if parts > 1:
        yield f"one of {parts} files of a model (split.count); llama-gguf-split --merge joins them"
    if file.architecture not in ARCHITECTURES:
        yield f"architecture {file.architecture!r} (what can be converted: {', '.join(ARCHITECTURES)})"
    said = file.of_model()
    scaling = {key: value for key, value in said.items() if key.startswith("rope.scaling.")}
    if scaling and scaling.get("rope.scaling.type") != "none":
        shown = ", ".join(f"{key} {value}" for key, value in scaling.items())
        yield f"its positions are scaled ({shown}), which transformers' loader ignores"
    if factors := sorted(name for name in file.tensors if name.startswith(("rope_freqs", "rope_factors"))):
        yield f"its positions are scaled (tensor {factors[0]}), which transformers' loader ignores"
    read: Any = GGUF_TO_TRANSFORMERS_MAPPING["config"]
    known = {*read.get(file.architecture, ()), *_SET, *_AGREED, *scaling}
    if unread := sorted(key for key, value in said.items() if key not in known and value not in (0, None)):
        yield f"transformers' loader ignores {', '.join(f'{file.architecture}.{key}' for key in unread)}"
    yield from _tokenizer_troubles(file)


def _tokenizer_troubles(file: GgufFile) -> Iterator[str]:
    kind, pre = (file.metadata.get(f"tokenizer.ggml.{key}") for key in ("model", "pre"))
    if kind == "gpt2" and pre not in _LIKE_GPT2 | SINGLE_DIGITS | _other_splits():
        yield f"transformers' loader does not know how its tokenizer divides texts (tokenizer.ggml.pre {pre})"
    prefix = file.metadata.get("tokenizer.ggml.add_space_prefix", True)
    if kind == "llama" and not prefix and file.architecture in ("llama", "qwen2", "qwen3"):
        yield "its tokenizer puts no space before a text (tokenizer.ggml.add_space_prefix), as the loader's does"


def _other_splits() -> frozenset[str]:
    try:
        from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS
    except ImportError:  # an earlier transformers, which has GPT-2's way alone
        return frozenset()
    return frozenset(GGUF_PRE_TOKENIZER_SPLITS)


def complete(config: PreTrainedConfig, file: GgufFile) -> None:
    """Sets what the loader leaves at the defaults of its class though the file says it. Raises ValueError naming
    ``path`` where the two disagree on what cannot be set."""
    for key, value in file.of_model().items():
        if key in _SET:
            setattr(config, _SET[key], value)
    if hasattr(
        config, "query_pre_attn_scalar"
    ):  # no file says it; llama.cpp knows the two models of 27B by their layers
        large = config.num_hidden_layers in (46, 62)
        config.query_pre_attn_scalar = config.hidden_size // config.num_attention_heads if large else config.head_dim
    for key, value in file.of_model().items():
        if key in _AGREED and (own := _AGREED[key](config)) != value:
            refuse_gguf_file(file.path, f"{file.architecture}.{key} is {value}, transformers has {own}")
    for name, key in (("bos", "bos"), ("pad", "padding"), ("unk", "unknown")):
        setattr(config, f"{name}_token_id", file.metadata.get(f"tokenizer.ggml.{key}_token_id"))
    ends = file.ends
    config.eos_token_id = ends[0] if len(ends) == 1 else ends or None


def _head_dim(config: Any) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def _rotated(config: Any) -> int:
    parameters = config.rope_parameters
    return int(_head_dim(config) * parameters.get("partial_rotary_factor", 1.0))


_AGREED = {
    "attention.value_length": _head_dim,
    "rope.dimension_count": _rotated,
    "rope.freq_base_swa": lambda config: config.rope_parameters["sliding_attention"]["rope_theta"],
    "attention.sliding_window_pattern": lambda config: config._sliding_window_pattern,
}

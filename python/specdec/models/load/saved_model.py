"""A model as it was saved, before any weight is read: what is there, and its configuration, read once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from transformers import AutoConfig, PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from ...checks import one_line
from ...fields import HEADS, SIZE, TOKENS, Field, Number, wrong
from .adapters import refuse_adapter
from .gguf.file import GgufFile, read_gguf
from .location import Location
from .reduced_head import SIZE as REDUCED_SIZE

# Of numbers in a config.json that decide how much is built before the weights are looked at.
_LAYERS = Number(0, 2**12)
_SIZES: dict[str, Field] = {
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers"), _LAYERS),
    **dict.fromkeys(("hidden_size", "intermediate_size", "n_embd", "n_inner", "d_model", "ffn_dim"), SIZE),
    **dict.fromkeys(("num_attention_heads", "num_key_value_heads", "n_head", "head_dim"), HEADS),
    **dict.fromkeys(("vocab_size", "max_position_embeddings", "n_positions"), TOKENS),
    **dict.fromkeys(("num_local_experts", "num_experts", "n_routed_experts", "num_labels"), Number(0, 2**16)),
}


@dataclass(frozen=True)
class SavedModel:
    """
    Attributes:
        file: the GGUF file that it is; None: it is a folder, or on the hub.
    """

    at: Location
    config: PreTrainedConfig
    file: GgufFile | None = None

    @property
    def quantisation(self) -> object:
        """What its configuration says of quantised weights; None: nothing."""
        return getattr(self.config, "quantization_config", None)

    @property
    def is_reduced(self) -> bool:
        """Whether it is a folder whose model has a reduced head (``reduced_head``). EAGLE-3's heads have the same
        entry, but are no models that transformers knows."""
        names: Any = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
        known = self.config.architectures == [names.get(self.config.model_type)]
        return known and getattr(self.config, REDUCED_SIZE, None) is not None and self.at.folder.is_dir()


def read_saved(at: Location, *needed: str) -> SavedModel:
    """
    Args:
        needed: patterns of files that a folder has to have.

    Raises:
        OSError: a folder or file is missing or corrupt, or a library that it needs is not installed.
        ValueError: it is no causal language model, or nothing but an adapter of one.
    """
    if at.is_gguf:
        file = read_gguf(at.path, at.name)
        from .gguf.config import configuration

        return SavedModel(at, configuration(file), file)
    refuse_adapter(at)
    at.require(*needed)
    check_entries(at)
    with at.loading():
        return SavedModel(at, AutoConfig.from_pretrained(at.path, trust_remote_code=False))


def check_entries(at: Location) -> None:
    """Refuses a config.json with a size that nothing is built of, before transformers tries.

    Raises:
        OSError: it is missing or cannot be read.
        ValueError: names the entry and its range.
    """
    try:
        entries, _ = PreTrainedConfig.get_config_dict(at.path)
        parts = [entries, *(part for part in entries.values() if isinstance(part, dict))]
    except Exception as error:
        raise OSError(f"{at.name}: cannot load {at}: {one_line(error, 600)}") from error
    for part in parts:
        # What is no number has other meanings in some models, and is left to them.
        numbers = {entry: value for entry, value in part.items() if isinstance(value, int | float)}
        for entry, value, allowed in wrong(numbers, _SIZES):
            raise ValueError(f"{at.name}: config.json of {at} has {entry} {value}, allowed: {allowed}")

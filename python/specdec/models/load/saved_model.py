"""A model as it was saved: its configuration, read once, and its weights, safetensors only and no remote code."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from ...checks import one_line
from ...fields import HEADS, SIZE, TOKENS, Field, Number, wrong
from . import reduced_head
from .adapters import refuse_adapter
from .gguf.file import GgufFile, read_gguf
from .location import Location

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
        return known and getattr(self.config, reduced_head.SIZE, None) is not None and self.at.folder.is_dir()

    def load(self, dtype: torch.dtype | None, device: torch.device) -> PreTrainedModel:
        """Loads what is no GGUF file onto ``device``; arguments and errors are those of :meth:`place`."""
        model: Any
        if self.is_reduced:
            with self.at.loading():
                model = reduced_head.load_reduced(self.at.folder, self.config, dtype)
        else:
            # Most quantised weights are made for one device, so they are loaded there instead of moved.
            quantised = self.quantisation is not None and device.type != "cpu"
            model = self.place(dtype, **({"device_map": {"": device}} if quantised else {}))
        with self.at.loading():
            return model.to(device)

    def place(self, dtype: torch.dtype | None, **placed: Any) -> PreTrainedModel:
        """Loads what is no GGUF file and has no reduced head.

        Args:
            dtype: of the weights, or of the computation if they are quantised; None: the one in which they were saved.
            placed: where weights go, and how they are quantised, as transformers takes it.

        Raises:
            OSError: a file is corrupt, weights are missing in it, or a library is.
            ValueError: it holds no causal language model.
        """
        with self.at.loading():
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                self.at.path, config=self.config, dtype="auto" if dtype is None else dtype, use_safetensors=True,
                trust_remote_code=False, output_loading_info=True, **placed,
            )  # fmt: skip
            model, report = loaded
            if getattr(model.config, "quantization_config", None) is not None and not hasattr(model, "hf_quantizer"):
                raise ValueError(f"its quantisation {self.quantisation} is none that transformers knows")
        # transformers fills absent weights with random numbers and only warns; the text would be nonsense.
        if absent := sorted(report["missing_keys"]):
            told = f"the weights in {self.at} lack {len(absent)} tensors, the first is {absent[0]!r}"
            raise OSError(f"{self.at.name}: {told}")
        return model


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

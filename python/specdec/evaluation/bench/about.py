"""What results say about models."""

from __future__ import annotations

from torch import nn
from transformers import PreTrainedModel

from ...drafters.protocol import Drafter


def describe(model: PreTrainedModel, name: str) -> dict[str, object]:
    """Its size, for JSON: bytes are those of parameters and buffers as they lie in memory, shared ones once."""
    config = model.config.get_text_config(decoder=True)
    return {"name": name, **_size(model), "layers": config.num_hidden_layers, "vocabulary": config.vocab_size}


def described_head(drafter: Drafter | None) -> dict[str, object]:
    """The size of a drafter that is a module, or holds one; {} of any other."""
    module = getattr(drafter, "model", None)
    return _size(module) if isinstance(module, nn.Module) else {}


def _size(module: nn.Module) -> dict[str, object]:
    tensors = [*module.parameters(), *module.buffers()]
    return {
        "parameters": sum(each.numel() for each in module.parameters()),
        "bytes": sum(each.numel() * each.element_size() for each in tensors),
    }

"""Finds the decoder layers of a model."""

from __future__ import annotations

from torch import nn
from transformers import PreTrainedModel

from ...checks import refuse


def layers_path(model: PreTrainedModel) -> str:
    """Returns the name of the module that is the list of ``model``'s decoder layers.

    Raises:
        ValueError: names the model's type, if there is no such list, or more than one.
    """
    config = model.config.get_text_config(decoder=True)
    count = config.num_hidden_layers
    # Duplicates count, because a list that is reached in two ways would have to be replaced in both.
    lists = [
        name
        for name, module in model.named_modules(remove_duplicate=False)
        if isinstance(module, nn.ModuleList) and len(module) == count
    ]
    if len(lists) != 1:
        given = f"model type {config.model_type!r}, with {len(lists)} lists of {count} modules"
        refuse("target", given, "models with one, of their layers")
    return lists[0]

"""A model whose output covers some tokens only, though it is fed all of them: FR-Spec's drafts (arXiv 2502.14856)."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from ...checks import refuse

IDS = "d2t"  # the buffer with the ids of the head's rows, as heads have it (EAGLE-3)
SIZE = "draft_vocab_size"  # its length, in config.json


def reduced_ids(model: nn.Module) -> torch.Tensor | None:
    """The ids [n] int64, ascending, that the columns of the model's logits stand for; None: all, in order."""
    found = dict(model.named_buffers()).get(IDS)
    if found is None:  # inside of an adapter
        found = next((b for name, b in model.named_buffers() if name.endswith(f".{IDS}")), None)
    return found


def reduce_head(model: PreTrainedModel, ids: torch.Tensor) -> None:
    """Leaves the rows ``ids`` [n] int64 of the model's head, in place. The embedding stays whole, and is a matrix of
    its own from then on.

    Raises:
        ValueError: names ``vocabulary``: the ids do not ascend or are out of range, or the head is no ``nn.Linear``.
    """
    head: Any = model.get_output_embeddings()
    if type(head) is not nn.Linear:
        refuse("vocabulary", f"{len(ids)} tokens for a head that is a {type(head).__name__}", "None for it")
    size = model.config.get_text_config(decoder=True).vocab_size
    if len(ids) == 0 or (ids[1:] <= ids[:-1]).any() or not 0 <= int(ids[0]) <= int(ids[-1]) < size:
        refuse("vocabulary", f"{len(ids)} ids that do not ascend from 0 to {size - 1}", "ascending ids")
    smaller = nn.Linear(head.in_features, len(ids), head.bias is not None, head.weight.device, head.weight.dtype)
    with torch.no_grad():
        smaller.weight.copy_(head.weight[ids.to(head.weight.device)])
        if head.bias is not None:
            smaller.bias.copy_(head.bias[ids.to(head.weight.device)])
    model.config = copy.deepcopy(model.config)
    text = model.config.get_text_config(decoder=True)
    text.tie_word_embeddings = model.config.tie_word_embeddings = False
    setattr(model.config, SIZE, len(ids))
    model.set_output_embeddings(smaller)
    model.register_buffer(IDS, ids.to(head.weight.device))


def load_reduced(path: Path, config: PreTrainedConfig, dtype: torch.dtype | None) -> PreTrainedModel:
    """Loads what was saved after :func:`reduce_head`. Raises RuntimeError or KeyError where tensors are missing or have
    other shapes."""
    tensors = {name: t for file in sorted(path.glob("*.safetensors")) for name, t in load_file(file).items()}
    model = AutoModelForCausalLM.from_config(config, dtype=dtype or config.dtype, trust_remote_code=False)
    reduce_head(model, torch.arange(getattr(config, SIZE)))
    ids = tensors.pop(IDS)
    model.load_state_dict({**{name: t.to(model.dtype) for name, t in tensors.items()}, IDS: ids})
    return model

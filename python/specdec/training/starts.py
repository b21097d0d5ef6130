"""What a draft is before it learns: layers of the target, or new ones."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from ..checks import one_line, read_count, refuse
from ..models.exchanged.layers import layers_path
from ..models.exchanged.packed_weights import weight_of
from ..models.load.location import Location
from ..models.load.saved_model import check_entries


def usual_layers(target: PreTrainedModel) -> int:
    """How many layers of the target a draft has where nobody says: a tenth, so that a step of the target has time for
    some of its own."""
    return -(-target.config.get_text_config(decoder=True).num_hidden_layers // 10)


def cut(target: PreTrainedModel, layers: int, intermediate: int | None = None) -> PreTrainedModel:
    """Returns a float32 model of ``layers`` layers of ``target``, evenly spread, the first and the last among them,
    with its embedding, norms and head.

    Args:
        intermediate: how many neurons each MLP keeps: those with the largest products of the norms of their weights in
            and out. None: all.

    Raises:
        ValueError: names ``layers`` or ``intermediate``, or what of the target it cannot cut.
    """
    config = target.config.get_text_config(decoder=True)
    deep = config.num_hidden_layers
    if not 1 <= read_count("layers", layers, 1) <= deep:
        refuse("layers", layers, f"from 1 to {deep}, those of the target")
    kept = [round(i * (deep - 1) / (layers - 1)) for i in range(layers)] if layers > 1 else [0]
    path = layers_path(target)
    smaller = copy.deepcopy(target.config)
    text = smaller.get_text_config(decoder=True)
    text.num_hidden_layers = layers
    if getattr(text, "layer_types", None):
        text.layer_types = [config.layer_types[i] for i in kept]
    wide: Any = getattr(config, "intermediate_size", None)
    if intermediate is not None:
        if not isinstance(wide, int) or wide in (config.hidden_size, config.vocab_size):
            refuse("intermediate", f"{intermediate} for a model whose intermediate_size is {wide}", "None for it")
        if not 1 <= read_count("intermediate", intermediate, 1) <= wide:
            refuse("intermediate", intermediate, f"from 1 to {wide}, the target's")
        text.intermediate_size = intermediate
    draft = _new(smaller)
    neurons: dict[int, torch.Tensor] = {}
    if intermediate is not None:
        neurons = {i: _neurons(target.get_submodule(f"{path}.{i}"), wide, intermediate) for i in kept}
    tensors = {}
    for name in draft.state_dict():
        if name.startswith(f"{path}."):
            number, _, rest = name.removeprefix(f"{path}.").partition(".")
            i = kept[int(number)]
            tensor = _of_target(target, f"{path}.{i}.{rest}")
            tensors[name] = _narrowed(tensor, wide, neurons[i]) if i in neurons else tensor
        else:
            tensors[name] = _of_target(target, name)
    draft.generation_config = copy.deepcopy(target.generation_config)
    draft.load_state_dict({name: tensor.detach().float() for name, tensor in tensors.items()})
    return draft


def _of_target(target: PreTrainedModel, name: str) -> torch.Tensor:
    path, _, own = name.rpartition(".")
    module = target.get_submodule(path)
    weight = weight_of(module) if own == "weight" else None  # packed ones are expanded
    return getattr(module, own) if weight is None else weight


def fresh(target: PreTrainedModel, path: str | Path, seed: int) -> PreTrainedModel:
    """Returns a new float32 model by the config.json at ``path``, or in that folder. Raises ValueError naming
    ``config`` where it has another vocabulary than the target."""
    allowed = "a config.json of a causal language model"
    try:
        check_entries(Location("config", path))
    except OSError as error:
        refuse("config", f"{str(path)!r} ({one_line(error)})", allowed)
    try:
        config = AutoConfig.from_pretrained(path, trust_remote_code=False)
    except Exception as error:  # whatever a broken entry leads to
        refuse("config", f"{str(path)!r} ({one_line(error)})", allowed)
    own, wanted = (c.get_text_config(decoder=True).vocab_size for c in (config, target.config))
    if own != wanted:
        refuse("config", f"a vocabulary of {own}", f"{wanted}, the target's")
    torch.manual_seed(seed)
    return _new(config)


def _new(config: object) -> PreTrainedModel:
    try:
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32, trust_remote_code=False)
    except ValueError as error:
        refuse("config", f"{type(config).__name__} ({error})", "that of a causal language model")


def _neurons(layer: nn.Module, wide: int, keep: int) -> torch.Tensor:
    """The indices of the neurons that an MLP keeps, in ascending order."""
    score = torch.ones(wide)
    for module in layer.modules():
        weight = weight_of(module)
        if weight is not None and weight.dim() == 2 and wide in weight.shape:
            if not isinstance(module, nn.Linear):
                refuse("intermediate", f"{keep} for layers with a {type(module).__name__}", "None for them")
            score = score * weight.float().cpu().norm(dim=1 - weight.shape.index(wide))
    return score.topk(keep).indices.sort().values


def _narrowed(tensor: torch.Tensor, wide: int, neurons: torch.Tensor) -> torch.Tensor:
    for dim, size in enumerate(tensor.shape):
        if size == wide:
            tensor = tensor.index_select(dim, neurons.to(tensor.device))
    return tensor

"""Copies of a model that read another attention from their configuration, with the weights of the model."""

from __future__ import annotations

import copy
from typing import TypeVar, cast

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

M = TypeVar("M", bound=nn.Module)


def copy_with_attention(model: PreTrainedModel, attention: str) -> PreTrainedModel:
    """Returns a copy that computes the attention which transformers knows by this name.

    The user's model and its configuration are not changed. Modules that read from a configuration which attention to
    compute, and the modules around them, are copied without their weights. All other modules are the same objects, so
    adapters that are switched later act in both models.
    """
    configs: dict = {}  # modules that share a configuration share its copy
    return _copied(model, attention, configs, {})


def _has_config(module: nn.Module) -> bool:
    """Whether the module may read from a configuration which attention to compute."""
    return isinstance(getattr(module, "config", None), PreTrainedConfig)


def copies(module: nn.Module) -> list[nn.Module]:
    """Returns the modules that :func:`copy_with_attention` copies: those with a configuration, and around those."""
    inside = [copied for child in module.children() for copied in copies(child)]
    return [module, *inside] if inside or _has_config(module) else []


def _copied(module: M, attention: str, configs: dict, done: dict[int, nn.Module]) -> M:
    if id(module) not in done:
        children = {n: c if c is None else _copied(c, attention, configs, done) for n, c in module._modules.items()}
        own = _has_config(module)
        copied = module
        if own or any(children[n] is not c for n, c in module._modules.items()):
            copied = copy.copy(module)
        if any(children[n] is not c for n, c in module._modules.items()):
            copied._modules = children
        if own:
            vars(copied)["config"] = copy.deepcopy(module.config, configs)
            # Set directly, because the property would also set it in the configuration's parts.
            vars(copied)["config"]._attn_implementation_internal = attention
        done[id(module)] = copied
    return cast(M, done[id(module)])

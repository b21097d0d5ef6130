"""Drafts tokens with the target's own first layers: self-speculation by early exit."""

from __future__ import annotations

import copy
from typing import TypeVar

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from ..checks import refuse
from ..models.exchanged.layers import layers_path
from ..models.forward.cached_model import CachedModel
from ..models.supported import KNOWN_MODEL_TYPES, cached_model
from .model import ModelDrafter, ModelDraftSession
from .protocol import BatchState
from .tree_growth import TreeGrowth


class EarlyExitDrafter(ModelDrafter):
    """Drafts with the target's first layers, followed by its own norm and head (LayerSkip, Elhoushi et al., arXiv
    2404.16710, section 3.3; transformers' ``assistant_early_exit``).

    These layers compute the target's keys, so drafting uses the target's cache, without a prefill or a second cache.
    A draft costs ``num_layers`` of the target's layers and its head. The target is not changed.

    Args:
        target: the target model.
        num_layers: 1 to the target's number of layers.
        confidence: as in :class:`~specdec.SpeculativeDecoder`.
        growth: how it grows trees, where the decoder asks for them.

    Raises:
        ValueError: names the argument, what was given and what is allowed. A model in which the list of layers cannot
            be found is refused by the name of its type.

    Example:
        >>> from specdec import EarlyExitDrafter, SpeculativeDecoder, load_embedded_pair
        >>> target, _, tokenizer = load_embedded_pair()
        >>> decoder = SpeculativeDecoder(target, EarlyExitDrafter(target, num_layers=2), num_drafts=2)
        >>> len(decoder.generate([tokenizer("import os").input_ids], max_new_tokens=16).tokens[0])
        16
    """

    doubt = None  # few targets can draft with their first layers, so there is no mistake to look for

    def __init__(
        self, target: PreTrainedModel, num_layers: int, confidence: float = 0.0, growth: TreeGrowth | None = None
    ):
        whole = cached_model(target, "target")
        if whole.is_sharded:
            refuse("target", "one over several devices (tp)", "one on one device: its layers are called apart")
        super().__init__(CachedModel(first_layers(target, num_layers)), confidence=confidence, growth=growth)
        if whole.config.model_type not in KNOWN_MODEL_TYPES:
            check_keys_are_shared(whole, self.model)

    def start(self, batch: BatchState) -> ModelDraftSession:
        return ModelDraftSession(self, batch, batch.target_cache)

    def cache_bytes(self) -> int:
        return 0

    def row_bytes(self, most_drafts: int) -> int:
        return 0


def first_layers(model: PreTrainedModel, num_layers: int) -> PreTrainedModel:
    """Returns a model of ``model``'s first ``num_layers`` layers and everything that is not a layer. It shares its
    parameters and modules with ``model``, except the few modules that contain the list of layers, which are copied.

    Raises:
        ValueError: as :class:`EarlyExitDrafter`.
    """
    config = model.config.get_text_config(decoder=True)
    described, count = f"model type {config.model_type!r}", config.num_hidden_layers
    if isinstance(num_layers, bool) or not isinstance(num_layers, int) or not 1 <= num_layers <= count:
        refuse("num_layers", repr(num_layers), f"1 to {count}, the layers of the target")
    *way, last = layers_path(model).split(".")
    configs: dict = {}  # modules that share a configuration share its copy
    whole = _copied(model, num_layers, configs, described)
    module: nn.Module = whole
    for name in way:
        child = _copied(getattr(module, name), num_layers, configs, described)
        setattr(module, name, child)
        module = child
    layers = copy.copy(getattr(module, last))
    layers._modules = dict(list(layers._modules.items())[:num_layers])
    setattr(module, last, layers)
    return whole


M = TypeVar("M", bound=nn.Module)


def _copied(module: M, num_layers: int, configs: dict, described: str) -> M:
    """Returns a copy of ``module`` with the same parameters and submodules, but its own dictionary of submodules and
    its own configuration."""
    if "forward" in vars(module):  # as by accelerate's hooks: the copy would call the original module
        refuse("target", f"{described}, whose forward was replaced", "models that run their class's own")
    module = copy.copy(module)
    module._modules = dict(module._modules)
    config = getattr(module, "config", None)
    if isinstance(config, PreTrainedConfig):
        config = copy.deepcopy(config, configs)
        text = config.get_text_config(decoder=True)
        text.num_hidden_layers = num_layers
        if vars(text).get("layer_types") is not None:  # some compute it
            text.layer_types = text.layer_types[:num_layers]
        module.__dict__["config"] = config
    return module


@torch.inference_mode()
def check_keys_are_shared(target: CachedModel, first: CachedModel) -> None:
    """Compares the keys and values that both store for a few random tokens. Used for unknown model types, which might
    treat their last layers differently.

    Raises:
        ValueError: names the model type and the first layer that differs.
    """
    described = f"model type {target.config.model_type!r}"
    allowed = "models whose first layers do not depend on the number of layers"
    tokens = torch.randint(target.vocab_size, (1, 9), generator=torch.Generator().manual_seed(0)).tolist()
    caches = [target.new_cache(1, 16)]
    target.prefill(caches[0], tokens)
    try:
        caches.append(first.new_cache(1, 16))
        first.prefill(caches[1], tokens)
    except Exception as error:  # an unknown model can raise anything with fewer layers
        refuse("target", f"{described}, which fails without its last layers ({type(error).__name__}: {error})", allowed)
    near = torch.finfo(target.dtype).eps ** 0.5
    for i, (theirs, ours) in enumerate(zip(*(cache.layers for cache in caches), strict=False)):
        if not (theirs.is_initialized or ours.is_initialized):
            continue  # the layer stores nothing
        same = theirs.is_initialized == ours.is_initialized and all(
            torch.allclose(a.float(), b.float(), rtol=near, atol=near)
            for a, b in ((theirs.keys, ours.keys), (theirs.values, ours.values))
        )
        if not same:
            refuse("target", f"{described}, whose layer {i} stores other keys without the later ones", allowed)

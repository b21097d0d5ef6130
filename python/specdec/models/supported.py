"""Decides which models the loop can run: known ones, refusals by name, a check of every unknown model, and
a warning of versions of transformers that nobody tried."""

from __future__ import annotations

import functools
import os
import warnings
from typing import Any

import torch
import transformers
from transformers import PreTrainedConfig, PreTrainedModel

from ..checks import refuse, shown
from .exchanged.shards import is_shard
from .exchanged.slow_dtype import warn_if_slow
from .forward.cached_model import CachedModel
from .forward.recurrent import recurrent_layers, scan_of
from .forward.training_mode import check_evaluating
from .full_forward import TREE, check_against_full_forward, check_shape
from .ranks.leaders import leader_of

# For these, tests/models/test_model_types.py compares ragged cached forwards with full ones; see docs/models.md.
KNOWN_MODEL_TYPES = frozenset(
    (
        "bamba", "bloom", "cohere", "cohere2", "falcon", "falcon_h1", "gemma", "gemma2", "gemma3", "gemma3_text", "glm",
        "glm4", "glm4_moe", "gpt2", "gpt_bigcode", "gpt_neox", "gpt_oss", "gptj", "granite", "granitemoe",
        "granitemoehybrid", "jamba", "kimi_linear", "lfm2", "lfm2_moe", "llama", "mamba2", "ministral", "mistral",
        "mixtral", "mpt", "nemotron_h", "olmo", "olmo2", "olmo3", "olmo_hybrid", "opt", "phi", "phi3", "qwen2",
        "qwen2_moe", "qwen3", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_moe", "qwen3_next", "smollm3", "stablelm",
        "starcoder2", "zamba2",
    )
)  # fmt: skip
MASKED_LAYER_TYPES = frozenset(("full_attention", "sliding_attention"))
RECURRENT_LAYER_TYPES = frozenset(("linear_attention", "conv", "hybrid"))
PLAIN_LAYER_TYPES = frozenset(("moe", "mlp"))  # have no attention and no state
# Their layers have functions of known names, but several states, of which some are tokens.
SEVERAL_STATES = frozenset(("qwen4_exp_text",))
MASKED_ATTENTION = ("sdpa", "eager")
# Adapters that act outside of the model's modules: in the wrapper's forward, or by an extra forward before each.
_ADAPTERS_OUTSIDE = ("ADAPTION_PROMPT", "POLY", "XLORA")


def cached_model(
    model: torch.nn.Module, name: str, cache_dtype: torch.dtype | None = None, fed_vocabulary: int | None = None
) -> CachedModel:
    """Checks ``model`` and returns it as a ``CachedModel``.

    Args:
        model: a ``PreTrainedModel``, or a ``peft`` model around one. The adapters that are active when ``generate``
            runs are used.
        name: the name of the caller's argument, for errors.
        cache_dtype, fed_vocabulary: as in :class:`~specdec.models.forward.cached_model.CachedModel`.

    It warns once of a dtype in which this CPU is slow (``slow_dtype``).

    Raises:
        ValueError: the model is not a causal LM, it is an encoder-decoder, it has a state that cannot be rewound, it is
            in training mode, its attention takes no 4-D mask, its weights are spread, sharded or offloaded, its
            adapters act outside of its modules, or it is of an unknown type and its cached forward differs from its
            full forward.
    """
    warn_if_untested()
    refuse_unloaded(name, model)
    whole, model = model, _without_adapters(model, name)
    if not isinstance(model, PreTrainedModel):
        refuse(name, type(model).__name__, f"a transformers causal LM{_or_drafter(name)}")
    config = model.config.get_text_config(decoder=True)
    described = f"model type {config.model_type!r}"
    if model.config.is_encoder_decoder:
        raise ValueError(f"{name}: {described} is an encoder-decoder, allowed: decoder-only models")
    _require_known_layers(model, config, f"{name}: {described}")
    if not model.can_generate():
        refuse(name, type(model).__name__, "a causal LM, with a head over its vocabulary")
    if config._attn_implementation not in MASKED_ATTENTION:
        given, allowed = config._attn_implementation, " or ".join(MASKED_ATTENTION)
        raise ValueError(f"{name}: attention implementation {given!r}, allowed: {allowed}")
    led = leader_of(model)
    if led is None:
        _require_one_device(model, name)
    _check_modules(whole, name)
    if led is not None:
        from .ranks.sharded import ShardedModel

        return ShardedModel(model, name, cache_dtype, *led)
    if whole is not model or not _is_known(model):
        check_against_full_forward(model, name, whole)
    found = CachedModel(model, name, "auto", cache_dtype, fed_vocabulary)
    warn_if_slow(found.dtype, found.device, name)
    return found


def refuse_unloaded(name: str, model: object) -> None:
    """Raises ValueError naming ``name`` where a path, a drafter's name, or a class stands in place of the object."""
    if isinstance(model, str | os.PathLike):
        allowed = f"a loaded model (specdec.load_model and load_pair load one){_or_drafter(name)}"
        refuse(name, shown(os.fspath(model)), allowed)
    if isinstance(model, type):
        refuse(name, f"the class {model.__name__}", f"an object of it, as {model.__name__}(...) makes one")


def _or_drafter(name: str) -> str:
    return "" if name == "target" else ", or a specdec.drafters.Drafter such as SuffixDrafter()"


def _is_known(model: PreTrainedModel) -> bool:
    ours = type(model).__module__.startswith("transformers.models.")
    return ours and model.config.model_type in KNOWN_MODEL_TYPES


def _without_adapters(model: Any, name: str) -> torch.nn.Module:
    """Returns the model inside a ``peft`` model; its modules contain the adapters. peft is never imported here."""
    if not any(c.__module__.split(".")[0] == "peft" for c in type(model).__mro__):
        return model
    for config in model.peft_config.values():
        kind = getattr(config.peft_type, "value", config.peft_type)
        outside = config.is_prompt_learning or kind in _ADAPTERS_OUTSIDE
        if outside or getattr(config, "alora_invocation_tokens", None):
            kind = "activated LoRA" if kind == "LORA" else kind
            refuse(name, f"a {kind} adapter", "adapters that act inside the model's modules alone, as LoRA does")
    return model.base_model.model


def _require_known_layers(model: PreTrainedModel, config: PreTrainedConfig, described: str) -> None:
    """Raises ValueError for models with other layers than masked attention, and recurrent ones that can be rolled
    back."""
    kinds = getattr(config, "layer_types", None) or ()
    others = set(kinds) - MASKED_LAYER_TYPES - PLAIN_LAYER_TYPES
    listed = ", ".join(sorted(others)) or "its layers"
    found = recurrent_layers(model)
    known = config.model_type not in SEVERAL_STATES and all(scan_of(module) is not None for module in found.values())
    lacking = any(kind in RECURRENT_LAYER_TYPES and i not in found for i, kind in enumerate(kinds))
    stateful = model._is_stateful or any("attention" not in kind or "linear" in kind for kind in others)
    if (stateful or found) and (not known or lacking or not found):
        allowed = "attention, convolutions, gated delta rules and Mamba's scans"
        raise ValueError(f"{described} keeps a state that cannot be rewound ({listed}), allowed: {allowed}")
    if more := others - RECURRENT_LAYER_TYPES:
        listed = ", ".join(sorted(more))
        raise ValueError(f"{described} has other masks than the loop's ({listed}), allowed: full and sliding attention")
    if config.model_type == "gpt_neo":
        raise ValueError(f"{described} counts its local attention from the cache's end, allowed: other models")


def _require_one_device(model: PreTrainedModel, name: str) -> None:
    """Raises ValueError unless all weights are whole and stay on one device. accelerate is never imported here; its
    hooks have attributes that tell what they do. Hooks that only move inputs to the one device are allowed."""
    allowed = "all of them, whole, on one device that holds values; load_model(tp=...) divides them"
    parameters = list(model.parameters())
    sharded = next(filter(is_shard, parameters), None)
    if sharded is not None:
        refuse(name, f"weights in shards over a device mesh ({type(sharded).__name__})", allowed)
    if (getattr(model, "_tp_size", None) or 1) > 1:
        refuse(name, f"weights in shards over {model._tp_size} devices (tensor parallel)", allowed)
    devices = sorted(map(str, {p.device for p in parameters}))
    offload = next((hook for module in model.modules() for hook in _hooks(module) if _offloads(hook)), None)
    if len(devices) == 1 and devices != ["meta"] and offload is None:
        return
    places = {str(place) for place in (getattr(model, "hf_device_map", None) or {}).values()}
    if len(places) > 1 or "disk" in places:
        named = sorted(f"cuda:{place}" if place.isdecimal() else place for place in places)
        refuse(name, f"weights spread over {' and '.join(named)} (device_map)", allowed)
    if offload is not None:
        refuse(name, f"weights that are brought to {offload.execution_device} for each forward (offloading)", allowed)
    refuse(name, f"weights on {', '.join(devices)}", allowed)


def _hooks(module: torch.nn.Module) -> tuple:
    """Returns accelerate's hooks of this module alone."""
    hook = getattr(module, "_hf_hook", None)
    return () if hook is None else tuple(getattr(hook, "hooks", (hook,)))  # several in a SequentialHook


def _offloads(hook: object) -> bool:
    return getattr(hook, "offload", False) or type(hook).__name__ == "CpuOffload"


def _check_modules(model: torch.nn.Module, name: str) -> None:
    check_evaluating(model, name)
    for module in model.modules():
        if type(module).__module__.startswith("torch.ao.nn.quantized.dynamic"):
            given = f"{type(module).__name__} of {type(module).__module__}"
            refuse(name, given, "quantisation by row: this one takes one scale for all tokens of a forward")


def why_no_trees(cached: CachedModel, grown: bool = False) -> str | None:
    """Returns why the model cannot be fed a tree of tokens, only a chain; None: it can. A model of an unknown type is
    fed a tree, whose logits are compared with those of full forwards of its paths.

    Args:
        grown: the tree is fed in parts, each after the drafts of the one before are known.
    """
    if grown and cached.recurrent:
        return "has recurrent layers, which cannot be fed a tree in parts"
    if cached.lacks_trees is not None or _is_known(cached.model):
        return cached.lacks_trees
    try:
        check_shape(cached.model, cached.model, TREE, "cannot be fed a tree")
    except ValueError as error:
        return str(error)
    return None


NEWEST = (5, 24)  # the oldest is pyproject.toml's


@functools.cache
def warn_if_untested() -> None:
    """Warns once a process. What a model does is looked at and not concluded from a version, so most of what is newer
    works, and the first use of an unknown model checks it anyway."""
    major, minor = (int(part) for part in transformers.__version__.split(".")[:2])
    if (major, minor) > NEWEST:
        tested = ".".join(map(str, NEWEST))
        told = (
            f"transformers: {transformers.__version__} is newer than {tested}, the newest that specdec was tested with"
        )
        warnings.warn(told, RuntimeWarning, stacklevel=4)

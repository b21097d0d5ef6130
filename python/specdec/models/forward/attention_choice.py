"""Which attention a model gets, and why one keeps its own."""

from __future__ import annotations

from typing import Any

import torch
from specdec_layers import has_fused_attention
from torch.utils._triton import has_triton
from transformers import PreTrainedConfig, PreTrainedModel

from ...checks import refuse
from ..exchanged.linear import has_native
from ..exchanged.native_setting import is_wanted
from .attention_copies import copies

CHOICES = ("auto", "model", "flex", "native", "fused")


def choose(model: PreTrainedModel, requested: str = "auto") -> str:
    """Returns how the model's attention is computed: "fused" (a kernel of our own for few tokens of a row, and flex for
    more), "flex", "native", or "model" for its own function (sdpa or eager).

    Args:
        requested: "auto" chooses fused on a GPU, and native instead of sdpa, or of eager if the class has no sdpa, on
            a CPU, if the model's attention and ``SPECDEC_NATIVE`` allow it. Any other choice is returned, or refused
            with a ValueError.
    """
    if requested not in CHOICES:
        refuse("attention", repr(requested), " or ".join(map(repr, CHOICES)))
    if requested == "model" or (requested == "auto" and not is_wanted()):
        return "model"
    config, on_cpu = model.config.get_text_config(decoder=True), model.device.type == "cpu"
    # On a CPU, compiled flex attention is correct, but slower than the model's own, and each shape takes seconds.
    best = "native" if on_cpu else "fused" if has_fused_attention(model.device.type) else "flex"
    wanted = best if requested == "auto" else requested
    lacks = _lacks(model)
    if wanted == "flex" and not lacks and has_sinks(model):
        lacks = "which has attention sinks"
    if wanted == "fused" and not lacks and not has_fused_attention(model.device.type):
        lacks = f"on {model.device.type!r}, where Triton does not work"
    if wanted == "native" and not lacks:
        if not on_cpu:
            lacks = f"on {model.device.type!r}, where it would compute without a kernel"
        elif not has_native():
            lacks = "without native code"
        elif model.dtype != torch.float32:
            lacks = f"which computes in {model.dtype}"
        elif config._attn_implementation != "sdpa" and model._supports_sdpa:  # its default otherwise
            lacks = f"with {config._attn_implementation} attention instead of sdpa"
    if requested != "auto" and lacks:
        refuse("attention", f"{requested!r} for {type(model).__name__}, {lacks}", "'model' or 'auto' for it")
    return "model" if lacks else wanted


def has_sinks(model: PreTrainedModel) -> bool:
    return any(name.endswith("sinks") for name, _ in model.named_parameters())


def why_its_own(model: PreTrainedModel, device_type: str) -> str | None:
    """Why a model keeps its own attention on such a device, whatever else is there; None: it need not."""
    config = model.config.get_text_config(decoder=True)
    if not (model._supports_attention_backend and model._supports_flex_attn):
        return "which by its class takes no BlockMask, or no attention function"
    if getattr(config, "alibi", False):
        return "which has ALiBi"
    if getattr(config, "attn_logit_softcapping", None) and config._attn_implementation != "eager":
        return "whose scores are soft-capped, but not by its own sdpa"  # sdpa of transformers 5.17 ignores soft-capping
    if any("forward" in vars(module) for module in copies(model)):
        return "of which a forward was replaced (by torch.compile, or hooks)"  # a copy would run the original's
    if device_type == "cuda" and (size := _smallest_head(config)) < 16:
        return f"whose heads have {size} numbers, and the kernel at least 16"
    return None


def _smallest_head(config: PreTrainedConfig) -> int:
    """How many numbers it has. Since transformers 5.24 layers may differ in it, as Gemma 4's do."""
    own: Any = config
    if getattr(config, "_heterogeneity_spec", None) is None:
        layers = [own]
    else:
        layers = [own.per_layer_config[i] for i in range(own.num_hidden_layers)]
    return min(getattr(layer, "head_dim", None) or layer.hidden_size // layer.num_attention_heads for layer in layers)


def _lacks(model: PreTrainedModel) -> str | None:
    if lacks := why_its_own(model, model.device.type):
        return lacks
    if model.device.type == "cuda":
        return None if has_triton() else "where Triton does not work"
    return None if model.device.type == "cpu" else f"on {model.device.type!r}, where it is untested"

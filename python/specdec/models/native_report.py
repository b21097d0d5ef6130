"""Which parts of a model run by operations of our own: on a CPU, and its attention on a GPU."""

from __future__ import annotations

from collections import Counter

from torch import nn
from transformers import PreTrainedModel

from specdec_kernels import MOST_ATTENDING, Packing

from .attention_choice import why_its_own
from .cached_model import CachedModel
from .linear import NativeLinear
from .native_parts import NativeAngles, NativeGated, NativeRMSNorm


def native_report(model: PreTrainedModel) -> dict[str, str]:
    """Returns what there is to say of each kind of part, by its name."""
    cached = CachedModel(model)
    modules = list(cached.steps.modules())
    linear = Counter(_stored(m) for m in modules if isinstance(m, NativeLinear))
    others = sum(isinstance(m, nn.Linear) and not isinstance(m, NativeLinear) for m in modules)
    numbers = ", ".join(f"{count} of {stored}" for stored, count in sorted(linear.items())) or "none"
    lacks = why_its_own(model, "cuda")
    kinds = {"norms": NativeRMSNorm, "angles of positions": NativeAngles, "gated layers": NativeGated}
    return {
        "linear layers": f"{numbers}" + (f"; {others} by PyTorch" if others else ""),
        "attention": "native" if cached.attention == "native" else "the model's own function",
        "attention on a GPU": f"its own, of a model {lacks}"
        if lacks
        else f"fused, of up to {MOST_ATTENDING} tokens a step",
        **({"recurrent layers": str(len(cached.recurrent))} if cached.recurrent else {}),
        **{name: str(sum(isinstance(m, kind) for m in modules)) for name, kind in kinds.items()},
        "forwards": "replayed" if cached.is_recorded else "not recorded, as there are hooks or adapters",
    }


def _stored(layer: NativeLinear) -> str:
    return str(layer.weight.dtype).removeprefix("torch.") if layer.packing == Packing.NONE else layer.packing.name

"""Which parts of a model run by operations of our own."""

from __future__ import annotations

from collections import Counter

from torch import nn
from transformers import PreTrainedModel

from specdec_kernels import Packing

from .cached_model import CachedModel
from .linear import NativeLinear
from .native_parts import NativeAngles, NativeGated, NativeRMSNorm
from .product import MOST_ROWS, UNIT, has_kernel


def native_report(model: PreTrainedModel) -> dict[str, str]:
    """Returns what there is to say of each kind of part, by its name."""
    cached = CachedModel(model)
    modules = list(cached.steps.modules())
    linear = Counter(_stored(m) for m in modules if isinstance(m, NativeLinear))
    others = sum(isinstance(m, nn.Linear) and not isinstance(m, NativeLinear) for m in modules)
    numbers = ", ".join(f"{count} of {stored}" for stored, count in sorted(linear.items())) or "none"
    kinds = {"norms": NativeRMSNorm, "angles of positions": NativeAngles, "gated layers": NativeGated}
    return {
        "linear layers": f"{numbers}" + (f"; {others} by PyTorch" if others else ""),
        "attention": "native" if cached.reads_only_filled else "the model's own function",
        **({"recurrent layers": str(len(cached.recurrent))} if cached.recurrent else {}),
        **{name: str(sum(isinstance(m, kind) for m in modules)) for name, kind in kinds.items()},
        **({"on an NVIDIA GPU": _on_a_gpu([m for m in modules if isinstance(m, nn.Linear)])} if has_kernel() else {}),
        "forwards": "replayed" if cached.is_recorded else "not recorded, as there are hooks or adapters",
    }


def _on_a_gpu(layers: list[nn.Linear]) -> str:
    """Of a model that may be elsewhere now."""
    count = sum(layer.in_features % UNIT == 0 for layer in layers)
    return f"{count} of {len(layers)} linear layers in bfloat16 and float16, up to {MOST_ROWS} tokens at a time"


def _stored(layer: NativeLinear) -> str:
    return str(layer.weight.dtype).removeprefix("torch.") if layer.packing == Packing.NONE else layer.packing.name

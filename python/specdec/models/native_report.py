"""Which parts of a model on a CPU run by operations of our own."""

from __future__ import annotations

from collections import Counter

from torch import nn
from transformers import PreTrainedModel

from specdec_kernels import Packing

from .attention import choose, with_attention
from .linear import NativeLinear, with_native_linear
from .native_parts import NativeAngles, NativeGated, NativeRMSNorm, with_native_parts
from .recorded import is_recordable
from .recurrent import recurrent_layers, with_recurrence


def native_report(model: PreTrainedModel) -> dict[str, str]:
    """Returns what there is to say of each kind of part, by its name."""
    known = with_recurrence(model) if (recurrent := len(recurrent_layers(model))) else model
    attention = choose(model)
    steps = with_native_parts(with_native_linear(with_attention(known, attention)))
    modules = list(steps.modules())
    linear = Counter(_stored(m) for m in modules if isinstance(m, NativeLinear))
    others = sum(isinstance(m, nn.Linear) and not isinstance(m, NativeLinear) for m in modules)
    numbers = ", ".join(f"{count} of {stored}" for stored, count in sorted(linear.items())) or "none"
    kinds = {"norms": NativeRMSNorm, "angles of positions": NativeAngles, "gated layers": NativeGated}
    return {
        "linear layers": f"{numbers}" + (f"; {others} by PyTorch" if others else ""),
        "attention": "native" if attention == "native" else "the model's own function",
        **({"recurrent layers": str(recurrent)} if recurrent else {}),
        **{name: str(sum(isinstance(m, kind) for m in modules)) for name, kind in kinds.items()},
        "forwards": "replayed" if is_recordable(steps) else "not recorded, as there are hooks or adapters",
    }


def _stored(layer: NativeLinear) -> str:
    return str(layer.weight.dtype).removeprefix("torch.") if layer.packing == Packing.NONE else layer.packing.name

"""Which parts of a model run by operations of our own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from specdec_layers import MOST_ATTENDING, Packing
from torch import nn
from transformers import PreTrainedModel

from .exchanged.beside import all_beside
from .exchanged.decoder_layers import NativeLayer, with_native_layers
from .exchanged.elementwise import NativeAngles, NativeGated
from .exchanged.int8_linear import Int8Linear, LastInt8Linear
from .exchanged.linear import LastLinear, NativeLinear
from .exchanged.native_setting import SETTING, is_wanted
from .exchanged.norms import NativeRMSNorm
from .exchanged.product import MOST_ROWS, MOST_ROWS_INT8, UNIT, has_kernel
from .forward.attention_choice import why_its_own
from .forward.cached_model import CachedModel

_LAST = (LastLinear, LastInt8Linear)


def native_report(model: PreTrainedModel) -> dict[str, str]:
    """Returns what there is to say of each kind of part, by its name."""
    cached = CachedModel(model)
    modules, exchanged = (
        list(cached.forwards.steps.modules()),
        list(with_native_layers(cached.forwards.steps, "cpu").modules()),
    )
    linear = Counter(_stored(m) for m in modules if isinstance(m, NativeLinear | Int8Linear))
    layers = [m for m in exchanged if isinstance(m, NativeLayer)]
    others = sum(isinstance(m, nn.Linear) and not isinstance(m, NativeLinear | Int8Linear) for m in modules)
    numbers = ", ".join(f"{count} of {stored}" for stored, count in sorted(linear.items())) or "none"
    together = Counter(len(beside.layers) for beside in all_beside(cached.forwards.steps))
    products = ", ".join(f"{count} of {size} layers" for size, count in sorted(together.items(), reverse=True))
    why = "" if is_wanted() else f", as {SETTING} is 0"
    lacks = why_its_own(model, "cuda")
    kinds = {"norms": NativeRMSNorm, "angles of positions": NativeAngles, "gated layers": NativeGated}
    return {
        "linear layers": f"{numbers}" + (f"; {others} by PyTorch" if others else ""),
        "layers computed together": products or f"none{why}",
        "attention": "the model's own function" if cached.attention.name == "model" else cached.attention.name,
        "attention on a GPU": f"its own, of a model {lacks}"
        if lacks
        else f"fused, of up to {MOST_ATTENDING} tokens a step",
        **({"recurrent layers": str(len(cached.recurrent))} if cached.recurrent else {}),
        **{name: str(sum(isinstance(m, kind) for m in modules)) for name, kind in kinds.items()},
        "decoder layers": f"{len(layers)} on a GPU, none on a CPU",
        **({"on an NVIDIA GPU": _on_a_gpu(exchanged, layers)} if has_kernel() else {}),
        **(_forwards(cached) if cached.device.type == "cpu" else {}),
    }


def _on_a_gpu(modules: Sequence[nn.Module], layers: Sequence[Any]) -> str:
    """Of a model that may be elsewhere now."""
    linear = [m for m in modules if isinstance(m, nn.Linear)]
    int8 = sum(isinstance(layer, Int8Linear) for layer in linear)
    count = sum(layer.in_features % UNIT == 0 for layer in linear) - int8
    norms, sums = sum(len(layer.defers) for layer in layers), sum(isinstance(m, _LAST) for m in linear)
    way = f", with {norms} norms and {sums} sums on their way" if norms + sums else ""
    told = f"{count} of {len(linear)} linear layers in bfloat16 and float16{way}, up to {MOST_ROWS} tokens at a time"
    return f"{told}; {int8} in 8 bits, up to {MOST_ROWS_INT8}" if int8 else told


def _forwards(cached: CachedModel) -> dict[str, str]:
    return {"forwards": "replayed" if cached.forwards.is_recorded else "not recorded, as there are hooks or adapters"}


def _stored(layer: NativeLinear | Int8Linear) -> str:
    return str(layer.weight.dtype).removeprefix("torch.") if layer.packing == Packing.NONE else layer.packing.name

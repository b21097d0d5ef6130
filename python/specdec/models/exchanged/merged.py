"""Linear layers beside each other as one product on a GPU.

A product of few rows takes as long as reading its weights, and of a small weight longer: that of a k of 2 MB takes as
long as one of 8 MB. So the weights of layers beside each other are moved into one matrix, of which they are the rows.
They stay the same parameters with the same numbers, and each has a storage of its own, so that nobody who saves them
takes them for one tensor: accelerate would leave out all but the first of those that share a storage.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Sequence
from typing import Literal, TypeVar
from weakref import WeakValueDictionary

import torch
from torch import nn

from ..machine.free_memory import is_out_of_memory
from .beside import BESIDE, Beside, Names, all_beside, beside_in
from .copied_modules import is_hooked, with_modules
from .int8_linear import Int8Linear
from .linear import is_plain
from .native_setting import is_wanted
from .product import gated_product, product

M = TypeVar("M", bound=nn.Module)
_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


class _Merged(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # Gradients belong to the parameters, and autocast keeps its copies of these.
        if torch.is_grad_enabled() or torch.is_autocast_enabled(x.device.type):
            return super().forward(x)
        return vars(self)["beside"].take(self, x)


class MergedLinear(_Merged, nn.Linear):
    """What ``nn.Linear`` computes, together with the layers beside it. It shares all of the layer that it stands
    for."""


class MergedInt8Linear(_Merged, Int8Linear):
    """The same of weights in 8 bits."""


class Whole:
    """One tensor in whose memory others lie, one after the other. Who computes with it keeps it: captured graphs read
    this memory even if the parts have gone elsewhere."""

    def __init__(self, parts: Sequence[torch.Tensor]):
        self.tensor = torch.cat([part.detach() for part in parts])
        # Through DLPack a part has a storage of its own, which keeps the memory as well.
        for part, place in zip(parts, self.tensor.split([len(part) for part in parts]), strict=True):
            part.data = torch.from_dlpack(place)

    def has(self, parts: Sequence[torch.Tensor]) -> bool:
        """Whether these still are all of it: their data may have been set, or moved to another device or dtype."""
        place = self.tensor.data_ptr()
        for part in parts:
            same = part.dtype == self.tensor.dtype and part.shape[1:] == self.tensor.shape[1:]
            if not (same and type(part) is nn.Parameter and part.data_ptr() == place and part.is_contiguous()):
                return False
            place += part.nbytes
        return place == self.tensor.data_ptr() + self.tensor.nbytes


# By the address of the first part, which nothing else has as long as this lives. Models of one target share them.
_WHOLES: WeakValueDictionary[int, Whole] = WeakValueDictionary()


@torch.inference_mode(False)
@torch.no_grad()
def whole_of(parts: Sequence[torch.Tensor]) -> Whole:
    """Returns what these lie in, and moves them there if they do not. That takes their size of memory until the end."""
    whole = _WHOLES.get(parts[0].data_ptr())
    if whole is None or not whole.has(parts):
        whole = Whole(parts)
        _WHOLES[whole.tensor.data_ptr()] = whole
    return whole


class _Product:
    """What layers beside each other compute, as one product if their weights still lie beside each other."""

    def __init__(self, layers: Sequence[nn.Linear]):
        self.layers, self.sizes = layers, [layer.out_features for layer in layers]
        self.weight = whole_of([layer.weight for layer in layers])
        self.bias = None if layers[0].bias is None else whole_of([layer.bias for layer in layers])

    @property
    def biases(self) -> torch.Tensor | None:
        return None if self.bias is None else self.bias.tensor

    @property
    def is_one(self) -> bool:
        if not self.weight.has([layer.weight for layer in self.layers]):
            return False
        biases = [layer.bias for layer in self.layers if layer.bias is not None]
        return not biases if self.bias is None else self.bias.has(biases)

    def __call__(self, x: torch.Tensor) -> Sequence[torch.Tensor]:
        if not self.is_one:
            return [product(x, layer.weight, layer.bias) for layer in self.layers]
        y = product(x, self.weight.tensor, self.biases)
        return y.split(self.sizes, -1)


def gated_together(
    x: torch.Tensor, gate: nn.Module, up: nn.Module, activation: Literal["silu", "gelu_tanh"]
) -> torch.Tensor | None:
    """Returns ``activation(gate(x)) * up(x)`` as one product, if these two are one and its kernel gates."""
    own = vars(gate).get("beside")
    merged = own.compute if isinstance(own, Beside) and own.layers == [gate, up] else None
    if not isinstance(merged, _Product) or not merged.is_one or is_hooked(gate) or is_hooked(up):
        return None
    return gated_product(x, merged.weight.tensor, merged.biases, activation)


def with_merged(model: M, device: str = "cuda", names: Names = BESIDE) -> M:
    """Returns ``model`` with its plain linear layers beside each other on a GPU as one product each; ``model`` itself
    if there are none, or if the environment has ``SPECDEC_NATIVE=0``.

    Their parameters are moved beside each other, one group after the other, and stay the same objects, with the same
    numbers. Left alone is what is more than an ``nn.Linear`` or an ``Int8Linear`` (adapters, layers that others have
    quantised, shards, parametrised weights, hooks of accelerate), what has weights that other modules or tensors share,
    and, where memory runs out, the rest. The model's modules are not changed; see
    :func:`.copied_modules.with_modules`.

    Args:
        device: the type of device whose layers are merged.
        names: those of layers that a module calls with the same tensor.

    Raises:
        ValueError: ``SPECDEC_NATIVE`` is neither 0 nor 1.
    """
    if not is_wanted():
        return model
    merging = _Merging(model, device, names)
    merged = with_modules(model, merging.other)
    if merging.moved and device == "cuda":
        torch.cuda.empty_cache()  # what they left may not fit what comes, and a graph's capture could not free it
    return merged


def is_merged_as_before(model: nn.Module) -> bool:
    """Whether all that was merged in ``model`` still is."""
    products = (own.compute for own in all_beside(model))
    return all(product.is_one for product in products if isinstance(product, _Product))


class _Merging:
    def __init__(self, model: nn.Module, device: str, names: Names):
        weights = (p for module in model.modules() for p in module._parameters.values() if type(p) is nn.Parameter)
        self._device, self._names, self._uses = device, names, Counter(p.data_ptr() for p in weights)
        self._layers: dict[int, nn.Linear] = {}
        self._full = self.moved = False

    def other(self, module: nn.Module) -> nn.Module | None:
        """Returns what stands for ``module``, which comes after the modules around it."""
        for layers in beside_in(module, self._names):
            if not self._full and self._can_be_merged(layers):
                self._merge(layers)
        return self._layers.get(id(module))

    def _can_be_merged(self, layers: Sequence[nn.Linear]) -> bool:
        plain = all(map(self._is_known, layers))
        if not plain or any(id(layer) in self._layers for layer in layers) or len({*map(id, layers)}) < len(layers):
            return False
        biases = [layer.bias for layer in layers if layer.bias is not None]
        if len(biases) not in (0, len(layers)) or not all(type(bias) is nn.Parameter for bias in biases):
            return False
        groups = [group for group in ([layer.weight for layer in layers], biases) if group]
        same = all(len({(part.dtype, part.device) for part in group}) == 1 for group in groups)
        return same and all(self._is_alone(part) for group in groups for part in group)

    def _is_known(self, layer: nn.Linear) -> bool:
        is_int8 = type(layer) is Int8Linear and layer.weight.device.type == self._device
        return (is_int8 or is_plain(layer, *_DTYPES, device=self._device)) and not layer._forward_pre_hooks

    def _is_alone(self, part: torch.Tensor) -> bool:
        """Whether no other tensor is known to share its memory."""
        own = part.untyped_storage().nbytes() == part.nbytes > 0 and part.is_contiguous()
        return own and self._uses[part.data_ptr()] == 1 and not (part.device.type == "cpu" and part.is_shared())

    def _merge(self, layers: Sequence[nn.Linear]) -> None:
        before = layers[0].weight.data_ptr()
        fast = [copy.copy(layer) for layer in layers]
        try:
            product = _Product(fast)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            self._full = True
            return
        self.moved = self.moved or layers[0].weight.data_ptr() != before
        for layer in fast:
            layer.__class__ = MergedInt8Linear if isinstance(layer, Int8Linear) else MergedLinear
        Beside(fast, product)
        self._layers.update((id(layer), own) for layer, own in zip(layers, fast, strict=True))

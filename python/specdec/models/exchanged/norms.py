"""RMSNorms of a model by operations of our own, on a CPU and a GPU: alone, together with the sum before them, or left
to the products that follow them (``product``). What a module computes is found by trying it."""

from __future__ import annotations

import copy
import functools
import inspect
from typing import Any, NamedTuple, cast

import torch
from specdec_layers import add_rms_norm, rms_norm
from torch import nn

from .copied_modules import is_hooked, reclass
from .deferred import Deferred, computed, settle, source_of
from .linear import is_ours
from .product import DEVICE, added_product, deferred_norm

_EPSILONS = ("variance_epsilon", "eps", "epsilon")
_SIZE = 64  # of what is tried
_ON_GPUS = (torch.float32, torch.bfloat16, torch.float16)


class Sum(NamedTuple):
    """``x + after(delta)`` that is still to be computed."""

    x: torch.Tensor
    delta: torch.Tensor
    after: NativeRMSNorm | None

    def alone(self) -> torch.Tensor:
        after: Any = self.after
        return self.x + (self.delta if after is None else after(self.delta))


def deferred_sum(x: torch.Tensor, delta: torch.Tensor, after: nn.Module | None) -> torch.Tensor:
    """Returns ``x + after(delta)``: computed by the product that delta is, or else left to the norm that follows."""
    x = computed(x)
    if after is not None and passes(after):
        after = None
    if after is None and (total := added_product(x, delta)) is not None:
        return total
    delta, own = computed(delta), after if isinstance(after, NativeRMSNorm) else None
    if after is not None and (own is None or not own.joins(delta)):
        delta, own = after(delta), None
    added = Sum(x, delta, own)
    fits = computes(x) and (delta.shape, delta.dtype, delta.device) == (x.shape, x.dtype, x.device)
    return Deferred.of(x, added.alone, added) if fits else added.alone()


def passes(module: nn.Module) -> bool:
    """Whether a module gives what it is given: dropout, outside of training."""
    return type(module) is nn.Dropout and not (module.training or is_hooked(module))


class NativeRMSNorm:
    """Of a module that computes RMSNorm."""

    offset: float
    epsilon_name: str
    round_first: bool

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        if isinstance(added := source_of(x), Sum) and self.computes(x):
            return self._of_sum(x, added)
        x = computed(x)
        return rms_norm(x, *self.numbers(), **self.form()) if self.computes(x) else super().forward(x)  # type: ignore[misc]

    def _of_sum(self, x: torch.Tensor, added: Sum) -> torch.Tensor:
        """Computes the sum, which x is, and returns its norm."""
        delta, after = added.delta, cast(Any, added.after)
        own = {**self.form(), "delta_weight": None, "delta_epsilon": 0.0}
        if after is not None and after.form() == self.form():
            own["delta_weight"], own["delta_epsilon"] = after.numbers()
        elif after is not None:
            delta = after(delta)
        total, normed = add_rms_norm(added.x, delta, *self.numbers(), **own)
        settle(x, total)
        return normed

    def before(self: Any, x: torch.Tensor) -> torch.Tensor:
        """Returns the norm of x, left to the products of it where these can compute it."""
        weight, epsilon = self.numbers()
        if weight is None or isinstance(source_of(x), Sum) or is_hooked(self):
            return self(x)
        return deferred_norm(computed(x), weight, epsilon, self.form(), functools.partial(self, x))

    def joins(self: Any, x: torch.Tensor) -> bool:
        """Whether it can be computed by the sum of which it is a part."""
        return self.numbers()[0] is not None and self.computes(x) and not is_hooked(self)

    def computes(self, x: torch.Tensor) -> bool:
        weight, _ = self.numbers()
        return computes(x) and (weight is None or weight.dtype == x.dtype)

    def numbers(self: Any) -> tuple[torch.Tensor | None, float]:
        """Returns the weight and the epsilon of the module."""
        return getattr(self, "weight", None), getattr(self, self.epsilon_name)

    def form(self) -> dict[str, Any]:
        return {"offset": self.offset, "round_first": self.round_first}


def computes(x: torch.Tensor) -> bool:
    """Whether operations of our own compute with what a module is given, where they are there at all."""
    if x.device.type != DEVICE:
        return is_ours(x)
    return x.dtype in _ON_GPUS and not torch.is_grad_enabled() and not torch.is_autocast_enabled(DEVICE)


def native_norm(module: nn.Module) -> nn.Module | None:
    """Returns what computes the same as ``module`` by our operations, if that is an RMSNorm."""
    parameters = {name: p for name, p in module._parameters.items() if p is not None}
    names = [name for name in _EPSILONS if isinstance(vars(module).get(name), float)]
    if len(names) != 1 or module._modules or not parameters.keys() <= {"weight"} or "forward" in vars(module):
        return None
    weight = parameters.get("weight")
    dtypes = _ON_GPUS if weight is not None and weight.device.type == DEVICE else (torch.float32,)
    if weight is not None and (weight.dtype not in dtypes or weight.dim() != 1):
        return None
    kind: Any = type(module)
    found = _computed_by(kind, names[0], weight is not None)
    if found is None:
        return None
    fast = copy.copy(module)
    reclass(fast, NativeRMSNorm, epsilon_name=names[0], **found)
    return fast


@functools.cache
def _computed_by(kind: Any, epsilon: str, weighted: bool) -> dict[str, Any] | None:
    """Returns how a class computes RMSNorm, as ``offset`` and ``round_first`` of :func:`specdec_layers.rms_norm`;
    None: it computes something else."""
    if [*inspect.signature(kind.forward).parameters][2:]:
        return None
    tried = kind.__new__(kind)
    nn.Module.__init__(tried)
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(_SIZE, generator=generator)
    setattr(tried, epsilon, 1e-3)
    x = torch.randn(8, _SIZE, generator=generator) * torch.logspace(-3, 4, 8)[:, None]

    def result(dtype: torch.dtype) -> torch.Tensor:
        if weighted:
            tried.register_parameter("weight", nn.Parameter(weight.to(dtype), requires_grad=False))
        return tried(x.to(dtype))

    try:
        found, half = result(torch.float32), result(torch.bfloat16)
    except Exception:  # other classes need what this one was not given
        return None
    for offset in (0.0, 1.0) if weighted else (0.0,):
        own = rms_norm(x, weight if weighted else None, 1e-3, offset=offset)
        if found.dtype == own.dtype and found.shape == own.shape and torch.allclose(found, own, rtol=1e-5, atol=1e-6):
            factor = weight.bfloat16().float() + offset
            wide = rms_norm(x.bfloat16().float(), None, 1e-3)
            rounded = [(y * factor).bfloat16() if weighted else y for y in (wide, wide.bfloat16().float())]
            late, first = ((y != half).sum() for y in rounded)
            return {"offset": offset, "round_first": bool(first < late)}
    return None

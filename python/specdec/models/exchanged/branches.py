"""Decoder layers as branches, each of which adds to a tensor what a module gives for a norm of it. What a layer
consists of is found by trying it, with modules that only note how they are called in place of its own."""

from __future__ import annotations

import copy
import inspect
import itertools
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import nn

_MOST_MODULES = 4  # beside the norms
_OTHERS = "_others"  # stands for all arguments that a layer has no name for
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Of x, of what is added, and of the module by which that goes before. Returns the sum.
Add = Callable[[torch.Tensor, torch.Tensor, nn.Module | None], torch.Tensor]


class Branch(NamedTuple):
    """``x + after(module(norm(x)))``, by the names of a layer's modules."""

    norm: str
    module: str
    after: str | None
    called_as: str | None  # the argument of the module that is the norm of x; None: the first one, which has no name
    arguments: Mapping[str, str]  # its other arguments, and the names that the layer has for them
    takes_others: bool  # whether it is given what the layer has no name for


class Branches(NamedTuple):
    """
    Attributes:
        parts: in their order.
        names: of the layer's arguments but for the first one.
        defaults: of those that have one.
    """

    parts: tuple[Branch, ...]
    names: frozenset[str]
    defaults: Mapping[str, object]

    def take(self, arguments: Mapping[str, object]) -> bool:
        """Whether the layer can be given these arguments after the first one."""
        known = arguments.keys() <= self.names or any(part.takes_others for part in self.parts)
        return known and self.names <= {**self.defaults, **arguments}.keys()

    def first_norm(self, layer: nn.Module) -> nn.Module | None:
        return layer._modules[self.parts[0].norm]

    def run(
        self,
        layer: nn.Module,
        x: torch.Tensor,
        arguments: Mapping[str, object],
        normed: Callable[[Branch, torch.Tensor], torch.Tensor],
        add: Add,
    ) -> torch.Tensor:
        """Returns what ``layer`` computes of ``x`` and its other arguments, by ``add``, and by ``normed``, which
        returns the norm that begins a branch."""
        given = {**self.defaults, **arguments}
        others = {name: value for name, value in given.items() if name not in self.names}
        modules: dict[str, Any] = layer._modules
        for part in self.parts:
            own = {name: given[of_layer] for name, of_layer in part.arguments.items()}
            own |= others if part.takes_others else {}
            module, given_x = modules[part.module], normed(part, x)
            delta = module(given_x, **own) if part.called_as is None else module(**{part.called_as: given_x}, **own)
            if isinstance(delta, tuple):  # whose others are weights, of attention or of experts
                delta = delta[0]
            x = add(x, delta, None if part.after is None else modules[part.after])
        return x


def branches_of(layer: nn.Module, norms: Collection[str]) -> Branches | None:
    """Returns the branches that a layer consists of; None: it computes something else, or takes arguments in another
    way. What it computes may depend on its numbers. It is not changed.

    Args:
        norms: the names of those of its modules that may begin a branch.
    """
    _, *parameters = inspect.signature(type(layer).forward).parameters.values()
    others = [name for name, child in layer._modules.items() if child is not None and name not in norms]
    if not parameters or parameters[0].name != "hidden_states" or len(others) > _MOST_MODULES:
        return None
    if layer._parameters or layer._buffers:  # which may be changed in place
        return None
    for chosen in itertools.product((True, False), repeat=len(others)):
        in_tuples = {name for name, own in zip(others, chosen, strict=True) if own}
        try:
            found = _tried(layer, norms, in_tuples, parameters[1:])
        except Exception:  # other layers need what this one was not given
            continue
        if found is not None:
            return found
    return None


class _Call(NamedTuple):
    name: str
    args: tuple
    kwargs: dict[str, object]
    result: torch.Tensor


class _Noting(nn.Module):
    def __init__(self, name: str, number: int, in_tuple: bool, calls: list[_Call]):
        super().__init__()
        self._name, self._number, self._in_tuple, self._calls = name, number, in_tuple, calls

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        (x,) = (value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor))
        result = x * (self._number + 2) / 4 + self._number
        self._calls.append(_Call(self._name, args, kwargs, result))
        return (result, object()) if self._in_tuple else result


@torch.no_grad()
def _tried(
    layer: nn.Module, norms: Collection[str], in_tuples: Collection[str], parameters: Sequence[inspect.Parameter]
) -> Branches | None:
    """Returns the branches of a layer in which these modules return tuples."""
    names = frozenset(p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY))
    defaults = {p.name: p.default for p in parameters if p.name in names and p.default is not p.empty}
    given = {p.name: object() for p in parameters if p.name in names}
    fewest = {name: value for name, value in given.items() if name not in defaults}
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        given[_OTHERS] = object()
    calls = list[_Call]()
    tried = copy.copy(layer)
    tried.training = False
    tried._modules = {
        name: child if child is None else _Noting(name, i, name in in_tuples, calls)
        for i, (name, child) in enumerate(layer._modules.items())
    }

    def outcome(of: Branches | None, x: torch.Tensor, arguments: Mapping[str, object]) -> list[object]:
        calls.clear()
        x, forward = x.clone(), cast(Any, type(layer)).forward
        return [forward(tried, x, **arguments) if of is None else of.run(tried, x, arguments, normed, _added), *calls]

    def normed(part: Branch, x: torch.Tensor) -> torch.Tensor:
        return cast(Any, tried._modules[part.norm])(x)

    x = torch.linspace(-3.0, 5.0, 24).view(1, 3, 8)
    x[0, 0, 0] = torch.inf  # which some layers clamp
    outcome(None, x, given)
    found = Branches(tuple(_read(calls, norms, given)), names, defaults)
    for own, arguments in itertools.product(map(x.to, _DTYPES), (given, fewest)):
        if not _same(outcome(None, own, arguments), outcome(found, own, arguments)):
            return None
    return found if found.parts else None


def _read(calls: Sequence[_Call], norms: Collection[str], given: Mapping[str, object]) -> list[Branch]:
    """Returns the branches that called these, if the layer consists of branches."""
    names = {id(value): name for name, value in given.items()}
    left, parts = deque(calls), list[Branch]()
    while left:
        norm, module = left.popleft(), left.popleft()
        is_after = bool(left) and any(value is module.result for value in left[0].args)
        after = left.popleft().name if is_after else None
        called_as = next((name for name, value in module.kwargs.items() if value is norm.result), None)
        arguments = {name: names[id(value)] for name, value in module.kwargs.items() if name != called_as}
        takes_others = arguments.pop(_OTHERS, None) is not None
        if norm.name not in norms:
            raise ValueError(f"{norm.name} is no norm")
        parts.append(Branch(norm.name, module.name, after, called_as, arguments, takes_others))
    return parts


def _added(x: torch.Tensor, delta: torch.Tensor, after: Any) -> torch.Tensor:
    return x + (delta if after is None else after(delta))


def _same(a: Any, b: Any) -> bool:
    """Whether these are the same, but for tensors of the same numbers."""
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(_same, a, b))
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(_same(a[name], b[name]) for name in a)
    return a is b

"""Exchanges modules of a model without changing it."""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import FunctionType
from typing import Any, TypeVar, cast

import torch
from torch import nn
from transformers import PreTrainedConfig

M = TypeVar("M", bound=nn.Module)
_PLAIN = {bool, int, float, str, torch.dtype}


def with_modules(model: M, other: Callable[[nn.Module], nn.Module | None]) -> M:
    """Returns ``model`` with the module ``other(module)`` in place of each one for which that is not None; ``model``
    itself if there is none.

    The modules around those are copied without their weights. What is inside of an adapter of peft is not looked at,
    because it knows which adapter is active: adapters that are switched later act in both models.
    """
    return _copied(model, other, {})


def _copied(module: M, other: Callable[[nn.Module], nn.Module | None], done: dict[int, nn.Module]) -> M:
    if id(module) not in done:
        copied: nn.Module = module
        if (exchanged := other(module)) is not None:
            copied = exchanged
        elif not type(module).__module__.startswith("peft."):
            children = {n: c if c is None else _copied(c, other, done) for n, c in module._modules.items()}
            if any(children[n] is not c for n, c in module._modules.items()):
                copied = copy.copy(module)
                copied._modules = children
        done[id(module)] = copied
    return cast(M, done[id(module)])


def is_hooked(module: nn.Module) -> bool:
    """Whether somebody else's code expects to run when the module is called. Transformers leaves hooks in a model that
    was asked for hidden states or attentions once, which do nothing in calls that do not ask for them."""
    hooks = (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
    return any(getattr(hook, "__module__", None) != "transformers.utils.output_capturing" for hook in hooks)


def numbers_in(modules: Iterable[nn.Module]) -> tuple[object, ...]:
    """The numbers, names and the like that modules and their configurations have as attributes, of which copies of them
    have their own: the scale of an attention, the epsilon of a norm."""
    own = [vars(module) for module in modules]
    configs = {id(c): vars(c) for attributes in own if isinstance(c := attributes.get("config"), PreTrainedConfig)}
    return tuple(value for part in (*own, *configs.values()) for value in part.values() if type(value) in _PLAIN)


def same_objects(first: Sequence[object], second: Sequence[object]) -> bool:
    return len(first) == len(second) and all(map(operator.is_, first, second))


def reclass(module: nn.Module, *first: type, **members: object) -> None:
    """Gives a module a class of its own, under the name of the one that it has: with ``first`` before it, and with
    these members."""
    own = type(module)
    names = {"__module__": own.__module__, "__qualname__": own.__qualname__}
    module.__class__ = type(own.__name__, (*first, own), {**members, **names})


def with_globals(function: Any, other: Mapping[str, object]) -> FunctionType:
    """Returns the same code, which finds ``other`` under some of the names of its module."""
    found = FunctionType(
        function.__code__,
        {**function.__globals__, **other},
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    found.__kwdefaults__ = function.__kwdefaults__
    return found

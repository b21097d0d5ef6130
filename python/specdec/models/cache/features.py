"""What a head reads of its target: hidden states, taken by hooks in the target's own forwards, and kept for every
token of a batch."""

from __future__ import annotations

import copy
import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import nn

from ...checks import refuse
from ..exchanged.layers import layers_path

T = TypeVar("T")
BEFORE_NORM = -1  # the number of a state: the output of the last layer, before the model's last norm
# Takes states [n, q, len(states) * h], those of one token side by side. Returns what is kept of them, [n, q, width].
Combine = Callable[[torch.Tensor], torch.Tensor]


class FeatureStore:
    """Records the features of all tokens that a model is fed over the cache of a batch, each in its token's slot. As
    with keys, those of a rejected draft are overwritten later, and the last slot takes those of padding.

    Args:
        states: which hidden states, counted as in transformers' ``hidden_states``: 0 is the embedding, i the output
            of layer i - 1, and the number of layers the final state, *after* the norm; or ``BEFORE_NORM``.
        combine: makes features of them. It runs in every forward, also while one is captured as a graph.
        size, capacity: rows of the batch, and slots of a row.
        width, dtype, device: of the features.

    Attributes:
        features: [B, S, width].
        tokens: [B, S] int64, what was fed.
    """

    def __init__(
        self,
        states: Sequence[int],
        combine: Combine,
        size: int,
        capacity: int,
        width: int,
        dtype: torch.dtype,
        device: torch.device,
    ):
        self.states, self.combine, self.capacity = tuple(states), combine, capacity
        self.features = torch.zeros(size, capacity, width, dtype=dtype, device=device)
        self.tokens = torch.zeros(size, capacity, dtype=torch.int64, device=device)
        self._first_slot = torch.arange(size, device=device)[:, None] * capacity
        # By module. The copies refer to the module's parts, and not to the module itself.
        self._tapped: weakref.WeakKeyDictionary[nn.Module, tuple[nn.Module, dict]] = weakref.WeakKeyDictionary()

    def recording(self, module: Callable[..., T], slots: torch.Tensor, first_row: int) -> Callable[..., T]:
        """Returns a function that does what ``module`` does, and records the features of the tokens that it is fed.

        Args:
            module: a causal LM, or its base model; it is not changed.
            slots: [n, q] int64, the slots of the tokens, in the n rows from ``first_row`` on.
        """
        assert isinstance(module, nn.Module)
        if module not in self._tapped:
            self._tapped[module] = tapped(module, self.states)
        model, taken = self._tapped[module]

        def call(*, input_ids: torch.Tensor, **inputs: Any) -> T:
            result = model(input_ids=input_ids, **inputs)
            places = (self._first_slot[first_row : first_row + len(slots)] + slots).flatten()
            kept = self.combine(torch.cat([taken.pop(i).to(self.features.dtype) for i in self.states], -1))
            self.features.flatten(0, 1).index_copy_(0, places, kept.flatten(0, 1))
            self.tokens.view(-1).index_copy_(0, places, input_ids.flatten())
            return result

        return call

    def tensors(self) -> list[torch.Tensor]:
        """Returns all that it owns."""
        return [self.features, self.tokens, self._first_slot]

    def move(self, old: torch.Tensor, new: torch.Tensor) -> None:
        """Moves what is kept of the tokens in the slots ``old`` [m, n] int64 of the first m rows to the slots ``new``.
        All are read before any is written."""
        first = self._first_slot[: len(old)]
        source, target = (first + old).flatten(), (first + new).flatten()
        for kept in (self.features.flatten(0, 1), self.tokens.view(-1)):
            kept.index_copy_(0, target, kept.index_select(0, source))


def tapped(model: nn.Module, states: Sequence[int]) -> tuple[nn.Module, dict[int, torch.Tensor]]:
    """Returns a copy of ``model`` whose forwards put these hidden states [n, q, h] into the returned dictionary.

    The copy shares all parameters. Only the modules with a hook, and those that contain them, are copied, so the
    caller's model never has a hook, and several copies do not see each other's.

    Raises:
        ValueError: names the model's type, if its layers cannot be found or a forward was replaced.
    """
    config = model.config.get_text_config(decoder=True)  # type: ignore[union-attr, operator]
    count, taken = config.num_hidden_layers, {}
    layers = layers_path(model)  # type: ignore[arg-type]
    base = getattr(model, "base_model_prefix", "")
    copies: dict[str, nn.Module] = {}

    def own(path: str) -> nn.Module:
        if path not in copies:
            before, _, name = path.rpartition(".")
            copies[path] = _copied(model if not path else own(before)._modules[name], config.model_type)
            if path:
                own(before)._modules[name] = copies[path]
        return copies[path]

    def keep(state: int) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple, output: Any) -> None:
            taken[state] = output if isinstance(output, torch.Tensor) else output[0]

        return hook

    def keep_input(module: nn.Module, args: tuple, kwargs: dict) -> None:
        taken[0] = args[0] if args else kwargs["hidden_states"]

    for state in states:
        if state == BEFORE_NORM:
            own(f"{layers}.{count - 1}").register_forward_hook(keep(state))
        elif state == 0:
            own(f"{layers}.0").register_forward_pre_hook(keep_input, with_kwargs=True)
        elif state < count:
            own(f"{layers}.{state - 1}").register_forward_hook(keep(state))
        else:  # a base model's first output is what its head reads
            own(base if base in model._modules else "").register_forward_hook(keep(state))
    return own(""), taken


def _copied(module: nn.Module | None, model_type: str) -> nn.Module:
    """Returns a copy of ``module`` with the same parameters and submodules, and with its own lists of submodules and
    hooks."""
    assert module is not None
    if "forward" in vars(module):  # as by accelerate's hooks: the copy would call the original module
        refuse("target", f"model type {model_type!r}, whose forward was replaced", "models that run their class's own")
    module = copy.copy(module)
    module._modules = dict(module._modules)
    for name in ("_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called"):
        setattr(module, name, OrderedDict(getattr(module, name)))
    for name in ("_forward_pre_hooks", "_forward_pre_hooks_with_kwargs"):
        setattr(module, name, OrderedDict(getattr(module, name)))
    return module

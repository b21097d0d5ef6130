"""Linear layers beside each other: one module calls them with the same tensor, one after the other, so that the first
call can compute all of them in one operation."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import cast

import torch
from torch import nn

Names = tuple[tuple[str, ...], ...]
BESIDE: Names = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))  # as transformers names them


class Beside:
    """Takes the calls of layers of one module.

    Args:
        layers: two or more, which usually are called with the same tensor.
        compute: returns what each of them computes of a tensor, in their order.
    """

    def __init__(self, layers: Sequence[nn.Linear], compute: Callable[[torch.Tensor], Sequence[torch.Tensor]]):
        self.layers, self.compute, self._x = [*layers], compute, cast(torch.Tensor | None, None)
        self._results: dict[int, torch.Tensor] = {}
        for layer in layers:
            vars(layer)["beside"] = self

    def take(self, layer: nn.Linear, x: torch.Tensor) -> torch.Tensor:
        """Returns what ``layer`` computes of ``x``."""
        if x is not self._x or id(layer) not in self._results:
            found = self.compute(x)
            self._x, self._results = x, {id(own): y for own, y in zip(self.layers, found, strict=True)}
        y = self._results.pop(id(layer))
        if not self._results:  # nothing is kept from step to step
            self._x = None
        return y


def beside_in(module: nn.Module, names: Names = BESIDE) -> Iterator[list[nn.Linear]]:
    """The layers beside each other that ``module`` itself has."""
    for group in names:
        found = [layer for name in group if isinstance(layer := module._modules.get(name), nn.Linear)]
        if len(found) == len(group) and len({layer.in_features for layer in found}) == 1:
            yield found


def all_beside(model: nn.Module) -> list[Beside]:
    """Returns those whose layers ``model`` has."""
    found = (vars(module).get("beside") for module in model.modules())
    return [*{id(own): own for own in found if isinstance(own, Beside)}.values()]

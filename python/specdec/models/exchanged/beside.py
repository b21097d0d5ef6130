"""Linear layers beside each other: one module calls them with the same tensor, one after the other, so that the first
call can compute all of them in one operation."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence

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
        self.layers, self.compute = [*layers], compute
        # By thread, since each has a text of its own: what was multiplied, and what is not taken yet.
        self._open: dict[int, tuple[torch.Tensor, dict[int, torch.Tensor]]] = {}
        for layer in layers:
            vars(layer)["beside"] = self

    def take(self, layer: nn.Linear, x: torch.Tensor) -> torch.Tensor:
        """Returns what ``layer`` computes of ``x``."""
        thread = threading.get_ident()
        known, results = self._open.get(thread, (None, {}))
        if x is not known or id(layer) not in results:
            results = {id(own): y for own, y in zip(self.layers, self.compute(x), strict=True)}
            self._open[thread] = x, results
        y = results.pop(id(layer))
        if not results:  # nothing is kept from step to step
            del self._open[thread]
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

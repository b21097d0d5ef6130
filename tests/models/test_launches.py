"""How many kernels a decoding forward launches on a GPU, counted without one: operations that make something new or
write, as a GPU's forward of a Llama calls them. The numbers may only go down; the goals are 6 a layer, and 8 of a
forward outside its layers."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
from specdec.models import attention, native_parts
from specdec.models.cached_model import CachedModel
from specdec.models.calls import memory_of, tensors
from specdec.models.merged import with_merged
from support.models import prompts, tiny_model
from torch.utils._python_dispatch import TorchDispatchMode

FLEX = 3  # kernels of compiled flex attention on a GPU: its parts, and two sums over these
MOST = {1: (16, 19), 2: (18, 19), 5: (18, 19)}  # by fed tokens: of a layer, and outside the layers
_NOTHING = ("empty", "new_empty", "detach", "lift_fresh", "resolve_")  # begin names of what launches nothing
_PRODUCTS = ("linear", "mm", "addmm", "matmul", "bmm")


class Launches(TorchDispatchMode):
    """Keeps the names of what would be launched."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, operation: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        result = operation(*args, **(kwargs or {}))
        known = {memory_of(x) for x in tensors([*args, *(kwargs or {}).values()])}
        name = operation.__name__.split(".")[0]
        new = any(memory_of(x) not in known for x in tensors(result))
        if (new or operation._schema.is_mutable) and not name.startswith(_NOTHING):
            self.names.append(name)
        return result


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    """What differs on a CPU: its own linear layers and angles, and that flex attention is not compiled here."""
    launches = Launches()

    def flex(query, key, value, **others):
        launches.names += ["flex"] * FLEX
        return torch.empty(*query.shape[:-1], value.shape[-1])

    monkeypatch.setattr("specdec.models.cached_model.with_native_linear", lambda model: model)
    monkeypatch.setattr("specdec.models.cached_model.with_merged", functools.partial(with_merged, device="cpu"))
    monkeypatch.setattr(native_parts, "_angles", lambda module: None)
    monkeypatch.setattr(attention, "_compiled", lambda: flex)
    return launches


@pytest.mark.parametrize("q", MOST)
def test_of_a_forward(q, as_on_a_gpu):
    launches, by_layer = as_on_a_gpu, []
    cached = CachedModel(copy.deepcopy(tiny_model("llama")), attention="flex")
    layers = cached.steps.model.layers
    tokens, cache = torch.tensor(prompts(1, q, q)), cached.new_cache(1, 200)
    for layer in layers:
        layer.register_forward_pre_hook(lambda *_: by_layer.append([len(launches.names)]))
        layer.register_forward_hook(lambda *_: by_layer[-1].append(len(launches.names)))
    places = 7 + torch.arange(q)[None]
    layout = cached.layout(places, places, 7 + q)
    with torch.inference_mode(), launches:
        cached(tokens, cache, layout)
    names = launches.names
    first, last = by_layer[-1]
    of_layer, (most, most_outside) = names[first:last], MOST[q]
    products = [name for name in of_layer if name in _PRODUCTS]
    assert len(by_layer) == len(layers) and len(products) == 4  # q, k, v; o; gate, up; down
    assert len(of_layer) <= most, of_layer
    # What the first layer finds for all is of the forward.
    outside = len(names) - len(layers) * len(of_layer)
    assert outside <= most_outside, names[: by_layer[0][1]] + names[last:]

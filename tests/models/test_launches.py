"""How many kernels a decoding forward launches on a GPU, counted without one: operations that make something new or
write, as a GPU's forward of a Llama calls them. The numbers may only go down; the goal is 6 a layer."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
from specdec.models import deferred
from specdec.models.cached_model import CachedModel
from specdec.models.calls import memory_of, tensors
from specdec.models.merged import with_merged
from support.models import prompts, tiny_model
from torch.utils._python_dispatch import TorchDispatchMode

MOST = {1: (10, 5), 2: (10, 5), 5: (10, 5)}  # by fed tokens: of a layer, and outside the layers
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
    """What differs on a CPU: its own linear layers, and that Triton's kernels are interpreted."""
    launches = Launches()

    def fused(q, k, v, keys, values, *others, **more):
        launches.names.append("store_and_attend")
        return q.new_empty(*q.transpose(1, 2).shape[:-1], values.shape[-1])

    monkeypatch.setattr("specdec.models.cached_model.with_native_linear", lambda model: model)
    monkeypatch.setattr("specdec.models.cached_model.with_merged", functools.partial(with_merged, device="cpu"))
    monkeypatch.setattr(deferred, "store_and_attend", fused)
    return launches


@pytest.mark.parametrize("q", MOST)
def test_of_a_forward(q, as_on_a_gpu):
    launches, by_layer = as_on_a_gpu, []
    cached = CachedModel(copy.deepcopy(tiny_model("llama")), attention="fused")
    layers = cached.steps.model.layers
    tokens, cache = torch.tensor(prompts(1, q, q)), cached.new_cache(1, 200)
    for layer in layers:
        layer.register_forward_pre_hook(lambda *_: by_layer.append([len(launches.names)]))
        layer.register_forward_hook(lambda *_: by_layer[-1].append(len(launches.names)))
    places = 7 + torch.arange(q)[None]
    layout = cached.layout(places, places, 7 + q)
    with torch.inference_mode():
        cached(tokens, cache, layout)  # which tries what functions compute
        launches.names.clear(), by_layer.clear()
        with launches:
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

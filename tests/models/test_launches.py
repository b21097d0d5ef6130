"""How many kernels a decoding forward launches on a GPU, counted without one: operations that make something new or
write, as a GPU's forward of a Llama calls them. The numbers may only go down."""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any

import pytest
import torch
from specdec.models.exchanged import deferred
from specdec.models.forward.cached_model import CachedModel
from specdec.models.forward.calls import memory_of, tensors
from support.models import prompts, tiny_model
from support.native_layers import as_on_a_gpu
from torch.utils._python_dispatch import TorchDispatchMode

MOST = {1: (5, 5), 2: (5, 5), 5: (5, 5)}  # by fed tokens: of a layer, and outside the layers
_NOTHING = ("empty", "new_empty", "detach", "lift_fresh", "resolve_")  # begin names of what launches nothing


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


def names_of(layers: int, q: int) -> list[str]:
    """What a forward of q tokens launches through so many layers."""
    launches = Launches()

    def fused(q, k, v, keys, values, *others, **more):
        launches.names.append("store_and_attend")
        return q.new_empty(*q.transpose(1, 2).shape[:-1], values.shape[-1])

    with pytest.MonkeyPatch.context() as patch:
        as_on_a_gpu(patch)
        patch.setattr(deferred, "store_and_attend", fused)
        cached = CachedModel(copy.deepcopy(tiny_model("llama", layers=layers)), attention="fused")
        tokens, cache, places = torch.tensor(prompts(1, q, q)), cached.new_cache(1, 200), 7 + torch.arange(q)[None]
        layout = cached.layout(places, places, 7 + q)
        with torch.inference_mode():
            cached(tokens, cache, layout)  # which tries what functions compute
            launches.names.clear()
            with launches:
                cached(tokens, cache, layout)
    return launches.names


@pytest.mark.parametrize("q", MOST)
def test_of_a_forward(q):
    fewer, more = names_of(2, q), names_of(3, q)
    of_layer, (most, most_outside) = Counter(more) - Counter(fewer), MOST[q]
    assert of_layer.total() == len(more) - len(fewer) <= most, of_layer
    assert of_layer == {"norm_linear_reference": 2, "store_and_attend": 1, "add_linear_reference": 2}
    assert len(fewer) - 2 * of_layer.total() <= most_outside, Counter(fewer) - of_layer - of_layer

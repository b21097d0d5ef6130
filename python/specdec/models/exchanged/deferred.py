"""What one kernel does at once, a model's code calls one after the other: it rotates queries and keys, hands keys and
values to the cache, and then asks for attention. So the first two give tensors that have not been computed yet, which
attention takes apart; so do norms before products, products before sums (``product``), and sums before norms
(``norms``). Whoever else reads one has it computed first, so no model's code can tell the difference."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import torch
from specdec_layers import store_and_attend
from torch.utils._pytree import tree_map

_OF_ITS_FORM = {
    torch.Tensor.size, torch.Tensor.dim, torch.Tensor.numel, torch.Tensor.is_floating_point,
    *(
        vars(torch._C.TensorBase)[name].__get__
        for name in ("shape", "dtype", "device", "ndim", "is_cuda", "requires_grad", "layout")
    ),
}  # fmt: skip


class Deferred(torch.Tensor):
    """A tensor of a known form whose numbers ``compute`` gives, once they are read. ``source`` says to those who know
    it how they come about, until they are there: since whoever read them may have changed them."""

    _compute: Callable[[], torch.Tensor]
    _source: object
    _result: torch.Tensor | None

    @staticmethod
    def of(form: torch.Tensor, compute: Callable[[], torch.Tensor], source: object) -> Deferred:
        """``form`` has the shape, dtype and device of the result, and any numbers."""
        made = cast(Deferred, torch.Tensor._make_subclass(Deferred, form))
        made._compute, made._source, made._result = compute, source, None
        return made

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        with torch._C.DisableTorchFunctionSubclass():
            if function not in _OF_ITS_FORM:
                args, kwargs = tree_map(computed, (args, kwargs or {}))
            return function(*args, **(kwargs or {}))


def computed(given: Any) -> Any:
    """Returns a plain tensor for a deferred one, the same one each time, and anything else as it is."""
    if type(given) is not Deferred:
        return given
    own = vars(given)
    if own["_result"] is None:
        settle(given, own["_compute"]())
    return own["_result"]


def settle(given: torch.Tensor, result: torch.Tensor) -> None:
    """Gives a deferred tensor its numbers."""
    vars(given).update(_result=result, _source=None, _compute=None)


def source_of(given: object) -> object:
    return vars(given)["_source"] if type(given) is Deferred else None


class Rotation(NamedTuple):
    """Queries and keys that are still to be turned by the angles of their positions."""

    queries: torch.Tensor
    keys: torch.Tensor
    angles: tuple[torch.Tensor, torch.Tensor]


def deferred_rotation(
    function: Callable[..., tuple[torch.Tensor, torch.Tensor]],
    q: torch.Tensor,
    k: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns ``function(q, k, cos, sin)``, which has the shapes of q and k, without having called it."""
    source, found = Rotation(q, k, (cos, sin)), cast(list[tuple[torch.Tensor, torch.Tensor]], [])

    def result(i: int) -> torch.Tensor:
        if not found:
            found.append(function(q, k, cos, sin))
        return found[0][i]

    return Deferred.of(q, lambda: result(0), source), Deferred.of(k, lambda: result(1), source)


class NewKeys:
    """Keys and values of new tokens that are still to be stored in a layer.

    Attributes:
        keys, values: [n, H_kv, q, D] and [n, H_kv, q, D_v], the new ones; the keys may be deferred.
        stored: [n, H_kv, S, D] and [n, H_kv, S, D_v], all keys and values of their rows.
        slots: [n, q] int64, where they go.
        counter: gives so many zeros for the kernel, which the layers of a forward share.
        pending: whether they are still to be stored.
    """

    def __init__(
        self,
        keys: torch.Tensor,
        values: torch.Tensor,
        stored: tuple[torch.Tensor, torch.Tensor],
        slots: torch.Tensor,
        counter: Callable[[int], torch.Tensor],
        store: Callable[[torch.Tensor, torch.Tensor], object],
    ):
        self.keys, self.values, self.stored, self.slots, self.counter = keys, values, stored, slots, counter
        self.pending, self._store = True, store

    def all(self, which: int) -> torch.Tensor:
        """Returns all keys (0) or values (1) of the rows, the new ones among them."""
        if self.pending:
            self.pending = False
            self._store(computed(self.keys), computed(self.values))
        return self.stored[which]

    def deferred(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns all keys and all values, as what a cache gives."""
        keys, values = (Deferred.of(self.stored[i], functools.partial(self.all, i), self) for i in (0, 1))
        return keys, values


def attend_deferred(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, seen: torch.Tensor, **more: Any
) -> torch.Tensor:
    """Computes :func:`specdec_layers.store_and_attend` of what a model's code hands to attention: queries that are
    deferred or not, and keys and values of :meth:`NewKeys.deferred`, or plain ones, which are stored already."""
    new, rotation = source_of(key), source_of(query)
    if not isinstance(new, NewKeys) or new is not source_of(value) or not new.pending:
        keys, values = computed(key).contiguous(), computed(value).contiguous()
        return store_and_attend(computed(query), None, None, keys, values, None, seen, **more)
    new.pending = False
    if isinstance(rotation, Rotation) and rotation is source_of(new.keys):
        q, k, angles = rotation
    else:
        q, k, angles = computed(query), computed(new.keys), None
    counter = new.counter(q.shape[0] * q.shape[1])
    stored = *new.stored, new.slots
    return store_and_attend(q, k, computed(new.values), *stored, seen, angles=angles, counter=counter, **more)

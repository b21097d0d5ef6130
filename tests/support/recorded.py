"""A stand-in for a CUDA graph on a CPU: it records the operations of a call with the tensors that they read and write,
and runs them again without the Python code around them. As in a graph, whatever the call reads from elsewhere than
tensors keeps its first value."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

# A capture would fail, as these operations wait for the device, and the last one copies numbers of Python to it.
SYNCHRONISING = {
    "_local_scalar_dense", "nonzero", "equal", "is_nonzero", "item", "unique", "_unique2", "masked_select",
    "lift_fresh",
}  # fmt: skip


class Synchronised(RuntimeError):
    pass


class Recording(TorchDispatchMode):
    """Runs and records operations, and refuses those that would wait for a device."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func._schema.name.removeprefix("aten::") in SYNCHRONISING:
            raise Synchronised(str(func))
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        self.calls.append((func, args, kwargs, out))
        return out

    def replay(self) -> None:
        for func, args, kwargs, out in self.calls:
            results = _tensors(out)
            memory = {t.untyped_storage().data_ptr() for t in _tensors((args, kwargs))}
            new = [t.untyped_storage().data_ptr() not in memory for t in results]
            if results and not any(new) and not func._schema.is_mutable:
                continue  # views
            for old, fresh, is_new in zip(results, _tensors(func(*args, **kwargs)), new, strict=True):
                if is_new:  # also of an operation that writes something else
                    old.copy_(fresh)


def _tensors(tree: object) -> list[torch.Tensor]:
    return [leaf for leaf in tree_flatten(tree)[0] if isinstance(leaf, torch.Tensor)]


class RecordedGraph:
    def __init__(self, recording: Recording):
        self.recording, self.replays = recording, 0

    def replay(self) -> None:
        """Does nothing the first time: other than a capture, a recording has already run what it recorded."""
        if self.replays:
            self.recording.replay()
        self.replays += 1


def record(call: Callable[[], object], pool: object) -> tuple[RecordedGraph, object]:
    recording = Recording()
    with recording:
        result = call()
    return RecordedGraph(recording), result

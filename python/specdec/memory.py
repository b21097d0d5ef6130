"""What keys and values cost, what memory is free for them, and what to do where it runs out after all."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple, TypeVar
from weakref import WeakKeyDictionary

import torch

from .cache import StaticKVCache
from .forward import CachedModel
from .prompts import read_count

T = TypeVar("T")


class Slot(NamedTuple):
    """What one token of one sequence stores in a layer, as keys or as values."""

    heads: int
    size: int  # of a head
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        return self.heads * self.size * self.dtype.itemsize


LayerSlot = tuple[Slot, Slot] | None  # keys and values; None: the layer stores nothing, as where it reads another's

# By the dtype of autocast, which changes what dtypes keys and values have; None: it is off.
_measured: WeakKeyDictionary[CachedModel, dict[torch.dtype | None, tuple[LayerSlot, ...]]] = WeakKeyDictionary()


def layer_slots(model: CachedModel) -> tuple[LayerSlot, ...]:
    """What a token stores, layer by layer. Measured, by feeding one token into two slots, once a model: head counts,
    head sizes and dtypes may differ by layer and between keys and values, and neither a configuration nor quantised
    weights say all of them."""
    kind = model.device.type
    autocast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
    known = _measured.setdefault(model, {})
    if autocast not in known:
        cache = StaticKVCache(model.config, 1, 2, model.device, append_new=model.needs_2d_mask)
        with torch.inference_mode():
            model.prefill(cache, [[0]])
        stored = [(x.keys, x.values) if x.is_initialized else None for x in cache.layers]
        known[autocast] = tuple(
            None if pair is None else tuple(Slot(t.shape[1], t.shape[3], t.dtype) for t in pair) for pair in stored
        )
    return known[autocast]


def slot_bytes(model: CachedModel) -> int:
    """Bytes of keys and values that one token of one sequence takes, over all layers."""
    return sum(slot.bytes for pair in layer_slots(model) if pair is not None for slot in pair)


def free_memory(device: torch.device, root: Path = Path("/")) -> int | None:
    """Bytes that can be allocated on ``device`` now; None where it cannot be told (CPUs of other systems than Linux,
    other accelerators than torch.cuda's).

    On a GPU, what torch's allocator holds and does not use counts as free. On a CPU it is what the system can give
    without swapping, page cache included (MemAvailable), or what is left in the process's control groups, versions 1
    and 2.

    Args:
        root: of the file system that is asked.
    """
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    if device.type != "cpu":
        return None
    return min((*_available(root), *_left_in_groups(root)), default=None)


def _available(root: Path) -> Iterator[int]:
    kib = _numbers(root / "proc/meminfo").get("MemAvailable:")
    if kib is not None:
        yield kib * 1024


def _left_in_groups(root: Path) -> Iterator[int]:
    """Of the process's group and of all around it: a limit holds for all inside."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            base, limit, used, reclaimable = "sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"
        elif "memory" in controllers.split(","):
            base, limit, used = "sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
            reclaimable = "total_inactive_file"
        else:
            continue
        names = [name for name in path.split("/") if name]
        for depth in range(len(names), -1, -1):  # a container may not see its own group by this path, but as the root
            folder = root.joinpath(base, *names[:depth])
            try:
                most, now = int((folder / limit).read_text()), int((folder / used).read_text())
            except (OSError, ValueError):  # no such group, or "max"
                continue
            yield max(most - now + _numbers(folder / "memory.stat").get(reclaimable, 0), 0)


def _numbers(path: Path) -> dict[str, int]:
    """Of a file with a name and a number in every line; {} where there is none."""
    try:
        rows = [line.split() for line in path.read_text().splitlines()]
    except OSError:
        return {}
    return {row[0]: int(row[1]) for row in rows if len(row) > 1 and row[1].isdecimal()}


def size_text(size: int) -> str:
    """``size`` bytes, for people."""
    for exponent, unit in ((3, "GiB"), (2, "MiB"), (1, "KiB")):
        if size >= 1024**exponent:
            return f"{size / 1024**exponent:.2f} {unit}"
    return f"{size} bytes"


# What RuntimeErrors say that are not torch.OutOfMemoryError: the CPU's allocator; CUDA, cuBLAS and cuDNN, which
# allocate beside torch's.
_EXHAUSTED = (
    "DefaultCPUAllocator: can't allocate memory",
    "DefaultCPUAllocator: not enough memory",
    "CUDA error: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out, on a GPU or on a CPU; nothing else is wrong then, and less may do."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _EXHAUSTED)


class PrefillChunk:
    """How many tokens of a prompt a forward is fed. Halved where memory runs out, and never raised again: what ran out
    once would do so again, and every time costs a forward.

    Args:
        size: tokens, >= 1, to begin with.
    """

    def __init__(self, size: int):
        self.size = read_count("prefill_chunk", size, 1)

    def run(self, feed: Callable[[int], T]) -> T:
        """``feed(size)``, with a smaller ``size`` as often as memory runs out. It may be interrupted anywhere: it is to
        write where it has written before when it is called again.

        Warns (RuntimeWarning), once a call, from what to what ``size`` fell.

        Raises:
            Exception: of ``feed``; of memory running out where ``size`` is 1.
        """
        before = self.size
        try:
            while (result := self._try(feed)) is None:
                self.size //= 2
            return result[0]
        finally:
            if self.size < before:
                told = f"out of memory in prefill: chunks of {self.size} tokens in the place of {before} from now on"
                warnings.warn(told, RuntimeWarning, stacklevel=2)

    def _try(self, feed: Callable[[int], T]) -> tuple[T] | None:
        """None: memory ran out. Returned and not caught further out, so that no traceback keeps the forward's tensors
        while the next one runs."""
        try:
            return (feed(self.size),)
        except Exception as error:
            if self.size == 1 or not is_out_of_memory(error):
                raise
            return None

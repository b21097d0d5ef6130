"""What keys and values cost, what memory is free for them, and what to do where it runs out after all."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar
from weakref import WeakKeyDictionary

import torch

from ..checks import read_count, refuse
from .kv_cache import LayerSlot, Slot, StaticKVCache

if TYPE_CHECKING:
    from .cached_model import CachedModel

T = TypeVar("T")

# By the dtype of autocast, which changes what dtypes keys and values have; None: it is off.
_measured: WeakKeyDictionary[CachedModel, dict[torch.dtype | None, tuple[LayerSlot, ...]]] = WeakKeyDictionary()


def layer_slots(model: CachedModel) -> tuple[LayerSlot, ...]:
    """What comes to be stored of a token, layer by layer. Measured, by feeding one token into two slots, once a model:
    head counts, head sizes and dtypes may differ by layer and between keys and values, and neither a configuration nor
    quantised weights say all of them."""
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


def stored_slots(model: CachedModel) -> tuple[LayerSlot, ...]:
    """As ``layer_slots``, in the dtypes in which they are stored.

    Raises:
        ValueError: keys or values come narrower than the model computes, and ``cache_dtype`` does not say so; or
            ``cache_dtype`` is wider than they come.
    """
    stored = []
    for pair in layer_slots(model):
        if pair is not None:
            keys, values = pair
            keys = keys._replace(dtype=_stored_dtype(model, "keys", keys.dtype))
            pair = keys, values._replace(dtype=_stored_dtype(model, "values", values.dtype))
        stored.append(pair)
    return tuple(stored)


def _stored_dtype(model: CachedModel, what: str, comes: torch.dtype) -> torch.dtype:
    asked = model.cache_dtype
    if asked is None and comes.itemsize < model.dtype.itemsize:
        given = f"{what} that come as {comes} from a model that computes in {model.dtype} (autocast?)"
        refuse(model.name, given, f"cache_dtype={comes} to accept it")
    if asked not in (None, comes) and asked.itemsize >= comes.itemsize:
        refuse("cache_dtype", asked, f"None, or narrower than {comes}, as which the {model.name}'s {what} come")
    return asked or comes


def check_cache_dtype(dtype: torch.dtype | None, model: CachedModel) -> None:
    """Refuses what cannot be narrower than what ``model`` computes. How its keys come is seen when it runs."""
    if dtype is None:
        return
    known = isinstance(dtype, torch.dtype) and dtype.is_floating_point and 2 <= dtype.itemsize <= model.dtype.itemsize
    if not known or (dtype != model.dtype and dtype.itemsize == model.dtype.itemsize):
        refuse("cache_dtype", dtype, f"None, or a floating dtype of 16 bits or more, narrower than {model.dtype}")


def slot_bytes(model: CachedModel) -> int:
    """Bytes of keys and values that one token of one sequence takes, over all layers.

    Raises:
        ValueError: as ``stored_slots``.
    """
    return sum(slot.bytes for pair in stored_slots(model) if pair is not None for slot in pair)


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
    """How many tokens a forward of a prefill is fed. Halved where memory runs out, and never raised again: what ran out
    once would do so again, and every time costs a forward.

    Args:
        size: tokens, >= 1, to begin with.
    """

    def __init__(self, size: int):
        self.size = read_count("prefill_chunk", size, 1)

    def run(self, feed: Callable[[int], T], columns: int, rows: int = 1) -> T:
        """``feed(columns)``, or fewer: as many as ``size`` allows, and half of them as often as memory runs out. It may
        be interrupted anywhere: it is to write where it has written before when it is called again.

        Warns (RuntimeWarning), once a call, from what to what ``size`` fell.

        Args:
            columns: that there are, >= 1.
            rows: tokens of a column, which cannot be cut.

        Raises:
            Exception: of ``feed``; of memory running out for a single column.
        """
        columns = before = max(min(self.size // rows, columns), 1)
        try:
            while (result := _tried(feed, columns)) is None:
                columns //= 2
                self.size = columns * rows
            return result[0]
        finally:
            if columns < before:
                told = f"{columns * rows} tokens a forward in the place of {before * rows} from now on"
                warnings.warn(f"out of memory in prefill: {told}", RuntimeWarning, stacklevel=2)


def _tried(feed: Callable[[int], T], columns: int) -> tuple[T] | None:
    """None: memory ran out. Returned and not caught further out, so that no traceback keeps the forward's tensors while
    the next one runs."""
    try:
        return (feed(columns),)
    except Exception as error:
        if columns == 1 or not is_out_of_memory(error):
            raise
        return None

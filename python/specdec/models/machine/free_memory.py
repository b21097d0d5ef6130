"""Looks up how much memory is free, within the limits of control groups, and whether an error says that it ran out."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch


class Group(NamedTuple):
    """A control group of this process (versions 1 and 2), of those that limit its memory and its CPUs on Linux."""

    folder: Path  # where its limits are; in a container it may not exist
    version: int


def groups(controller: str, root: Path) -> Iterator[Group]:
    """Yields the group of this process that has ``controller``, and each group that contains it.

    Args:
        controller: "memory" or "cpu".
        root: the root of the file system in which /proc and /sys are read.
    """
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            base, version = "sys/fs/cgroup", 2
        elif controller in controllers.split(","):
            base, version = f"sys/fs/cgroup/{controller}", 1
        else:
            continue
        names = [name for name in path.split("/") if name]
        for depth in range(len(names), -1, -1):  # in a container, this path may not exist and the group be the root
            yield Group(root.joinpath(base, *names[:depth]), version)


# Texts of RuntimeErrors for exhausted memory that are not torch.OutOfMemoryError: from the CPU's allocator, and from
# CUDA, cuBLAS and cuDNN, which allocate without torch's allocator.
_EXHAUSTED = (
    "DefaultCPUAllocator: can't allocate memory",
    "DefaultCPUAllocator: not enough memory",
    "CUDA error: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
)


def free_memory(device: torch.device, root: Path = Path("/")) -> int | None:
    """Returns the bytes that can be allocated on ``device`` now; None if unknown (CPUs of systems other than Linux,
    accelerators other than torch.cuda's).

    On a GPU, memory that torch's allocator holds and does not use counts as free. On a CPU it is the smaller of what
    the system has without swapping, page cache included (MemAvailable), and what the limits of the process's control
    groups (versions 1 and 2) leave.

    Args:
        root: the root of the file system in which /proc and /sys are read.
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
    """Yields the bytes left in the process's control group and in each group that contains it."""
    for folder, version in groups("memory", root):
        limit, used, reclaimable = _FILES[version]
        try:
            most, now = int((folder / limit).read_text()), int((folder / used).read_text())
        except (OSError, ValueError):  # no such group, or the limit is "max", which means none
            continue
        yield max(most - now + _numbers(folder / "memory.stat").get(reclaimable, 0), 0)


# Limit, use, and what of the use would be given back, by the version of control groups.
_FILES = {
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    2: ("memory.max", "memory.current", "inactive_file"),
}


def _numbers(path: Path) -> dict[str, int]:
    """Reads a file with a name and a number in each line; {} if there is no such file."""
    try:
        rows = [line.split() for line in path.read_text().splitlines()]
    except OSError:
        return {}
    return {row[0]: int(row[1]) for row in rows if len(row) > 1 and row[1].isdecimal()}


def size_text(size: int) -> str:
    """Returns ``size`` bytes in a readable unit."""
    for exponent, unit in ((3, "GiB"), (2, "MiB"), (1, "KiB")):
        if size >= 1024**exponent:
            return f"{size / 1024**exponent:.2f} {unit}"
    return f"{size} bytes"


def is_out_of_memory(error: BaseException) -> bool:
    """Returns whether ``error`` means that memory ran out, on a GPU or on a CPU."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _EXHAUSTED)

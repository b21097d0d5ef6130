"""The control groups (versions 1 and 2) of this process, which limit its memory and its CPUs on Linux."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple


class Group(NamedTuple):
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

"""What of this machine the process may use, and what would make it slow here."""

from __future__ import annotations

import math
import os
import platform
from pathlib import Path

import torch

from ..models.exchanged.huge_pages import SETTING, has_huge_pages
from ..models.machine.cpu_units import cpu_units
from ..models.machine.free_memory import free_memory, groups


def cpu_name(root: Path = Path("/")) -> str:
    """From /proc/cpuinfo where there is one: on Linux platform.processor() is mostly empty."""
    try:
        lines = (root / "proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def machine(root: Path = Path("/")) -> dict[str, object]:
    """Returns, for JSON:

    - ``cpu``: its name, and ``units``: those that matter for models (``specdec.models.machine.cpu_units``).
    - ``cpus``: {"machine": how many there are, "affinity": on how many the process may run (taskset, cpusets), "quota":
      how many its control groups let it use in total, or None for no limit, "usable": the smallest of these, rounded
      up}.
    - ``threads``: with how many threads torch computes.
    - ``load``: how many threads of all processes ran or waited for a CPU, on average over the last minute; None if
      unknown.
    - ``memory``: bytes: {"total": of the machine, "limit": of the control groups, or None, "free": what can be
      allocated now within both, as ``specdec.models.machine.free_memory`` finds it, or None if unknown}.

    Args:
        root: the root of the file system in which /proc and /sys are read.
    """
    count = os.cpu_count() or 1
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else count
    quota = min(_quotas(root), default=None)
    limit = min(_memory_limits(root), default=None)
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else None
    return {
        "cpu": cpu_name(root),
        "units": cpu_units(root),
        "cpus": {
            "machine": count,
            "affinity": affinity,
            "quota": quota,
            "usable": min(affinity, count if quota is None else math.ceil(quota)),
        },
        "threads": torch.get_num_threads(),
        "load": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
        "memory": {
            "total": total,
            # The root of version 1 has a limit that no machine can reach.
            "limit": None if limit is None or total is not None and limit >= total else limit,
            "free": free_memory(torch.device("cpu"), root),
        },
    }


def thread_hints(usable: int, threads: int, load: float | None) -> list[str]:
    """Says where torch has more threads than CPUs, or where other programs leave it fewer than it has threads: every
    operation then waits for the thread that waits for a CPU.

    Args:
        usable: CPUs that the process may use.
        threads: with how many torch computes.
        load: as in ``machine``.
    """
    if threads > usable:
        return [f"torch computes with {threads} threads on {usable} CPUs, which is slow: set OMP_NUM_THREADS={usable}"]
    if threads > 1 and load is not None and load >= usable:
        return [
            f"the machine is busy (load {load:.1f} on {usable} CPUs), and every operation waits for the slowest of "
            f"{threads} threads: try OMP_NUM_THREADS=1 (on two shared CPUs, 0.64 s where two threads took 7.1 s)"
        ]
    return []


def page_hints(setting: Path = SETTING) -> list[str]:
    """Says where Linux gives no huge pages to the weights of models."""
    if not setting.exists() or has_huge_pages(setting):
        return []
    return [f"no huge pages, without which reading weights may take twice as long: echo madvise > {setting}"]


def _quotas(root: Path) -> list[float]:
    """CPUs that each control group may use in total."""
    found = []
    for folder, version in groups("cpu", root):
        try:
            if version == 2:
                quota, period = map(int, (folder / "cpu.max").read_text().split())
            else:
                quota, period = (int((folder / f"cpu.cfs_{name}_us").read_text()) for name in ("quota", "period"))
        except (OSError, ValueError):  # no such group, or the quota is "max", which means none
            continue
        if quota > 0 and period > 0:  # -1 in version 1 means none
            found.append(quota / period)
    return found


def _memory_limits(root: Path) -> list[int]:
    found = []
    for folder, version in groups("memory", root):
        try:
            found.append(int((folder / ("memory.max" if version == 2 else "memory.limit_in_bytes")).read_text()))
        except (OSError, ValueError):
            continue
    return found

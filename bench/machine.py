"""The machine: its hardware, what is installed on it, and how fast it can read memory."""

from __future__ import annotations

import os
import platform
import statistics
import subprocess
from importlib import metadata
from pathlib import Path

import torch
from measure import Method, interleave

PACKAGES = ("torch", "triton", "transformers", "flashinfer-python", "specdec")


def usable_cores() -> list[int]:
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))


def cache_bytes(device: torch.device) -> int:
    """The size of the last-level caches together, which inputs must exceed so that a call does not find them there."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).L2_cache_size
    units = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
    sizes: dict[tuple[int, str], int] = {}  # (level, the cores that share it): several chiplets, several caches
    for index in (i for c in usable_cores() for i in Path(f"/sys/devices/system/cpu/cpu{c}/cache").glob("index*")):
        try:
            level, cores, size = ((index / name).read_text().strip() for name in ("level", "shared_cpu_list", "size"))
            sizes[int(level), cores] = int(size[:-1]) * units[size[-1]]
        except (OSError, ValueError, KeyError, IndexError):
            continue  # virtual machines leave some of it out
    last = max((level for level, _ in sizes), default=0)
    return sum(size for (level, _), size in sizes.items() if level == last) or 32 << 20


def bandwidth(device: torch.device, quick: bool) -> dict[str, float]:
    """Bytes a second on a buffer far larger than the caches (``quick``: smaller, for smoke runs).

    ``read``: a reduction, the faster of sum and max. ``copy``: bytes read plus bytes written. On CUDA also
    ``launch_seconds`` of one small kernel in a graph.
    """
    on_gpu = device.type == "cuda"
    megabytes = 64 if quick else max(2048 if on_gpu else 512, 8 * cache_bytes(device) >> 20)
    buffer = torch.rand(megabytes << 18, device=device)  # float32; random, as real data is
    other, size = torch.empty_like(buffer), buffer.numel() * 4
    calls = {"sum": lambda i: buffer.sum(), "max": lambda i: buffer.amax(), "copy": lambda i: other.copy_(buffer)}
    # Passes on a GPU come back to back, so that launching is not measured.
    methods = [Method(name, call, calls_a_sample=4 if on_gpu else 1) for name, call in calls.items()]
    for m in methods:
        m.sample()
    rounds = interleave(methods, device, 0.1 if quick else 2.0, least=7, most=20)
    seconds = {name: statistics.median(values) for name, values in rounds.items()}
    result = {"buffer_bytes": size, "read": size / min(seconds["sum"], seconds["max"])}
    result["copy"] = 2 * size / seconds["copy"]
    if on_gpu:
        number = torch.zeros(1, device=device)
        small = Method("launch", lambda i: number.add_(1), calls=1000, calls_a_sample=1000)
        small.sample()
        launches = interleave([small.captured("graph")], device, 0.5)
        result["launch_seconds"] = statistics.median(launches["launch [graph]"])
    return result


def floor_seconds(num_bytes: float, ceilings: dict[str, float]) -> float:
    """The least time in which this machine reads so many bytes; on CUDA at least one launch."""
    fastest = max(ceilings["read"], ceilings["copy"])  # neither may beat the floor that it sets
    return max(num_bytes / fastest, ceilings.get("launch_seconds", 0.0))


def hardware(device: torch.device) -> dict[str, object]:
    described: dict[str, object] = {
        "machine": platform.machine(),
        "system": platform.platform(),
        "cpu": output_of("sed", "-n", "s/^model name.*: //p", "/proc/cpuinfo") or platform.processor(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "cores": len(usable_cores()),
        "cpu_cache_bytes": cache_bytes(torch.device("cpu")),
    }
    if device.type == "cuda":
        p = torch.cuda.get_device_properties(device)
        described |= {
            "gpu": p.name,
            "gpu_memory_bytes": p.total_memory,
            "gpu_l2_bytes": p.L2_cache_size,
            "gpu_capability": [p.major, p.minor],
            "gpu_driver": output_of("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        }
    return described


def versions() -> dict[str, str | None]:
    """Of Python, the packages, CUDA and this repository; None for what is absent."""
    found: dict[str, str | None] = {"python": platform.python_version(), "cuda": torch.version.cuda}
    installed = {d.name.lower(): d.version for d in metadata.distributions()}
    found |= {package: installed.get(package) for package in PACKAGES}
    repository = str(Path(__file__).parent)
    return found | {"commit": output_of("git", "-C", repository, "describe", "--always", "--dirty")}


def output_of(*command: str) -> str | None:
    """The first line that a program prints, or None where it is absent, fails, hangs or says nothing."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip().split("\n")[0] or None if done.returncode == 0 else None

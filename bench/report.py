"""What all programs share: options of their command lines, the machine, the JSON file of results, and tables."""

from __future__ import annotations

import datetime
import json
import os
import platform
import re
import shlex
import statistics
import sys
from collections.abc import Iterable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Annotated, NoReturn

import torch
import typer
from measure import Method, interleave
from rich.console import Console
from rich.table import Table
from torch.utils import collect_env

from specdec_kernels import build_info

DeviceName = Annotated[str, typer.Option("--device", help="cpu or cuda")]
Threads = Annotated[int | None, typer.Option(min=1, help="default: torch's")]
Quick = Annotated[
    bool, typer.Option(help="a smoke run: few small inputs, whatever sizes are asked for; no compiling of peers")
]
JsonPath = Annotated[Path | None, typer.Option("--json", help="where the results go")]


def refuse(name: str, given: object, allowed: str) -> NoReturn:
    """Ends the command with exit code 2 and an error that names the option."""
    raise typer.BadParameter(f"{name}: got {given}, allowed: {allowed}")


def read_device(name: str) -> torch.device:
    (name,) = read_names("device", name, ("cpu", "cuda"))
    if name == "cuda" and not torch.cuda.is_available():
        refuse("device", "'cuda', but torch finds no GPU here", "'cpu'")
    return torch.device(name)


def read_integers(name: str, text: str) -> list[int]:
    """Integers >= 1 separated by commas."""
    try:
        values = [int(part) for part in text.split(",")]
    except ValueError:
        values = []
    if not values or min(values) < 1:
        refuse(name, repr(text), "integers >= 1 separated by commas, such as 1,8")
    return values


def read_names(name: str, text: str, allowed: Iterable[str]) -> list[str]:
    """Names out of ``allowed``, separated by commas."""
    names, allowed = text.split(","), list(allowed)
    if unknown := [n for n in names if n not in allowed]:
        refuse(name, repr(unknown[0]), ", ".join(allowed))
    return names


# ---- The machine

PACKAGES = ("torch", "triton", "transformers", "flashinfer-python", "rich", "specdec-kernels")
ROOT = Path(__file__).resolve().parents[1]
# What a result depends on: all of the repository but results themselves, and prose.
CODE = (".", ":(exclude)bench/results", ":(exclude)*.md")


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
        "cpu": output_of("sed -n 's/^model name.*: //p;T;q' /proc/cpuinfo") or platform.processor(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "cores": len(usable_cores()),
        "cache_bytes": cache_bytes(device),
    }
    if device.type == "cuda":
        p = torch.cuda.get_device_properties(device)
        described |= {"gpu": p.name, "gpu_memory_bytes": p.total_memory, "gpu_capability": [p.major, p.minor]}
        described["gpu_driver"] = output_of("nvidia-smi --query-gpu=driver_version --format=csv,noheader")
    return described


def card() -> str:
    """The GPU's model in small letters, such as "h100": the folder of its results."""
    name = torch.cuda.get_device_name()
    model = re.search(r"\b[A-Z]{1,3}\d+\b", name)
    return model[0].lower() if model else re.sub(r"\W+", "-", name).lower()


def versions() -> dict[str, str | None]:
    """Of Python, the packages and CUDA; None for what is absent."""
    found: dict[str, str | None] = {"python": platform.python_version(), "cuda": torch.version.cuda}
    installed = {d.name.lower(): d.version for d in metadata.distributions()}
    return found | {package: installed.get(package) for package in PACKAGES}


def output_of(command: str) -> str | None:
    """What a program prints, or None where it is absent, fails or says nothing."""
    return collect_env.run_and_read_all(collect_env.run, command) or None


def git(*arguments: str) -> str | None:
    """What git says of this repository, stripped; None where it is absent or fails."""
    command = shlex.join(["git", "-C", str(ROOT), *arguments])
    code, output, _ = collect_env.run(command)
    return None if code else output.strip()


def stamp(device: torch.device, command: Sequence[str]) -> dict[str, object]:
    """What made a result, and where: ``commit`` (``dirty``: the code was not what was committed; both are None outside
    of a repository), ``instruction_set`` of the kernels in C++, and so on."""
    changed = git("status", "--porcelain", "--", *CODE)
    return {
        "command": shlex.join(["python", *command]),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": git("rev-parse", "HEAD"),
        "dirty": None if changed is None else bool(changed),
        "device": device.type,
        "threads": torch.get_num_threads(),
        "instruction_set": build_info()["native"].get("instruction_set"),
        "hardware": hardware(device),
        "versions": versions(),
    }


# ---- Results


def write(path: Path, content: Mapping[str, object]) -> None:
    """Writes a JSON file. Whoever reads it meanwhile reads the old one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    partial.write_text(json.dumps(content, indent=1) + "\n")
    partial.replace(path)


class Report:
    """The JSON file. It is written anew after every row, so that a run cut short leaves what it has.

    Args:
        threads: how many torch shall use from now on; None: as many as before.
        more: further keys of the file.
    """

    def __init__(self, benchmark: str, device: torch.device, path: Path | None, threads: int | None, **more: object):
        if threads is not None:
            torch.set_num_threads(threads)
        self.path, self.device = path, device
        self.rows: list[dict] = []
        about = {"benchmark": benchmark, "complete": False, **stamp(device, sys.argv), **more}
        self.content: dict[str, object] = {**about, "rows": self.rows}
        self._write()
        self.console = Console(stderr=True)
        if not self.console.is_terminal:  # a file has no width
            self.console = Console(stderr=True, width=220)

    def add(self, row: dict[str, object]) -> None:
        self.rows.append(row)
        self._write()

    def finish(self) -> None:
        self.content["complete"] = True
        self._write()

    def _write(self) -> None:
        if self.path is not None:
            write(self.path, self.content)

    def show(self, title: str, rows: Sequence[Mapping], columns: Sequence[str]) -> None:
        """A table with a line for each row. Of a summary it shows the median and the quartiles."""
        table = Table(*(column.replace("_", " ") for column in columns), title=title)
        for row in rows:
            table.add_row(*(_cell(row.get(column)) for column in columns))
        self.console.print(table)

    def say(self, remarks: Mapping[str, object]) -> None:
        for name, value in remarks.items():
            self.console.print(f"{name}: {_cell(value)}")


def _cell(value: object) -> str:
    if isinstance(value, Mapping) and "median" in value:
        return f"{value['median']:.4g} ({value['q1']:.4g} to {value['q3']:.4g})"
    return "-" if value is None else f"{value:.3g}" if isinstance(value, float) else str(value)

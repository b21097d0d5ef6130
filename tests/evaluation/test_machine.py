"""What a process may use of its machine: read from a file system that is made up, and hints that follow from it."""

from __future__ import annotations

from pathlib import Path

import pytest
from specdec.evaluation.machine import machine, page_hints, thread_hints

GIB = 2**30


def system(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


@pytest.fixture(autouse=True)
def eight_cpus(monkeypatch):
    monkeypatch.setattr("os.cpu_count", lambda: 8)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(6)))
    monkeypatch.setattr("os.sysconf", {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": 16 * GIB // 4096}.get)


@pytest.mark.parametrize(
    ("files", "quota", "usable"),
    [
        ({}, None, 6),
        ({"sys/fs/cgroup/cpu.max": "max 100000"}, None, 6),
        ({"sys/fs/cgroup/in/cpu.max": "250000 100000", "sys/fs/cgroup/cpu.max": "400000 100000"}, 2.5, 3),
        ({"sys/fs/cgroup/in/cpu.max": "max 100000", "sys/fs/cgroup/cpu.max": "1600000 100000"}, 16, 6),
        ({"sys/fs/cgroup/cpu/cpu.cfs_quota_us": "50000", "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000"}, 0.5, 1),
        ({"sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1", "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000"}, None, 6),
    ],
)
def test_cpus(tmp_path, files, quota, usable):
    root = system(tmp_path, {"proc/self/cgroup": "3:cpuset:/\n2:cpu,cpuacct:/in\n0::/in\n", **files})
    assert machine(root)["cpus"] == {"machine": 8, "affinity": 6, "quota": quota, "usable": usable}


@pytest.mark.parametrize(
    ("limit", "expected"), [("max", None), (str(4 * GIB), 4 * GIB), ("9223372036854771712", None), (None, None)]
)
def test_memory(tmp_path, limit, expected):
    files = {"proc/self/cgroup": "0::/in\n", "proc/meminfo": "MemAvailable: 1048576 kB\n"}
    files |= {} if limit is None else {"sys/fs/cgroup/in/memory.max": limit, "sys/fs/cgroup/in/memory.current": "1"}
    memory = machine(system(tmp_path, files))["memory"]
    assert memory == {"total": 16 * GIB, "limit": expected, "free": GIB}


def test_its_name(tmp_path):
    root = system(tmp_path, {"proc/cpuinfo": "processor : 0\nmodel name : Some CPU: 3000\n"})
    assert machine(root)["cpu"] == "Some CPU: 3000" and machine(tmp_path / "none")["cpu"]


def test_hints():
    assert thread_hints(2, 2, 0.4) == thread_hints(2, 1, 9.0) == thread_hints(2, 2, None) == []
    (many,) = thread_hints(2, 8, 0.0)
    assert many.startswith("torch computes with 8 threads on 2 CPUs") and many.endswith("OMP_NUM_THREADS=2")
    (busy,) = thread_hints(2, 2, 3.25)
    assert "load 3.2 on 2 CPUs" in busy and "OMP_NUM_THREADS=1" in busy


def test_a_system_without_huge_pages_is_told(tmp_path):
    setting = tmp_path / "enabled"
    assert page_hints(setting) == []  # no Linux
    setting.write_text("always [madvise] never\n")
    assert page_hints(setting) == []
    setting.write_text("always madvise [never]\n")
    (hint,) = page_hints(setting)
    assert hint.startswith("no huge pages") and hint.endswith(f"echo madvise > {setting}")

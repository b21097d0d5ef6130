"""A plugin of pytest for one part: ``--shard`` takes a share of the tests, ``--summary`` names a file for what came
out and on what it ran."""

from __future__ import annotations

import json
import os
import platform
from collections import Counter
from importlib import metadata
from pathlib import Path

import pytest
import torch


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--shard", help="2/5: of the tests in their order, the second fifth")
    parser.addoption("--summary", help="a file, written at the end")


def share(count: int, shard: str) -> slice:
    """Those of ``count`` things that are in a shard such as "2/5"."""
    number, of = map(int, shard.split("/"))
    return slice(count * (number - 1) // of, count * number // of)


@pytest.hookimpl(trylast=True)  # after those that other markers have are gone
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if shard := config.getoption("shard"):
        kept = items[share(len(items), shard)]
        config.hook.pytest_deselected(items=[item for item in items if item not in kept])
        items[:] = kept


def pytest_configure(config: pytest.Config) -> None:
    if path := config.getoption("summary"):
        config.pluginmanager.register(Summary(Path(path)))


class Summary:
    """Counts tests, and adds up the numbers that they ``record_property``."""

    def __init__(self, path: Path):
        self._path, self._outcomes, self._notes, self._failures = path, Counter(), Counter(), []

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._failures.append(report.nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._failures.append(report.nodeid)
        elif report.when == "call" or report.skipped:
            self._outcomes[report.outcome] += 1
        if report.when == "call":
            self._notes.update(dict(report.user_properties))

    def pytest_sessionfinish(self) -> None:
        summary = {
            "passed": self._outcomes["passed"],
            "failed": len(dict.fromkeys(self._failures)),
            "skipped": self._outcomes["skipped"],
            "failures": list(dict.fromkeys(self._failures)),
            "counted": dict(self._notes),
            "machine": machine(),
        }
        self._path.write_text(json.dumps(summary))


def machine() -> dict[str, object]:
    from specdec_kernels import build_info

    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    built, versions = build_info(), ("torch", "triton", "transformers", "numpy")
    return {
        "cpu": names[0] if names else platform.processor(),
        "cores": len(os.sched_getaffinity(0)),
        "threads": torch.get_num_threads(),
        "instruction_set": built["native"].get("instruction_set"),
        "cuda_device": built["cuda_device"],
        "python": platform.python_version(),
        **{name: metadata.version(name) for name in versions},
    }

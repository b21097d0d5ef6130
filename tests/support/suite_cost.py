"""What an everyday run costs: the processor time of its tests, in units of a fixed piece of work that is timed
between them. So neither a slower machine nor a busy one changes the number much; more work does."""

from __future__ import annotations

import os
import resource
import statistics
import time
from collections.abc import Iterator

import pytest
import torch

from . import ROOT, rotation

# Units of a run of the whole suite. A run that costs MOST times as much says so, and fails where STRICT is set, which
# CI will do once several runs of it have told how far their numbers spread: make the tests cheaper, or write the number
# that it printed here, with the reason in the commit.
COST = 42_000
MOST = 1.2
STRICT = "SPECDEC_SUITE_COST"  # an environment variable: "fails"
TESTS = 20  # between two timings of the unit


def unit() -> float:
    """Processor seconds of one unit, which is of what most tests are made: Python's objects, and small products."""
    began = time.process_time()
    counts: dict[int, int] = {}
    for i in range(20_000):
        counts[i % 977] = counts.get(i % 977, 0) + len(str(i))
    square = torch.linspace(-1, 1, 64 * 64).view(64, 64)
    for _ in range(100):
        square = torch.softmax(square @ square, -1)
    return time.process_time() - began


def used() -> float:
    """Processor seconds of this process so far, and of the processes that it has waited for."""
    of = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in of)


def has_everyday(config: pytest.Config) -> bool:
    """Whether what runs every day runs whole, alone or with the cases of another day."""
    option = config.option
    chosen = option.keyword or option.all_cases or "not nightly" not in option.markexpr
    return not chosen and [os.path.abspath(argument) for argument in config.args] == [str(ROOT / "tests")]


class SuiteCost:
    """A plugin of pytest. Each process of pytest-xdist counts its own tests."""

    def __init__(self, config: pytest.Config):
        self._config, self._units, self._seconds, self._tests = config, [], 0.0, 0
        self.total = 0.0  # units, of the processes that have told theirs

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        if self._tests % TESTS == 0:
            self._units.append(unit())
        self._tests += 1
        began = used()
        result = yield
        # What runs because of a change would not run tomorrow.
        if rotation.REACHED not in item.stash and item.get_closest_marker("another_day") is None:
            self._seconds += used() - began
        return result

    def _own(self) -> float:
        return self._seconds / statistics.median(self._units) if self._units else 0.0

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node) -> None:
        self.total += getattr(node, "workeroutput", {}).get("suite_cost", 0.0)

    @pytest.hookimpl(tryfirst=True)  # before xdist sends what a worker found
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if hasattr(self._config, "workeroutput"):
            self._config.workeroutput["suite_cost"] = self._own()
            return
        self.total += self._own()
        if session.exitstatus == pytest.ExitCode.OK and is_dear(self.total) and os.environ.get(STRICT) == "fails":
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        terminalreporter.write_line(told(self.total), red=is_dear(self.total))


def is_dear(total: float) -> bool:
    return total > MOST * COST


def told(total: float) -> str:
    text = f"The tests cost {total:,.0f} units, {COST:,} are written in tests/support/suite_cost.py."
    if is_dear(total):
        text += f" More than {MOST} times these: make tests cheaper, or write the new number there."
    return text

"""The cost of an everyday run is counted in units of work, and says so where it has grown."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from support import ROOT, rotation, suite_cost
from support.suite_cost import SuiteCost, has_everyday, told


@pytest.fixture
def clock(monkeypatch):
    """A unit of half a second, tests of two."""
    seconds = iter(range(0, 1000, 2))
    monkeypatch.setattr(suite_cost, "unit", lambda: 0.5)
    monkeypatch.setattr(suite_cost, "used", lambda: next(seconds))
    monkeypatch.setattr(suite_cost, "COST", 10)


def run(plugin: SuiteCost, why: str = "every day") -> None:
    """A test that runs for this reason."""
    item = SimpleNamespace(
        stash={rotation.REACHED: True} if why == "reached" else {},
        get_closest_marker=lambda name: True if name == why else None,
    )
    test = plugin.pytest_runtest_protocol(item)
    next(test)
    with pytest.raises(StopIteration):
        test.send(None)


@pytest.mark.parametrize(
    ("tests", "strict", "status"), [(3, "fails", 0), (4, "", 0), (4, "fails", 1)], ids=["cheap", "dear", "refused"]
)
def test_a_run_of_two_workers(clock, monkeypatch, tests, strict, status):
    monkeypatch.setenv(suite_cost.STRICT, strict)
    worker = SuiteCost(SimpleNamespace(workeroutput={}))
    for why in (*["every day"] * tests, "reached", "another_day"):  # of which the last two do not count
        run(worker, why)
    worker.pytest_sessionfinish(SimpleNamespace(exitstatus=0))
    node = SimpleNamespace(workeroutput=worker._config.workeroutput)
    controller, session = SuiteCost(SimpleNamespace()), SimpleNamespace(exitstatus=0)
    controller.pytest_testnodedown(node)
    controller.pytest_testnodedown(SimpleNamespace())  # one that crashed
    controller.pytest_sessionfinish(session)
    assert controller.total == 4 * tests and session.exitstatus == status
    assert ("make tests cheaper" in told(controller.total)) == (tests == 4)


def test_a_unit_takes_processor_time():
    began = suite_cost.used()
    assert 0 < suite_cost.unit() < 60
    assert suite_cost.used() > began


def test_only_runs_of_the_whole_suite_are_counted():
    def config(args=("tests",), **option):
        known = {"keyword": "", "all_cases": False, "markexpr": "not nightly and not another_day"}
        return SimpleNamespace(args=[str(ROOT / a) for a in args], option=SimpleNamespace(**known | option))

    assert has_everyday(config()) and has_everyday(config(markexpr="not nightly and not real"))
    assert not has_everyday(config(("tests/loop",))) and not has_everyday(config(all_cases=True))
    assert not has_everyday(config(keyword="cpu")) and not has_everyday(config(markexpr="another_day"))

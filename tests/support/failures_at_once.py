"""A plugin for pytest (``-p tests.support.failures_at_once``) that prints a failure when it happens, since a run
that is cut off never gets to its summary."""

from __future__ import annotations

import pytest


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.failed:
        print(f"\n{report.nodeid}, {report.when}:\n{report.longreprtext}", flush=True)

"""Prints failures and long tests as they end, so that an interrupted run keeps them."""

from __future__ import annotations

from collections import Counter

import pytest

LONG_SECONDS = 10.0


class ResultPrinter:
    """A plugin of pytest's main process, which gets the reports of all workers of pytest-xdist.

    It prints a line for each failed phase of a test, and for each test that took long.
    """

    def __init__(self, reporter: pytest.TerminalReporter) -> None:
        self.reporter = reporter
        self.seconds: Counter[str] = Counter()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        # A test has three reports: of its fixtures, of itself, of the end of its fixtures.
        self.seconds[report.nodeid] += report.duration
        if report.failed:
            self.reporter.write_line(f"\nfailed in {report.when}: {report.nodeid}", red=True)
        if report.when == "teardown":
            seconds = self.seconds.pop(report.nodeid)
            if seconds >= LONG_SECONDS:
                self.reporter.write_line(f"\n{seconds:.0f} s: {report.nodeid}")


def register_result_printer(config: pytest.Config) -> None:
    """Register the plugin, in pytest's main process alone."""
    reporter = config.pluginmanager.getplugin("terminalreporter")
    if reporter is not None and not hasattr(config, "workerinput"):
        config.pluginmanager.register(ResultPrinter(reporter))

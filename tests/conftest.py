"""For all tests: figures of the requirements, the table they make, and which tests share a process."""

from typing import Any

import pytest

from tests.evidence import evidence, table

__all__ = ["evidence"]


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark tests that state figures, so that `make chaos` finds them."""
    for item in items:
        if "evidence" in getattr(item, "fixturenames", ()):
            item.add_marker("evidence")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Tests of one cluster, which are those of a file in tests/chaos, run in one process; all others wherever."""
    from xdist.scheduler import LoadScopeScheduling

    class Scheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            return file if file.startswith("tests/chaos/") else nodeid

    return Scheduling(config, log)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the figures of this run."""
    reports = [r for kind in ("passed", "failed") for r in terminalreporter.stats.get(kind, ()) if hasattr(r, "when")]
    lines = table(reports)
    if lines:
        terminalreporter.section("requirements")
        for line in lines:
            terminalreporter.line(line)

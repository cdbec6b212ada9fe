"""For all tests: figures of the requirements, and the table they make."""

import pytest

from tests.evidence import evidence, table

__all__ = ["evidence"]


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark tests that state figures, so that `make chaos` finds them."""
    for item in items:
        if "evidence" in getattr(item, "fixturenames", ()):
            item.add_marker("evidence")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the figures of this run."""
    reports = [r for kind in ("passed", "failed") for r in terminalreporter.stats.get(kind, ()) if hasattr(r, "when")]
    lines = table(reports)
    if lines:
        terminalreporter.section("requirements")
        for line in lines:
            terminalreporter.line(line)

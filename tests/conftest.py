"""For all tests: figures of the requirements, and the table they make."""

import pytest

from tests.evidence import evidence, table

__all__ = ["evidence"]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the figures of this run."""
    reports = [r for kind in ("passed", "failed") for r in terminalreporter.stats.get(kind, ()) if hasattr(r, "when")]
    lines = table(reports)
    if lines:
        terminalreporter.section("requirements")
        for line in lines:
            terminalreporter.line(line)

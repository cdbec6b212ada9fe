"""For all tests: figures of the requirements, repairs of defects, their tables, and which tests share a process."""

import gc
import os
import signal
import tempfile
from typing import Any

import pytest

from tests import defects
from tests import evidence as figures
from tests.defects import repaired
from tests.evidence import evidence

__all__ = ["evidence", "repaired"]

LONGEST_FIRST = ("e2e", "chaos", "component", "service", "unit")
"""Folders of tests. Short tests at the end keep all processes busy until then."""


def pytest_configure(config: pytest.Config) -> None:
    """Give the run a ledger of KV memory and a list of meshes of its own, and interrupts as in a terminal.

    A shell ignores SIGINT in background jobs, and children inherit that. Tests of Ctrl-C need the default.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    folder = tempfile.TemporaryDirectory(prefix="tandem-test-memory-")
    config.add_cleanup(folder.cleanup)
    os.environ.setdefault("TANDEM_KV_MEMORY_LEDGER", folder.name)
    os.environ["XDG_RUNTIME_DIR"] = folder.name


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark tests that state figures or repairs, so that `make chaos` and `make defects` find them. Sort by folders."""
    items.sort(key=_place)
    for item in items:
        if "evidence" in getattr(item, "fixturenames", ()):
            item.add_marker("evidence")
        if "repaired" in getattr(item, "fixturenames", ()):
            item.add_marker("defect")


def pytest_collectstart() -> None:
    gc.disable()  # imports make no garbage


def pytest_collection_finish() -> None:
    """What is imported now, such as torch and transformers, is no garbage: do not look through it again and again."""
    gc.freeze()
    gc.enable()


def pytest_unconfigure() -> None:
    """Let libraries end as they are used to: Triton's reports what is left."""
    gc.unfreeze()


def _place(item: pytest.Item) -> int:
    parts = item.path.parts
    return next((place for place, folder in enumerate(LONGEST_FIRST) if folder in parts), len(LONGEST_FIRST))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Tests of a file run in one process, because they share clusters, models or servers; those in tests/e2e, each of
    which has a mesh of its own, wherever.
    """
    from xdist.scheduler import LoadScopeScheduling

    class Scheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return nodeid if nodeid.startswith("tests/e2e/") else nodeid.partition("::")[0]

    config.option.loadscopereorder = False
    return Scheduling(config, log)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Print the figures that this run has stated and, in `make defects`, what became of each defect."""
    reports = [r for kind in ("passed", "failed") for r in terminalreporter.stats.get(kind, ()) if hasattr(r, "when")]
    repairs = defects.table(reports) if "defect" in config.option.markexpr else []
    for title, lines in (("requirements", figures.table(reports)), ("defects", repairs)):
        if lines:
            terminalreporter.section(title)
            for line in lines:
                terminalreporter.line(line)

"""For all tests: figures of the requirements, repairs of defects, their tables, and which tests share a process."""

import atexit
import gc
import os
import signal
import sys
import tempfile
from collections.abc import Generator, Iterable
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from tests import defects
from tests import evidence as figures
from tests.defects import repaired
from tests.evidence import evidence

__all__ = ["evidence", "repaired"]

LENGTHENED = {"unit": 1.5}
"""Tests of all folders take turns, so that all cores are busy all the time: those of `component` and `unit` compute,
those of `service` mostly wait, and meshes of `e2e` all have their decode workers on one core. A third of `unit` comes
when all others have begun: short tests, which keep all processes busy until the end.
"""
LONG = ("tests/component/without_gpu/test_triton_attention.py", "tests/e2e/test_troubled_logs.py")
"""Units that take half a minute on one core and would come last: they begin in the middle of the run, because at its
end the other processes would wait for them.
"""
ALONE = ("tests/e2e/", "tests/service/test_switching.py")
"""Tests that share nothing, and so run in any process: each has a mesh or a process of its own."""

# A test must not fail because the machine has other work.
settings.register_profile("tandem", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("tandem")


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


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> Generator[None, None, None]:
    """Mark tests that state figures or repairs, so that `make chaos` and `make defects` find them. Let the folders of
    those that are left to run take turns.
    """
    for item in items:
        if "evidence" in getattr(item, "fixturenames", ()):
            item.add_marker("evidence")
        if "repaired" in getattr(item, "fixturenames", ()):
            item.add_marker("defect")
    yield
    places = _places(_unit(item.nodeid) for item in items)
    items.sort(key=lambda item: places[_unit(item.nodeid)])


def pytest_collectstart() -> None:
    gc.disable()  # imports make no garbage


def pytest_collection_finish() -> None:
    """What is imported now, such as torch and transformers, is no garbage: do not look through it again and again."""
    gc.freeze()
    gc.enable()
    atexit.register(gc.unfreeze)  # let libraries end as they are used to: Triton's reports what is left


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Torch computes on one thread, whatever the last test has left: threads that wait for a test's small products
    take the cores from the other processes.
    """
    if (torch := sys.modules.get("torch")) is not None:
        torch.set_num_threads(1)


def _unit(nodeid: str) -> str:
    """What runs in one process: a file, whose tests share clusters, models or servers, or a test of ALONE."""
    return nodeid if nodeid.startswith(ALONE) else nodeid.partition("::")[0]


def _places(units: Iterable[str]) -> dict[str, float]:
    """The place of each unit: those of each folder are spread over the whole run."""
    by_folder: dict[str, list[str]] = {}
    for unit in dict.fromkeys(units):
        by_folder.setdefault(unit.removeprefix("tests/").partition("/")[0], []).append(unit)
    return {
        unit: LENGTHENED.get(folder, 1.0) * number / len(inside) * (0.5 if unit.startswith(LONG) else 1.0)
        for folder, inside in by_folder.items()
        for number, unit in enumerate(inside)
    }


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    from xdist.scheduler import LoadScopeScheduling

    class Scheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return _unit(nodeid)

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

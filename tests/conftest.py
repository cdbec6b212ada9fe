"""For all tests: figures of the requirements, repairs of defects, their tables, and which tests share a process."""

import gc
import os
import signal
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests import defects
from tests import evidence as figures
from tests.defects import repaired
from tests.evidence import evidence

__all__ = ["evidence", "repaired"]

TESTS = Path(__file__).parent
STAGES = (("e2e",), ("chaos",), ("component", "service"), ("unit",))
"""Folders of tests, in order. Files of folders of one stage take turns: tests of `component` compute and those of
`service` wait, so that together they keep all cores busy. Short tests at the end keep all processes busy until then.
"""
ALONE = (
    "tests/e2e/",
    "tests/component/test_gpu_plan.py",
    "tests/component/test_triton_attention.py",
    "tests/service/test_switching.py",
)
"""Tests that share nothing, and so run in any process: each has a mesh or a process of its own."""


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
    """Mark tests that state figures or repairs, so that `make chaos` and `make defects` find them. Sort by stages."""
    places = _places(list(dict.fromkeys(item.path for item in items)))
    items.sort(key=lambda item: places.get(item.path, (len(STAGES), 0.0)))
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


def _places(paths: Sequence[Path]) -> dict[Path, tuple[int, float]]:
    """The stage of each file, and its place there: files of each folder are spread over the whole stage."""
    places = {}
    for stage, folders in enumerate(STAGES):
        for folder in folders:
            inside = [path for path in paths if path.is_relative_to(TESTS / folder)]
            places |= {path: (stage, number / len(inside)) for number, path in enumerate(inside)}
    return places


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Tests of a file run in one process, because they share clusters, models or servers; those of ALONE wherever."""
    from xdist.scheduler import LoadScopeScheduling

    class Scheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return nodeid if nodeid.startswith(ALONE) else nodeid.partition("::")[0]

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

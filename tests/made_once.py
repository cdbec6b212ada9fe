"""Folders that the processes of one test run make once and share, such as checkpoints."""

import fcntl
import os
from collections.abc import Callable
from pathlib import Path

import pytest

_SHARED = "made-once"


def made_once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], object]) -> Path:
    """The folder `name` of this run. The first process that asks for it makes it; others wait until it is whole. Tests
    only read it.
    """
    base = factory.getbasetemp()
    shared = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / _SHARED
    shared.mkdir(exist_ok=True)
    folder = shared / name
    with open(shared / f"{name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            partly = Path(factory.mktemp("partly")) / name
            make(partly)
            partly.rename(folder)
    return folder


def is_shared(folder: Path) -> bool:
    """True if all processes of this run find the same here."""
    return folder.parent.name == _SHARED

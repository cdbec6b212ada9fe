"""Checkpoints are built once per test run, and programs start as forks."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from tests.component.checkpoints import build_checkpoint
from tests.made_once import made_once
from tests.warm import forks

__all__ = ["checkpoint", "forks"]


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """`checkpoint(family)` is the folder of that family's checkpoint."""
    return lambda family: made_once(tmp_path_factory, family, partial(build_checkpoint, family))

"""Checkpoints are built once per test session."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.component.checkpoints import build_checkpoint


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """`checkpoint(family)` is the folder of that family's checkpoint."""
    built: dict[str, Path] = {}

    def get(family: str) -> Path:
        if family not in built:
            built[family] = build_checkpoint(family, tmp_path_factory.mktemp(family))
        return built[family]

    return get

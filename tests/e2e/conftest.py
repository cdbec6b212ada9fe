"""Checkpoints shared by the end-to-end tests."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.component.checkpoints import build_checkpoint
from tests.e2e.reference import Reference


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Folder of a random checkpoint of a family, built once."""
    built: dict[str, Path] = {}

    def build(family: str) -> Path:
        if family not in built:
            built[family] = build_checkpoint(family, tmp_path_factory.mktemp(family))
        return built[family]

    return build


@pytest.fixture(scope="session")
def reference(checkpoint: Callable[[str], Path]) -> Callable[[str], Reference]:
    """The same checkpoint in transformers."""
    loaded: dict[str, Reference] = {}

    def load(family: str) -> Reference:
        if family not in loaded:
            loaded[family] = Reference.load(checkpoint(family))
        return loaded[family]

    return load

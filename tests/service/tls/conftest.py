"""Routers as in the router's own tests, and a CA."""

import pytest

from tests.fakes.certificates import Authority
from tests.service.router.conftest import make_mesh, model_dir

__all__ = ["make_mesh", "model_dir"]


@pytest.fixture(scope="session")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("certificates") / "the-mesh-ca")


@pytest.fixture(scope="session")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("certificates") / "another-ca")

"""The image, built once."""

import os

import pytest

from tests.compose.engine import compose_command, docker

IMAGE = "tandem-serve"


@pytest.fixture(scope="session")
def image() -> str:
    """The name of the image of this checkout. TANDEM_BASE_IMAGE names its base where that cannot be pulled."""
    compose_command()
    base = os.environ.get("TANDEM_BASE_IMAGE")
    docker("build", "-q", *([f"--build-arg=BASE={base}"] if base else []), "-t", IMAGE, ".")
    return IMAGE

"""The image, built once."""

import os

import pytest

from tests.compose.engine import compose_command, docker

IMAGE = "tandem-serve"


@pytest.fixture(scope="session")
def image() -> str:
    """The name of the image of this checkout. TANDEM_BASE_IMAGE names its base where that cannot be pulled."""
    compose_command()
    sources = {"BASE": "TANDEM_BASE_IMAGE", "TORCH_INDEX": "TANDEM_TORCH_INDEX"}
    named = [f"--build-arg={name}={os.environ[source]}" for name, source in sources.items() if source in os.environ]
    docker("build", "-q", *named, "-t", IMAGE, ".")
    return IMAGE

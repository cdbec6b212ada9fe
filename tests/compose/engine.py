"""The Docker engine of this machine, and its compose command."""

import shutil
import socket
import subprocess
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
READY_S = 300.0


def docker(*arguments: str) -> str:
    """What the command prints. CalledProcessError if it fails; its errors are shown by pytest."""
    return subprocess.run(("docker", *arguments), cwd=ROOT, check=True, text=True, stdout=subprocess.PIPE).stdout


@cache
def compose_command() -> tuple[str, ...]:
    """`docker compose`, or `docker-compose` of older installations. Skips the test without an engine."""
    if shutil.which("docker") is None or subprocess.run(("docker", "info"), capture_output=True).returncode:
        pytest.skip("needs a Docker engine")
    if subprocess.run(("docker", "compose", "version"), capture_output=True).returncode == 0:
        return ("docker", "compose")
    if shutil.which("docker-compose") is None:
        pytest.skip("needs Docker's compose plugin, or docker-compose")
    return ("docker-compose",)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port

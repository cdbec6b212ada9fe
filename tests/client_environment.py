"""Other people's clients, whose requirements are not ours: environments made once, kept in the user's cache."""

import asyncio
import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from tests.processes import running_process


def python_with(requirement: str, module: str, *others: str) -> str:
    """An interpreter that has `module` of the package, and other packages. Where it cannot be installed, a test of a
    person is skipped; that of CI fails, because there nobody would notice.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "tandem-tests"
    folder = cache / f"{requirement}-{sys.version_info.major}.{sys.version_info.minor}"
    python = folder / "bin" / "python"
    if not _has(python, module):
        venv = [sys.executable, "-m", "venv", "--clear", "--without-pip", str(folder)]
        # A pip of its own would take longer to install than most clients: ours installs them.
        pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "-q", "--disable-pip-version-check"]
        try:
            # Ctrl-C ends pip before it removes its own temporary files.
            with TemporaryDirectory(prefix="tandem-test-pip-") as temporary:
                environ = os.environ | {"TMPDIR": temporary}
                for command in (venv, [*pip, requirement, *others]):
                    subprocess.run(command, check=True, capture_output=True, timeout=280, env=environ)
        except (OSError, subprocess.SubprocessError) as error:
            give_up = pytest.fail if os.environ.get("CI") else pytest.skip
            give_up(f"no environment with {requirement}: {error}")
    return str(python)


async def output_of(python: str, program: Path, *arguments: str) -> bytes:
    """What the program prints. -P: its folder may have files with the names of packages."""
    pipe = asyncio.subprocess.PIPE
    async with running_process(python, "-P", str(program), *arguments, stdout=pipe, stderr=pipe) as process:
        out, err = await process.communicate()
    assert process.returncode == 0, err.decode()
    return out


def _has(python: Path, module: str) -> bool:
    if not python.exists():
        return False
    return subprocess.run([python, "-c", f"import {module}"], capture_output=True).returncode == 0

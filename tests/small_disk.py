"""A small disk for one command."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest


def on_small_disk(folder: Path, *, errors: Path | None = None) -> tuple[str, ...]:
    """A command that runs another one with a disk of 8 MB at `folder`, which ends with it. Its errors go to the file
    `errors`, which may lie there. The test is skipped where disks cannot be mounted.
    """
    command = ("unshare", "--mount", *(() if os.geteuid() == 0 else ("--map-root-user",)), "sh", "-c")
    if shutil.which("unshare") is None or subprocess.run((*command, "true"), check=False).returncode:
        pytest.skip("needs a mount namespace")
    to_file = f" 2> {errors}" if errors else ""
    return (*command, f'mount -t tmpfs -o size=8m tandem {folder} && exec "$@"{to_file}', "sh")

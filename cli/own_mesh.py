"""A mesh for the length of a measurement: `tandem up` as a child process."""

import asyncio
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from mesh.domain.errors import ConfigurationError

_SHOWN_LINES = 5


@asynccontextmanager
async def own_mesh(flags: Sequence[str]) -> AsyncIterator[str]:
    """Start a mesh on a free port and give its address; stop it at the end. Raises ConfigurationError with the last of
    what it said if it does not start.
    """
    with tempfile.TemporaryDirectory(prefix="tandem-") as folder:
        said = Path(folder) / "stderr"
        command = (sys.executable, "-m", "cli", "up", "--port=0", f"--log-dir={folder}", *flags)
        with said.open("w") as stderr:
            process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE, stderr=stderr)
        assert process.stdout is not None
        try:
            ready = (await process.stdout.readline()).decode().split()
            if not ready:
                lines = said.read_text(errors="replace").splitlines()[-_SHOWN_LINES:]
                raise ConfigurationError("the mesh did not start: " + "; ".join(lines))
            yield ready[1]
        finally:
            if process.returncode is None:
                process.terminate()
            await process.wait()

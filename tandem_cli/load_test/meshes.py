"""Starts a mesh with `tandem up` for the time of a measurement."""

import asyncio
import signal
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from tandem_cli.load_test.records import RunFailed

_NUM_LOG_LINES = 8


def up_command(flags: Sequence[str], pace: str = "") -> list[str]:
    """The command for `tandem up` on a free port. With a pace, its workers simulate the model (paced.py)."""
    program = ["tandem_cli.load_test.paced_up", pace] if pace else ["tandem_cli", "up"]
    return [sys.executable, "-m", *program, "--port=0", *flags]


@asynccontextmanager
async def own_mesh(flags: Sequence[str], pace: str = "") -> AsyncIterator[str]:
    """Start a mesh, yield its address, and stop it at the end. Raises RunFailed with the end of its stderr."""
    with tempfile.TemporaryDirectory(prefix="tandem-bench-") as folder:
        log = Path(folder) / "stderr"
        command = up_command([f"--log-dir={folder}", *flags], pace)
        with log.open("w") as stderr:
            process = await asyncio.create_subprocess_exec(
                *command, stdout=asyncio.subprocess.PIPE, stderr=stderr, start_new_session=True
            )
        assert process.stdout is not None
        try:
            ready = (await process.stdout.readline()).decode().split()
            if not ready:
                lines = log.read_text(errors="replace").splitlines()[-_NUM_LOG_LINES:]
                raise RunFailed(f"the mesh did not start: {'; '.join(lines) or 'it log nothing'}")
            yield ready[1]
        finally:
            if process.returncode is None:
                process.send_signal(signal.SIGTERM)
            await process.wait()

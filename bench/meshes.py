"""A mesh of one's own for a while: `tandem up`, and its end."""

import asyncio
import signal
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from bench.records import RunFailed

_SHOWN_LINES = 8


def up_command(flags: Sequence[str], pace: str = "") -> list[str]:
    """`tandem up` on a free port; with a pace (see bench.paced) its workers compute nothing."""
    program = ["bench.paced_up", pace] if pace else ["cli", "up"]
    return [sys.executable, "-m", *program, "--port=0", *flags]


@asynccontextmanager
async def own_mesh(flags: Sequence[str], pace: str = "") -> AsyncIterator[str]:
    """Start a mesh and give its address; stop it at the end. Raises RunFailed with the end of what it said."""
    with tempfile.TemporaryDirectory(prefix="tandem-bench-") as folder:
        said = Path(folder) / "stderr"
        command = up_command([f"--log-dir={folder}", *flags], pace)
        with said.open("w") as stderr:
            process = await asyncio.create_subprocess_exec(
                *command, stdout=asyncio.subprocess.PIPE, stderr=stderr, start_new_session=True
            )
        assert process.stdout is not None
        try:
            ready = (await process.stdout.readline()).decode().split()
            if not ready:
                lines = said.read_text(errors="replace").splitlines()[-_SHOWN_LINES:]
                raise RunFailed(f"the mesh did not start: {'; '.join(lines) or 'it said nothing'}")
            yield ready[1]
        finally:
            if process.returncode is None:
                process.send_signal(signal.SIGTERM)
            await process.wait()

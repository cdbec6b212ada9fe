"""A process of a test, its output in a pipe and its log in a file."""

import subprocess
import tempfile
from collections.abc import Mapping, Sequence

from tests.waiting import LIMIT_S

LOAD_S = 4 * LIMIT_S  # processes that import torch, on a busy machine


class LoggedProcess:
    """`stdin` as for subprocess.Popen. Whoever starts it closes it."""

    def __init__(self, command: Sequence[str], *, stdin: int, env: Mapping[str, str] | None = None) -> None:
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed by `close`
        self.process = subprocess.Popen(
            command, env=env, stdin=stdin, stdout=subprocess.PIPE, stderr=self._log, text=True
        )

    def end(self) -> tuple[int, str]:
        """Wait for its end. Returns its status and its log."""
        status = self.process.wait(LOAD_S)
        self._log.seek(0)
        return status, self._log.read()

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()
        self._log.close()

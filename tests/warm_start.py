"""Starts `tandem` commands as forks of one process that has imported all services, which takes 3 s less for each mesh.

Everything else is as users have it. Some tests start programs by their command lines, as users do: those of `bench`,
of clients, of the wheels, and all that have a prefix or variables of their own.
"""

import asyncio
import atexit
import os
import sys
from asyncio.subprocess import PIPE, Process
from functools import cache

from mesh.fork_server.client import ForkedProcess, ForkServer, can_fork
from tests.orphans import disown_orphans

PROGRAM = (sys.executable, "-m", "tests.warm_program")
_MAX_LINE_BYTES = 1 << 16


async def start_tandem(*words: str) -> Process | ForkedProcess:
    """`python -m tandem_cli WORDS...`, with pipes as stdout and stderr."""
    if can_fork():
        forked = await _forks().start((*PROGRAM, *words), _environ(), {}, limit=_MAX_LINE_BYTES)
        disown_orphans()
        if forked is not None:
            return forked
    return await asyncio.create_subprocess_exec(sys.executable, "-m", "tandem_cli", *words, stdout=PIPE, stderr=PIPE)


@cache
def _forks() -> ForkServer:
    forks = ForkServer([PROGRAM], _environ(), print)
    atexit.register(forks.close)
    return forks


def _environ() -> dict[str, str]:
    """Without the name of the test, which changes."""
    return {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"}

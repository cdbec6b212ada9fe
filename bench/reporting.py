"""A process of a benchmark that prints its totals each second, as a JSON line, and ends with its standard input."""

import asyncio
import json
import resource
import sys
from collections.abc import Callable

_INTERVAL_S = 1.0


def raise_open_files() -> None:
    """Let this process open as many files as the system allows."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


async def report_until_end(
    totals: Callable[[], dict[str, float]], on_line: Callable[[str], None] | None = None
) -> None:
    """Print totals until standard input ends. `on_line` is called with each line of it."""
    reading = asyncio.create_task(_read_lines(on_line or (lambda _: None)))
    while not reading.done():
        print(json.dumps(totals()), flush=True)
        await asyncio.wait([reading], timeout=_INTERVAL_S)
    reading.result()


async def _read_lines(on_line: Callable[[str], None]) -> None:
    while line := await asyncio.to_thread(sys.stdin.readline):
        on_line(line.strip())

"""A process of a benchmark that prints its totals each second, as a JSON line, and ends with its standard input."""

import asyncio
import json
import sys
from collections.abc import Callable

_INTERVAL_S = 1.0


async def report_until_end(totals: Callable[[], dict[str, float]], on_line: Callable[[str], None]) -> None:
    """Print totals until standard input ends. `on_line` is called with each line of it."""
    reading = asyncio.create_task(_read_lines(on_line))
    while not reading.done():
        print(json.dumps(totals()), flush=True)
        await asyncio.wait([reading], timeout=_INTERVAL_S)
    reading.result()


async def _read_lines(on_line: Callable[[str], None]) -> None:
    while line := await asyncio.to_thread(sys.stdin.readline):
        on_line(line.strip())

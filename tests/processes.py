"""Processes that tests start: they have ended when their block has, whatever happens in it."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any


@asynccontextmanager
async def running_process(*command: str, **options: Any) -> AsyncIterator[asyncio.subprocess.Process]:
    """`options` are those of asyncio.create_subprocess_exec."""
    process = await asyncio.create_subprocess_exec(*command, **options)
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()

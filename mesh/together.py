"""Coroutines that succeed or fail as one."""

import asyncio
from collections.abc import Coroutine, Iterable
from typing import Any


async def together(coroutines: Iterable[Coroutine[Any, Any, object]]) -> None:
    """Run the coroutines concurrently. The first error cancels the others and is raised unchanged."""
    tasks = [asyncio.create_task(coroutine) for coroutine in coroutines]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

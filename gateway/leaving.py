"""What is done for a client that leaves is cancelled."""

import asyncio
from collections.abc import Coroutine
from typing import Any

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response


async def unless_gone(work: Coroutine[Any, Any, Response], request: Request) -> Response:
    """The response of `work`, which is cancelled if the client leaves. Raises ClientDisconnect then.

    The request's body must have been read.
    """
    working = asyncio.create_task(work)
    leaving = asyncio.create_task(_until_gone(request))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        return working.result()
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _until_gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass

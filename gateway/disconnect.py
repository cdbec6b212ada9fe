"""Cancels the work for a client that disconnects."""

import asyncio
from collections.abc import Coroutine
from typing import Any

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response


async def cancel_on_disconnect(work: Coroutine[Any, Any, Response], request: Request) -> Response:
    """Return the response of `work`. If the client disconnects first, cancel `work` and raise ClientDisconnect.

    The request's body must have been read already: this consumes the messages that follow it.
    """
    working = asyncio.create_task(work)
    disconnecting = asyncio.create_task(_until_disconnected(request))
    try:
        await asyncio.wait((working, disconnecting), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        return working.result()
    finally:
        for task in (working, disconnecting):
            task.cancel()
        await asyncio.gather(working, disconnecting, return_exceptions=True)


async def _until_disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass

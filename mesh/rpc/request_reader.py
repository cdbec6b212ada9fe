"""Reads the one request of a call within a time limit, so that nobody keeps a half-sent message in our memory."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from mesh.domain.errors import DeadlineExceeded, InvalidRequest

REQUEST_LIMIT_S = 60.0
"""For the largest message over a slow line."""
_CROWDED_LIMIT_S = 0.5


class RequestReader:
    """Reads the requests of one server.

    `max_readers`: calls beyond so many get half a second. A short request comes with the headers of its call, so it
    arrives all the same, and the memory for longer ones is bounded.
    """

    def __init__(self, limit_s: float = REQUEST_LIMIT_S, *, max_readers: int | None = None) -> None:
        self._limit_s = limit_s
        self._max_readers = max_readers
        self._num_reading = 0

    async def read(self, raws: AsyncIterator[bytes]) -> bytes:
        """Return the first message. Raises DeadlineExceeded, or InvalidRequest if there is none."""
        is_crowded = self._max_readers is not None and self._num_reading >= self._max_readers
        self._num_reading += 1
        try:
            async with asyncio.timeout(_CROWDED_LIMIT_S if is_crowded else self._limit_s):
                receiver: Any = aiter(raws)  # grpc's async generator, which keeps its last message until it is closed
                raw: bytes | None = await anext(receiver, None)
                await receiver.aclose()
        except TimeoutError:
            raise DeadlineExceeded("the request did not arrive in time") from None
        finally:
            self._num_reading -= 1
        if raw is None:
            raise InvalidRequest("the call ended without a request")
        return raw

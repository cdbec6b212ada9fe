"""A client's way to its routers: deadlines, credentials, retries, and errors of this package instead of gRPC's."""

import asyncio
import copy
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, TypeVar

import grpc
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from tandem._channel import ChannelFactory
from tandem._retry import ELSEWHERE, Deadline, RetryPolicy, retrying
from tandem._routers import Router, Routers, Stubs
from tandem.exceptions import Cancelled, ConnectionFailed, DeadlineExceeded, TandemError
from tandem.v1 import generation_pb2

R = TypeVar("R")

# grpc.health.v1 spelled out, to depend on no package for two bytes: an empty request asks for the whole server,
# and field 1 of the answer is 1 for SERVING.
_HEALTH_WATCH = "/grpc.health.v1.Health/Watch"
_WHOLE_SERVER = b""
_SERVING = b"\x08\x01"
_WATCH_AGAIN_S = 0.1
_TRACE_CONTEXT = TraceContextTextMapPropagator()


class Connection:
    """Calls to whichever router takes them. What has delivered nothing is tried again: at the next router at once, and
    when all have been asked, after a pause. An overloaded router is waited for, see _retry.py.
    """

    def __init__(self, addresses: str, api_key: str | None, policy: RetryPolicy, open_channel: ChannelFactory) -> None:
        self._routers = Routers(addresses, open_channel)
        self._metadata = _credentials(api_key)
        self._policy = policy

    def acting_for(self, api_key: str | None) -> "Connection":
        """The same routers over the same channels, with another key."""
        other = copy.copy(self)
        other._metadata = _credentials(api_key)
        return other

    async def close(self) -> None:
        """Close the channels; running calls are cancelled. May be called twice."""
        for router in self._routers:
            await router.close()

    async def unary(self, method: Callable[[Stubs], Any], request: Any, deadline: Deadline) -> Any:
        """The response of a unary call; `method` picks it out of a router's services."""

        async def attempt(router: Router, timeout_s: float) -> Any:
            with router.errors():
                return await method(router.stubs)(request, timeout=timeout_s, metadata=self._metadata)

        return await self._try_all(attempt, deadline)

    async def open_stream(self, request: generation_pb2.GenerateRequest, deadline: Deadline) -> "MessageStream":
        """Start a Generate call and wait for its first message. Only up to there is it tried again."""

        async def attempt(router: Router, timeout_s: float) -> MessageStream:
            metadata = (*self._metadata, *_trace_headers())
            call = router.stubs.generation.Generate(request, timeout=timeout_s, metadata=metadata)
            stream = MessageStream(call, router)
            try:
                await stream.read()
            except BaseException:  # a cancellation may come where grpc.aio would let the call run on
                stream.cancel()
                raise
            return stream

        return await self._try_all(attempt, deadline)

    async def _try_all(self, attempt: Callable[[Router, float], Awaitable[R]], deadline: Deadline) -> R:
        """Await `attempt(router, timeout_s)` until a router takes it, as often as the policy says."""

        async def one_round() -> R:
            error: TandemError | None = None
            for router in self._routers:
                try:
                    return await attempt(router, deadline.remaining_s())
                except ELSEWHERE as failure:
                    self._routers.avoid(router)
                    error = failure
            assert error is not None  # there is at least one router
            raise error

        return await retrying(one_round, self._policy, deadline)

    async def wait_serving(self, timeout_s: float) -> None:
        """Return when one router's health is SERVING; it is preferred then. Raises DeadlineExceeded."""
        waits = [asyncio.create_task(_wait_serving(router, timeout_s)) for router in self._routers]
        error: TandemError | None = None
        try:
            for wait in asyncio.as_completed(waits):
                try:
                    self._routers.prefer(await wait)
                    return
                except TandemError as failure:
                    error = failure
            assert error is not None
            raise error
        finally:
            for wait in waits:
                wait.cancel()
            await asyncio.gather(*waits, return_exceptions=True)


class MessageStream:
    """The messages of one Generate call. `message` is the newest, None at the stream's end."""

    def __init__(self, call: Any, router: Router) -> None:
        self.message: generation_pb2.GenerateResponse | None = None
        self._call = call
        self._router = router

    async def read(self) -> None:
        """Wait for the next message. Raises TandemError."""
        with self._router.errors():
            message = await self._call.read()
        self.message = None if message is grpc.aio.EOF else message

    def cancel(self) -> None:
        """End the call; nothing happens if it has ended."""
        self._call.cancel()


def _trace_headers() -> Iterable[tuple[str, str]]:
    """What the caller's own span is, if the program traces itself with OpenTelemetry: the mesh's go below it."""
    headers: dict[str, str] = {}
    _TRACE_CONTEXT.inject(headers)
    return headers.items()


def _credentials(api_key: str | None) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {api_key}"),) if api_key else ()


async def _wait_serving(router: Router, timeout_s: float) -> Router:
    deadline = Deadline.after(timeout_s)
    while not await _watch_health(router, deadline):
        await asyncio.sleep(min(_WATCH_AGAIN_S, deadline.remaining_s()))
        if not deadline.remaining_s():
            raise DeadlineExceeded(f"{router.address} is not ready after {timeout_s:g} s")
    return router


async def _watch_health(router: Router, deadline: Deadline) -> bool:
    """True once SERVING; False if the connection broke or time is up."""
    watch = router.stubs.channel.unary_stream(_HEALTH_WATCH)
    call = watch(_WHOLE_SERVER, timeout=deadline.remaining_s(), wait_for_ready=True)
    try:
        with router.errors():
            async for status in call:
                if status == _SERVING:
                    return True
    except (ConnectionFailed, DeadlineExceeded, Cancelled):
        return False
    finally:
        call.cancel()
    return False

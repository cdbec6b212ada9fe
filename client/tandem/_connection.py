"""Calls from a client to its routers: deadlines, credentials, retries, and translation of gRPC errors."""

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

# grpc.health.v1, encoded by hand to avoid a dependency: an empty request asks for the server as a whole, and field 1 of
# the response is 1 for SERVING.
_HEALTH_CHECK = "/grpc.health.v1.Health/Check"
_WHOLE_SERVER = b""
_SERVING = b"\x08\x01"
_FIRST_PAUSE_S, _MAX_PAUSE_S = 0.05, 0.5
_TRACE_CONTEXT = TraceContextTextMapPropagator()


class Connection:
    """Sends calls to the first router that accepts them.

    A call that has delivered nothing is retried at the next router without a pause, and after a pause when all routers
    have failed. If a router is overloaded, the client waits for it instead; see _retry.py.
    """

    def __init__(self, addresses: str, api_key: str | None, policy: RetryPolicy, open_channel: ChannelFactory) -> None:
        self._routers = Routers(addresses, open_channel)
        self._metadata = _credentials(api_key)
        self._policy = policy

    def acting_for(self, api_key: str | None) -> "Connection":
        """A connection that shares the channels of this one, but sends another API key."""
        connection = copy.copy(self)
        connection._metadata = _credentials(api_key)
        return connection

    async def close(self) -> None:
        """Close the channels, which cancels running calls. May be called twice."""
        for router in self._routers:
            await router.close()

    async def unary(self, method: Callable[[Stubs], Any], request: Any, deadline: Deadline) -> Any:
        """Make a unary call and return its response. `method` selects the RPC from the stubs of a router."""

        async def attempt(router: Router, timeout_s: float) -> Any:
            with router.errors():
                return await method(router.stubs)(request, timeout=timeout_s, metadata=self._metadata)

        return await self._try_all(attempt, deadline)

    async def open_stream(
        self,
        request: generation_pb2.GenerateRequest,
        deadline: Deadline,
        policy: RetryPolicy | None = None,
        patience: Deadline | None = None,
    ) -> "MessageStream":
        """Start a Generate call and wait for its first message. The call is retried until then, with `policy` or the
        policy of the client. Retries end with `patience`, by default with `deadline`.
        """

        async def attempt(router: Router, timeout_s: float) -> MessageStream:
            metadata = (*self._metadata, *_trace_headers())
            call = router.stubs.generation.Generate(request, timeout=timeout_s, metadata=metadata)
            stream = MessageStream(call, router, self._routers)
            try:
                await stream.read()
            except BaseException:  # without this, a cancelled task may leave the call running in grpc.aio
                stream.cancel()
                raise
            return stream

        return await self._try_all(attempt, deadline, policy, patience)

    async def _try_all(
        self,
        attempt: Callable[[Router, float], Awaitable[R]],
        deadline: Deadline,
        policy: RetryPolicy | None = None,
        patience: Deadline | None = None,
    ) -> R:
        """Call `attempt(router, timeout_s)` until it succeeds at a router or the policy gives up.

        If a connection broke during one of the attempts, that error is raised rather than a later failure to connect,
        because a router may have started to process the request.
        """
        broke: ConnectionFailed | None = None

        async def one_round() -> R:
            nonlocal broke
            error: TandemError | None = None
            for router in self._routers:
                try:
                    return await attempt(router, deadline.remaining_s())
                except ELSEWHERE as failure:
                    self._routers.avoid(router)
                    error = failure
                    if isinstance(failure, ConnectionFailed) and failure.broke:
                        broke = failure
            assert error is not None  # there is at least one router
            raise error

        try:
            return await retrying(one_round, policy or self._policy, patience or deadline)
        except ConnectionFailed as error:
            raise broke or error from None

    async def wait_serving(self, timeout_s: float, *, stagger_s: float = 0.0) -> None:
        """Return when the health of one router is SERVING, and prefer that router. Raises DeadlineExceeded.

        `stagger_s` is the head start that each router has over the next one.
        """
        waits = [
            asyncio.create_task(_wait_serving(router, timeout_s, index * stagger_s))
            for index, router in enumerate(self._routers)
        ]
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
    """The messages of one Generate call. `message` is the latest message, and None at the end of the stream."""

    def __init__(self, call: Any, router: Router, routers: Routers) -> None:
        self.message: generation_pb2.GenerateResponse | None = None
        self._call = call
        self._router = router
        self._routers = routers

    async def read(self) -> None:
        """Wait for the next message. Raises TandemError. A router that cannot be reached becomes the last choice."""
        try:
            with self._router.errors():
                message = await self._call.read()
        except ConnectionFailed:
            self._routers.avoid(self._router)
            raise
        self.message = None if message is grpc.aio.EOF else message

    def cancel(self) -> None:
        """Cancel the call, unless it has ended."""
        self._call.cancel()


def _trace_headers() -> Iterable[tuple[str, str]]:
    """Headers with the OpenTelemetry span of the caller, if there is one. It becomes the parent of spans in the
    mesh.
    """
    headers: dict[str, str] = {}
    _TRACE_CONTEXT.inject(headers)
    return headers.items()


def _credentials(api_key: str | None) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {api_key}"),) if api_key else ()


async def _wait_serving(router: Router, timeout_s: float, delay_s: float) -> Router:
    """Poll the health of one router with backoff. Returns the router when it is SERVING; raises DeadlineExceeded."""
    deadline, pause_s = Deadline.after(timeout_s), _FIRST_PAUSE_S
    await asyncio.sleep(min(delay_s, timeout_s))
    while not await _is_serving(router, deadline):
        await asyncio.sleep(min(pause_s, deadline.remaining_s()))
        if not deadline.remaining_s():
            raise DeadlineExceeded(f"{router.address} is not ready after {timeout_s:g} s")
        pause_s = min(2 * pause_s, _MAX_PAUSE_S)
    return router


async def _is_serving(router: Router, deadline: Deadline) -> bool:
    """Whether the router is SERVING; False if the connection fails or time is up."""
    check = router.stubs.channel.unary_unary(_HEALTH_CHECK)
    try:
        with router.errors():
            status = await check(_WHOLE_SERVER, timeout=deadline.remaining_s(), wait_for_ready=True)
    except (ConnectionFailed, DeadlineExceeded, Cancelled):
        return False
    return bool(status == _SERVING)

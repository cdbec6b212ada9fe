"""Calls from a client to its routers: deadlines, credentials, retries, and translation of gRPC errors.

A router holds no state that another router would need: a request determines its answer completely, including random
draws, which depend on the seed. A call whose connection breaks is therefore sent again, to the next router or to the
same address once a router answers there. Tokens that the caller already has are removed from the new answer
(EventReader), so the caller only notices a pause. This applies to connections that break or cannot be made, and to
calls that a router cuts off because it stops. Any other error status from a router is the result of the call.
"""

import asyncio
import copy
import secrets
import sys
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, TypeVar

import grpc
from google.protobuf.message import Message
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from tandem._responses import EventReader
from tandem._retries import ELSEWHERE, RETRYABLE, Deadline, RetryPolicy
from tandem._routers import Channels, Router, Routers, Stubs
from tandem.exceptions import Cancelled, ConnectionFailed, DeadlineExceeded, InvalidRequest, TandemError
from tandem.v1 import generation_pb2

R = TypeVar("R")
Attempt = Callable[[Router, float], Awaitable[R]]
"""Makes a call to one router, with a timeout in seconds."""

# grpc.health.v1, encoded by hand to avoid a dependency: an empty request asks for the server as a whole, and field 1 of
# the response is 1 for SERVING.
_HEALTH_CHECK = "/grpc.health.v1.Health/Check"
_WHOLE_SERVER = b""
_SERVING = b"\x08\x01"
_FIRST_PAUSE_S, _MAX_PAUSE_S = 0.05, 0.5
_TRACE_CONTEXT = TraceContextTextMapPropagator()

_MAX_LOSSES = 4
# A lost router is last in order, and its health check may still succeed for a moment.
_STAGGER_S = 0.2
_UNLIMITED_RETRIES = RetryPolicy(max_retries=sys.maxsize, max_backoff_s=2.0)


class Losses:
    """The connections that broke during one call. A request that crashes its router must not crash all routers, so the
    call ends after too many losses. Routers that say that they stop do not count.
    """

    def __init__(self) -> None:
        self.last: ConnectionFailed | None = None
        self._count = 0

    def add(self, loss: ConnectionFailed) -> None:
        self.last = loss
        self._count += not loss.stopped

    @property
    def are_too_many(self) -> bool:
        return self._count > _MAX_LOSSES

    def error_of(self, failure: TandemError) -> TandemError:
        """The error of a call that has failed: the last loss, because a router had accepted the call, or `failure`."""
        if self.last is None or self.last is failure:
            return failure
        self.last.__cause__ = failure
        return self.last


class Connection:
    """Sends calls to the first router that accepts them.

    A call that has delivered nothing is retried at the next router without a pause, and after a pause when all routers
    have failed. If a router is overloaded, the client waits for it instead; see _retries.py.
    """

    def __init__(self, addresses: str, api_key: str | None, policy: RetryPolicy, channels: Channels) -> None:
        self._routers = Routers(addresses, channels)
        self._metadata = _credentials(api_key)
        self._policy = policy

    def acting_for(self, api_key: str | None) -> "Connection":
        """A connection that shares the channels of this one, but sends another API key."""
        connection = copy.copy(self)
        connection._metadata = _credentials(api_key)
        return connection

    async def close(self) -> None:
        """Close the channels, which ends running calls with Cancelled. May be called twice."""
        for router in self._routers:
            await router.close()

    def require_open(self) -> None:
        """Raise RuntimeError after `close()`. A call that has begun raises Cancelled instead."""
        if any(router.is_closed for router in self._routers):
            raise RuntimeError("this client is closed")

    async def unary(
        self, method: Callable[[Stubs], Callable[..., Awaitable[R]]], request: Message, deadline: Deadline
    ) -> R:
        """Make a unary call and return its response. `method` selects the RPC from the stubs of a router."""

        async def attempt(router: Router, timeout_s: float) -> R:
            with router.errors():
                return await method(router.stubs)(request, timeout=timeout_s, metadata=self._metadata)

        losses = Losses()
        try:
            return await self._first_success(attempt, deadline, losses, self._policy, deadline)
        except ConnectionFailed as error:
            failure = error
        raise losses.error_of(failure)

    async def open_stream(
        self,
        request: generation_pb2.GenerateRequest,
        deadline: Deadline,
        losses: Losses,
        *,
        policy: RetryPolicy | None = None,
        retry_deadline: Deadline | None = None,
    ) -> "MessageStream":
        """Start a Generate call and wait for its first message. The call is retried until then, with `policy` or the
        policy of the client. Retries end with `retry_deadline`, by default with `deadline`. Connections that break are
        added to `losses`.
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

        return await self._first_success(attempt, deadline, losses, policy or self._policy, retry_deadline or deadline)

    async def _first_success(
        self,
        attempt: Attempt[R],
        deadline: Deadline,
        losses: Losses,
        policy: RetryPolicy,
        retry_deadline: Deadline,
    ) -> R:
        """Call `attempt(router, timeout_s)` in rounds of all routers until it succeeds. Raise the last round's error
        when the policy gives up, or when too many connections broke.
        """
        num_retries = 0
        while True:
            try:
                return await self._round(attempt, deadline, losses)
            except TandemError as error:
                delay_s = policy.delay_s(error, num_retries, retry_deadline.remaining_s())
                if delay_s is None or losses.are_too_many:
                    raise
            await asyncio.sleep(delay_s)
            num_retries += 1

    async def _round(self, attempt: Attempt[R], deadline: Deadline, losses: Losses) -> R:
        """Call `attempt` at one router after the other until it succeeds. Raise the last router's error."""
        error: TandemError | None = None
        for router in self._routers:
            try:
                return await attempt(router, deadline.remaining_s())
            except ELSEWHERE as failure:
                self._routers.avoid(router)
                if isinstance(failure, ConnectionFailed) and failure.broke:
                    losses.add(failure)
                error = failure
                if losses.are_too_many:
                    break
        assert error is not None  # there is at least one router
        raise error

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
    """Raises InvalidRequest for a key that no header can carry, such as one with the line break of its file."""
    if api_key is not None and not isinstance(api_key, str):
        raise InvalidRequest(f"api_key must be a text, got a value of type {type(api_key).__name__}")
    if api_key and not (api_key.isascii() and api_key.isprintable()):
        raise InvalidRequest("api_key may have printable ASCII characters only, and no line break")
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
    """True if the router is SERVING; False also if the connection fails or time is up."""
    check = router.stubs.channel.unary_unary(_HEALTH_CHECK)
    try:
        with router.errors():
            status = await check(_WHOLE_SERVER, timeout=deadline.remaining_s(), wait_for_ready=True)
    except (ConnectionFailed, DeadlineExceeded):
        return False
    return bool(status == _SERVING)


def make_repeatable(request: generation_pb2.GenerateRequest) -> None:
    """Set a seed on a sampling request, so that it makes the same random draws at any router."""
    if request.sampling.temperature > 0 and not request.sampling.HasField("seed"):
        request.sampling.seed = secrets.randbits(64)


class ResumableStream:
    """The messages of one Generate call, possibly from several routers in turn.

    After each loss, the search for a router takes at most `resume_timeout_s`, within `deadline`; 0 seconds disable it.
    `reader` reads the messages. Its `repeat` is called when they start again from the first. A loss after the complete
    answer ends the stream.
    """

    def __init__(
        self,
        connection: Connection,
        request: generation_pb2.GenerateRequest,
        deadline: Deadline,
        reader: EventReader,
        *,
        resume_timeout_s: float,
    ) -> None:
        self._connection = connection
        self._request = request
        self._deadline = deadline
        self._resume_timeout_s = resume_timeout_s
        self._reader = reader
        self._stream: MessageStream | None = None
        self._losses = Losses()

    async def read(self) -> generation_pb2.GenerateResponse | None:
        """The next message; None at the end of the answer. Raises TandemError."""
        try:
            if self._stream is None:
                self._stream = await self._connection.open_stream(self._request, self._deadline, self._losses)
            else:
                await self._stream.read()
        except RETRYABLE as failure:
            if not self._has_lost(failure):
                raise
            if self._reader.is_complete():
                return None
            self._stream = await self._repeat(failure)
        message = self._stream.message
        if message is not None and message.prompt.model:
            # Sent again, the call must reach the same revision, whatever its share is by then.
            self._request.model = message.prompt.model
        return message

    def cancel(self) -> None:
        """Cancel the call, unless it has ended."""
        if self._stream is not None:
            self._stream.cancel()

    def _has_lost(self, failure: TandemError) -> bool:
        """True if a router that had accepted the call was lost. Only then is the call sent again."""
        if self._stream is None:
            return self._losses.last is not None  # `open_stream` has added it
        if isinstance(failure, ConnectionFailed):
            self._losses.add(failure)
        return isinstance(failure, ConnectionFailed)

    async def _repeat(self, failure: TandemError) -> MessageStream:
        """Send the call again and return its stream at the first message. Raises the last loss if no router accepts the
        call in time.
        """
        if self._stream is not None and self._request.HasField("ttft_target"):
            # The first token was delivered before the loss, so its target no longer applies.
            self._request.ttft_target.FromMicroseconds(max(1, round(self._deadline.remaining_s() * 1_000_000)))
        loss = None
        # If a router accepts the call and is lost, too, the search begins anew.
        while self._losses.last is not loss and not self._losses.are_too_many and self._resume_timeout_s:
            loss = self._losses.last
            try:
                stream = await self._search()
            except Cancelled:
                raise
            except TandemError as error:
                if not self._deadline.remaining_s():
                    raise DeadlineExceeded(f"out of time while looking for a router: {loss}") from error
                failure = error
            else:
                self._reader.repeat()
                return stream
        raise self._losses.error_of(failure)

    async def _search(self) -> MessageStream:
        """Send the call to the first router that serves, for `resume_timeout_s` at most. Raises TandemError."""
        retry_deadline = Deadline.after(min(self._resume_timeout_s, self._deadline.remaining_s()))
        # A router that has just started does not know its workers and their limits yet.
        await self._connection.wait_serving(retry_deadline.remaining_s(), stagger_s=_STAGGER_S)
        return await self._connection.open_stream(
            self._request, self._deadline, self._losses, policy=_UNLIMITED_RETRIES, retry_deadline=retry_deadline
        )

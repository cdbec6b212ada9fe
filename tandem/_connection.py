"""One connection to a router: deadlines, credentials, retries, and errors of this package instead of gRPC's."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import grpc

from tandem._retry import Deadline, RetryPolicy, retrying
from tandem._status import error_from_rpc
from tandem.exceptions import ConnectionFailed, DeadlineExceeded, InvalidRequest
from tandem.v1 import generation_pb2, generation_pb2_grpc, worker_pb2_grpc

ChannelFactory = Callable[[str], grpc.aio.Channel]
R = TypeVar("R")

# grpc.health.v1 spelled out, to depend on no package for two bytes: an empty request asks for the whole server,
# and field 1 of the answer is 1 for SERVING.
_HEALTH_WATCH = "/grpc.health.v1.Health/Watch"
_WHOLE_SERVER = b""
_SERVING = b"\x08\x01"
_WATCH_AGAIN_S = 0.1

_LOOPBACK = ("127.", "localhost:", "[::1]:")
_OPTIONS = (
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    # Log-probs of a long prompt come in one message.
    ("grpc.max_receive_message_length", 64 << 20),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 2000),
    # Retries are decided in one place: _retry.py.
    ("grpc.enable_retries", 0),
)


def insecure_channel(address: str) -> grpc.aio.Channel:
    """A plaintext channel. An HTTP proxy of the environment is not used for this machine's own addresses."""
    own = (("grpc.enable_http_proxy", 0),) if address.startswith(_LOOPBACK) else ()
    return grpc.aio.insecure_channel(address, options=[*_OPTIONS, *own])


@dataclass(frozen=True, slots=True)
class _Stubs:
    channel: grpc.aio.Channel
    generation: Any
    mesh: Any


class Connection:
    """Calls to one address. The channel opens with the first call, inside the event loop that makes it."""

    def __init__(self, address: str, api_key: str | None, policy: RetryPolicy, open_channel: ChannelFactory) -> None:
        if not address:
            raise InvalidRequest('the address must be like "127.0.0.1:50051"')
        self.address = address
        self._metadata = (("authorization", f"Bearer {api_key}"),) if api_key else ()
        self._policy = policy
        self._open_channel = open_channel
        self._opened: _Stubs | None = None
        self._closed = False

    @property
    def stubs(self) -> _Stubs:
        """The services. Raises RuntimeError once closed."""
        if self._closed:
            raise RuntimeError("this client is closed")
        if self._opened is None:
            channel = self._open_channel(self.address)
            self._opened = _Stubs(
                channel,
                generation_pb2_grpc.GenerationStub(channel),
                worker_pb2_grpc.MeshStub(channel),
            )
        return self._opened

    async def close(self) -> None:
        """Close the channel; running calls are cancelled. May be called twice."""
        self._closed = True
        opened, self._opened = self._opened, None
        if opened is not None:
            await opened.channel.close()

    async def unary(self, method: Callable[..., Any], request: Any, deadline: Deadline) -> Any:
        """The response of a unary call."""

        async def attempt(timeout_s: float) -> Any:
            try:
                return await method(request, timeout=timeout_s, metadata=self._metadata)
            except grpc.aio.AioRpcError as error:
                raise error_from_rpc(error, self.address) from error

        return await retrying(attempt, self._policy, deadline)

    async def open_stream(self, request: generation_pb2.GenerateRequest, deadline: Deadline) -> "MessageStream":
        """Start a Generate call and wait for its first message. Only up to there is it tried again."""

        async def attempt(timeout_s: float) -> MessageStream:
            call = self.stubs.generation.Generate(request, timeout=timeout_s, metadata=self._metadata)
            stream = MessageStream(call, self.address)
            try:
                await stream.read()
            except BaseException:  # a cancellation may come where grpc.aio would let the call run on
                stream.cancel()
                raise
            return stream

        return await retrying(attempt, self._policy, deadline)

    async def wait_serving(self, timeout_s: float) -> None:
        """Return when the server's health is SERVING. Raises DeadlineExceeded."""
        deadline = Deadline.after(timeout_s)
        while not await self._watch_health(deadline):
            await asyncio.sleep(min(_WATCH_AGAIN_S, deadline.remaining_s()))
            if not deadline.remaining_s():
                raise DeadlineExceeded(f"{self.address} is not ready after {timeout_s:g} s")

    async def _watch_health(self, deadline: Deadline) -> bool:
        """True once SERVING; False if the connection broke or time is up."""
        watch = self.stubs.channel.unary_stream(_HEALTH_WATCH)
        call = watch(_WHOLE_SERVER, timeout=deadline.remaining_s(), wait_for_ready=True)
        try:
            async for status in call:
                if status == _SERVING:
                    return True
        except grpc.aio.AioRpcError as rpc_error:
            error = error_from_rpc(rpc_error, self.address)
            if not isinstance(error, ConnectionFailed | DeadlineExceeded):
                raise error from rpc_error
        finally:
            call.cancel()
        return False


class MessageStream:
    """The messages of one Generate call. `message` is the newest, None at the stream's end."""

    def __init__(self, call: Any, address: str) -> None:
        self.message: generation_pb2.GenerateResponse | None = None
        self._call = call
        self._address = address

    async def read(self) -> None:
        """Wait for the next message. Raises TandemError."""
        try:
            message = await self._call.read()
        except grpc.aio.AioRpcError as error:
            raise error_from_rpc(error, self._address) from error
        self.message = None if message is grpc.aio.EOF else message

    def cancel(self) -> None:
        """End the call; nothing happens if it has ended."""
        self._call.cancel()

"""The gRPC server of every service, and its interceptor.

The interceptor checks credentials, turns errors into statuses and logs failures, so servicers need no try/except. A
MeshError becomes its status; any other error becomes INTERNAL, with the traceback in the log only. A cancelled handler
ends its call, so that the peer never hangs.

grpc.aio reads the request of a unary method whole, for however long it takes, before it runs anything of ours. To grpc
all methods are therefore streams: a call without a credential is refused unread, and other requests have a time limit.
"""

import asyncio
import errno
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import grpc
import structlog
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from mesh.domain.errors import ConfigurationError, InvalidRequest, MeshError
from mesh.domain.host import join_host
from mesh.process_limits import require_room_for_threads
from mesh.public_tls import CertificateReloader
from mesh.rpc import health
from mesh.rpc.credentials import Guard, TlsIdentity, require_safe_bind
from mesh.rpc.health import Health
from mesh.rpc.request_reader import RequestReader
from mesh.rpc.status import details_of, status_of
from mesh.tasks import mark_retrieved, until_ended

MAX_MESSAGE_BYTES = 16 << 20
"""Limit inside the mesh; KV chunks are much smaller. The public port keeps gRPC's default of 4 MiB."""

# Client and server keepalive must agree, or the server ends idle streams with GOAWAY too_many_pings.
KEEPALIVE_MS = 20_000
_KEEPALIVE = (
    ("grpc.keepalive_time_ms", KEEPALIVE_MS),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_ping_interval_without_data_ms", KEEPALIVE_MS // 4),
    ("grpc.http2.max_ping_strikes", 0),
)

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Listen:
    """The address of a server and its access control. Port 0 takes a free port.

    Without a guard and without TLS that requires client certificates, anybody may call. Such a server must listen on
    loopback, unless `allow_anonymous` is set. `tls` is mutual, inside the mesh. `public_tls` is the certificate that
    clients see, always the latest.
    """

    host: str
    port: int
    guard: Guard | None = None
    public: bool = False
    allow_anonymous: bool = False
    tls: TlsIdentity | None = None
    public_tls: CertificateReloader[TlsIdentity] | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ConfigurationError(f"port must be in [0, 65535], got {self.port}")

    @property
    def knows_callers(self) -> bool:
        """True if callers must present a credential."""
        return self.guard is not None or (self.tls is not None and self.tls.ca is not None)

    def server_credentials(self) -> grpc.ServerCredentials | None:
        """None for plaintext."""
        if self.public_tls is not None:
            return _renewed_credentials(self.public_tls)
        return self.tls.server_credentials() if self.tls is not None else None


class Server:
    """A grpc.aio server with health, reflection and the mesh's interceptor.

    The constructor binds the port, so `address` is known before the server starts. Register servicers on `grpc`, then
    `await start()`. Raises ConfigurationError if the port is not available.
    """

    def __init__(self, listen: Listen, health: Health | None = None) -> None:
        require_listenable(listen)
        require_room_for_threads()
        limit = (
            ()
            if listen.public
            else (
                ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
                ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
            )
        )
        self.grpc = grpc.aio.server(
            interceptors=[ServiceInterceptor(listen.guard)],
            options=[*_KEEPALIVE, *limit, ("grpc.so_reuseport", 0)],
        )
        self._listen = listen
        self._credentials = listen.server_credentials()
        self.port = self._bind()
        self.health = health or Health()
        health_pb2_grpc.add_HealthServicer_to_server(self.health, self.grpc)

    @property
    def address(self) -> str:
        return join_host(self._listen.host, self.port)

    def _bind(self) -> int:
        address = join_host(self._listen.host, self._listen.port)
        try:
            if self._credentials is None:
                return int(self.grpc.add_insecure_port(address))
            return int(self.grpc.add_secure_port(address, self._credentials))
        except RuntimeError as error:
            cause = "choose another port" if self._credentials is None else "gRPC cannot use the certificate or its key"
            raise ConfigurationError(f"cannot listen on {address}: {cause}") from error

    async def start(self, services: Sequence[str]) -> None:
        """Start serving. `services` lists the full service names for reflection. Health stays NOT_SERVING until
        `set_serving`."""
        names = (*services, health_pb2.DESCRIPTOR.services_by_name["Health"].full_name, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, self.grpc)
        self.set_serving(False)
        await start_serving(self.grpc)

    def set_serving(self, serving: bool, service: str = "") -> None:
        """Set the health status of `service`; "" stands for the whole server. Does not wait for watchers."""
        self.health.set_serving(serving, service)

    async def stop(self, grace_s: float) -> None:
        """Set NOT_SERVING, refuse new calls, and end running calls after `grace_s`."""
        self.health.end()
        await self.grpc.stop(grace_s)


async def start_serving(server: grpc.aio.Server) -> None:
    """Start a server, to the end even if this is cancelled. If grpc.aio is cancelled in between, the server's own task
    fails, stopping raises, and a traceback of that is printed.
    """
    await until_ended(server.start())


def _renewed_credentials(identity: CertificateReloader[TlsIdentity]) -> grpc.ServerCredentials:
    """Credentials of a server that shows each new client the latest certificate, and asks for none."""
    shown = identity.latest

    def configuration() -> grpc.ServerCertificateConfiguration:
        return grpc.ssl_server_certificate_configuration([(shown.key, shown.chain)])

    def changed_configuration() -> grpc.ServerCertificateConfiguration | None:
        """gRPC calls it for each new connection, on a thread of its own; None keeps what it has."""
        nonlocal shown
        if shown is identity.latest:
            return None
        shown = identity.latest
        return configuration()

    return grpc.dynamic_ssl_server_credentials(configuration(), changed_configuration)


def require_listenable(listen: Listen) -> None:
    """Raise ConfigurationError if the port cannot be bound, or others can reach it without a credential."""
    if not listen.knows_callers and not listen.allow_anonymous:
        advice = (
            "set TANDEM_API_KEYS_FILE (see: tandem keys)"
            if listen.public
            else "set TANDEM_MESH_KEY or TANDEM_MESH_TLS_CERT"
        )
        require_safe_bind(listen.host, advice=advice)
    require_free(listen.host, listen.port)


def require_free(host: str, port: int) -> None:
    """Raise ConfigurationError if the port cannot be bound. Checked before grpc binds, because grpc writes noisy
    messages when it cannot.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host.strip("[]"), port))
        except OSError as error:
            reason, address = (error.strerror or str(error)).lower(), join_host(host, port)
            is_no_address = isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL
            port_advice = "choose another port, or 0 for any that is free"
            advice = "choose an address of this machine as the host" if is_no_address else port_advice
            raise ConfigurationError(f"cannot listen on {address}, {reason}: {advice}") from error


class ServiceInterceptor(grpc.aio.ServerInterceptor):
    """Wraps every call of a server. Without a guard, all callers are accepted."""

    def __init__(self, guard: Guard | None) -> None:
        self._guard = guard
        self._requests = RequestReader()
        self._health_requests = RequestReader(health.REQUEST_LIMIT_S, max_readers=health.MAX_READERS)

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler:
        handler = await continuation(handler_call_details)
        method = handler_call_details.method
        if handler is None:
            return handler
        if method in health.METHODS:
            return self._wrap_health(handler, method)
        try:
            if self._guard is not None:
                self._guard.check(handler_call_details.invocation_metadata)
        except Exception as error:
            return _refusal(method, error)
        if handler.response_streaming:
            return self._wrap_streaming(handler, method)
        return self._wrap_unary(handler, method)

    def _wrap_health(self, handler: grpc.RpcMethodHandler, method: str) -> grpc.RpcMethodHandler:
        """Health ends its own calls: `_end` would wait for a watcher that reads nothing."""
        inner = handler.unary_stream or handler.unary_unary

        async def call(raws: AsyncIterator[bytes], context: grpc.aio.ServicerContext) -> object:
            try:
                request = _parse(handler, await self._health_requests.read(raws))
            except BaseException as error:
                await _end(context, method, error)
            return await inner(request, context)

        if handler.response_streaming:
            return grpc.stream_stream_rpc_method_handler(call, None, handler.response_serializer)
        return grpc.stream_unary_rpc_method_handler(call, None, handler.response_serializer)

    def _wrap_unary(self, handler: grpc.RpcMethodHandler, method: str) -> grpc.RpcMethodHandler:
        async def call(raws: AsyncIterator[bytes], context: grpc.aio.ServicerContext) -> object:
            try:
                return await handler.unary_unary(_parse(handler, await self._requests.read(raws)), context)
            except BaseException as error:
                await _end(context, method, error)

        return grpc.stream_unary_rpc_method_handler(call, None, handler.response_serializer)

    def _wrap_streaming(self, handler: grpc.RpcMethodHandler, method: str) -> grpc.RpcMethodHandler:
        inner = handler.stream_stream or handler.unary_stream

        async def call(raws: AsyncIterator[bytes], context: grpc.aio.ServicerContext) -> AsyncIterator[object]:
            responses = None
            try:
                if handler.request_streaming:
                    responses = inner(_parse_all(handler, raws), context)
                else:
                    responses = inner(_parse(handler, await self._requests.read(raws)), context)
                async for response in responses:
                    yield response
            except GeneratorExit:
                raise
            except BaseException as error:
                await _end(context, method, error)
            finally:
                if responses is not None and hasattr(responses, "aclose"):
                    await responses.aclose()

        return grpc.stream_stream_rpc_method_handler(call, None, handler.response_serializer)


def _refusal(method: str, error: Exception) -> grpc.RpcMethodHandler:
    """A handler that ends the call and reads nothing of its request."""

    async def refuse(raws: AsyncIterator[bytes], context: grpc.aio.ServicerContext) -> None:
        await _end(context, method, error)

    return grpc.stream_stream_rpc_method_handler(refuse)


def _parse(handler: grpc.RpcMethodHandler, raw: bytes) -> object:
    """Parse the request. Raises InvalidRequest for garbage, which grpc would report as INTERNAL."""
    try:
        return handler.request_deserializer(raw)
    except MeshError:
        raise
    except Exception as error:
        raise InvalidRequest("the request is not a valid protobuf message of this method") from error


async def _parse_all(handler: grpc.RpcMethodHandler, raws: AsyncIterator[bytes]) -> AsyncIterator[object]:
    async for raw in raws:
        yield _parse(handler, raw)


def end_blocked_call(context: grpc.aio.ServicerContext, handler: "asyncio.Task[Any]", error: BaseException) -> None:
    """End a call whose client does not take the message that `handler` writes. The status follows that message.

    grpc.aio tells the client nothing of a handler that is only cancelled: it would wait until its own deadline.
    """
    asyncio.create_task(_end(context, handler.get_name(), error)).add_done_callback(mark_retrieved)
    handler.cancel()


async def _end(context: grpc.aio.ServicerContext, method: str, error: BaseException) -> NoReturn:
    """End the call with the status of `error`."""
    try:
        await _abort(context, method, error)
    except grpc.aio.InternalError as failure:
        # The call has already ended, by its deadline or its client. grpc would log InternalError, not CancelledError.
        raise asyncio.CancelledError from failure


async def _abort(context: grpc.aio.ServicerContext, method: str, error: BaseException) -> NoReturn:
    if isinstance(error, MeshError):
        code, trailing = status_of(error)
        details = details_of(error)
        log.info("call refused", method=method, status=code.name, error=details)
        await context.abort(code, details, trailing)
    if isinstance(error, asyncio.CancelledError):
        if not context.cancelled():
            await context.abort(grpc.StatusCode.CANCELLED, "the server is stopping")
        raise error
    if not isinstance(error, grpc.aio.AbortError | KeyboardInterrupt | SystemExit):  # a panic in Rust is no Exception
        log.error("call failed", method=method, exc_info=error)
        await context.abort(grpc.StatusCode.INTERNAL, "internal error; the server's log has the details")
    raise error

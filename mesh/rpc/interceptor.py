"""The server interceptor: checks credentials, turns errors into statuses, logs failures. Servicers need no try/except.

A MeshError becomes its status; any other error becomes INTERNAL, with the traceback in the log only. A cancelled
handler ends its call, so that the peer never hangs.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, NoReturn

import grpc
import structlog

from mesh.domain.errors import InvalidRequest, MeshError
from mesh.rpc import health
from mesh.rpc.credentials import Guard
from mesh.rpc.status import status_of

log = structlog.get_logger(__name__)


class ServiceInterceptor(grpc.aio.ServerInterceptor):
    """Wraps every call of a server. Without a guard, all callers are accepted."""

    def __init__(self, guard: Guard | None) -> None:
        self._guard = guard

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler:
        handler = await continuation(handler_call_details)
        method = handler_call_details.method
        if handler is None or method in health.METHODS:
            return handler
        if handler.response_streaming:
            return self._wrap_streaming(handler, method)
        return self._wrap_unary(handler, method)

    def _wrap_unary(self, handler: Any, method: str) -> grpc.RpcMethodHandler:
        async def call(raw: bytes, context: grpc.aio.ServicerContext) -> Any:
            try:
                self._check(context)
                return await handler.unary_unary(_parse(handler, raw), context)
            except BaseException as error:
                await _end(context, method, error)

        return grpc.unary_unary_rpc_method_handler(call, None, handler.response_serializer)

    def _wrap_streaming(self, handler: Any, method: str) -> grpc.RpcMethodHandler:
        inner = handler.stream_stream or handler.unary_stream

        async def call(raw: Any, context: grpc.aio.ServicerContext) -> AsyncIterator[Any]:
            responses = None
            try:
                self._check(context)
                request = _parse_all(handler, raw) if handler.request_streaming else _parse(handler, raw)
                responses = inner(request, context)
                async for response in responses:
                    yield response
            except GeneratorExit:
                raise
            except BaseException as error:
                await _end(context, method, error)
            finally:
                if responses is not None and hasattr(responses, "aclose"):
                    await responses.aclose()

        if handler.request_streaming:
            return grpc.stream_stream_rpc_method_handler(call, None, handler.response_serializer)
        return grpc.unary_stream_rpc_method_handler(call, None, handler.response_serializer)

    def _check(self, context: grpc.aio.ServicerContext) -> None:
        if self._guard is not None:
            self._guard.check(context.invocation_metadata())


def _parse(handler: Any, raw: bytes) -> Any:
    """Parse the request. Raises InvalidRequest for garbage, which grpc would report as INTERNAL."""
    try:
        return handler.request_deserializer(raw)
    except Exception as error:
        raise InvalidRequest("the request is not a valid protobuf message of this method") from error


async def _parse_all(handler: Any, raws: AsyncIterator[bytes]) -> AsyncIterator[Any]:
    async for raw in raws:
        yield _parse(handler, raw)


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
        log.info("call refused", method=method, status=code.name, error=str(error))
        await context.abort(code, str(error), trailing)
    if isinstance(error, asyncio.CancelledError):
        if not context.cancelled():
            await context.abort(grpc.StatusCode.CANCELLED, "the server is stopping")
        raise error
    if isinstance(error, Exception) and not isinstance(error, grpc.aio.AbortError):
        log.error("call failed", method=method, exc_info=error)
        await context.abort(grpc.StatusCode.INTERNAL, "internal error; the server's log has the details")
    raise error

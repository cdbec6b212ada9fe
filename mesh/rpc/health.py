"""The grpc.health.v1 service. A slow client cannot block it.

Statuses are kept in a dictionary, and every watcher has its own event. No lock is held while a message is written, so a
watcher that reads nothing delays neither other watchers nor a status change nor the server's stop.
"""

import asyncio

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

_SERVING = health_pb2.HealthCheckResponse.SERVING
_NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
_UNKNOWN = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN

MAX_WATCHERS = 1000
MAX_READERS = 4
"""Calls whose request may take `REQUEST_LIMIT_S`, see RequestReader."""
REQUEST_LIMIT_S = 5.0
_WRITE_LIMIT_S = 10.0
_MAX_NAME_CHARS = 256

METHODS = frozenset(f"/grpc.health.v1.Health/{name}" for name in ("Check", "List", "Watch"))
"""Methods that need no credential, because orchestrators have none."""


class Health(health_pb2_grpc.HealthServicer):
    """The statuses of one server by service name; "" stands for the whole server."""

    def __init__(self, *, write_limit_s: float = _WRITE_LIMIT_S, max_watchers: int = MAX_WATCHERS) -> None:
        self._statuses: dict[str, int] = {}
        self._watchers: dict[asyncio.Event, str] = {}
        self._write_limit_s = write_limit_s
        self._max_watchers = max_watchers
        self._has_ended = False

    def set_serving(self, serving: bool, service: str = "") -> None:
        """Set the status of `service` and notify its watchers. Ignored after `end`."""
        if not self._has_ended:
            self._statuses[service] = _SERVING if serving else _NOT_SERVING
            self._wake(service)

    def end(self) -> None:
        """Set every service to NOT_SERVING for good."""
        self._has_ended = True
        self._statuses = dict.fromkeys(self._statuses, _NOT_SERVING)
        for service in self._statuses:
            self._wake(service)

    async def Check(
        self, request: health_pb2.HealthCheckRequest, context: grpc.aio.ServicerContext
    ) -> health_pb2.HealthCheckResponse:
        """The status of one service, or NOT_FOUND."""
        status = self._statuses.get(request.service)
        if status is None:
            await context.abort(grpc.StatusCode.NOT_FOUND, "unknown service")
        return health_pb2.HealthCheckResponse(status=status)

    async def List(
        self, request: health_pb2.HealthListRequest, context: grpc.aio.ServicerContext
    ) -> health_pb2.HealthListResponse:
        statuses = {name: health_pb2.HealthCheckResponse(status=status) for name, status in self._statuses.items()}
        return health_pb2.HealthListResponse(statuses=statuses)

    async def Watch(self, request: health_pb2.HealthCheckRequest, context: grpc.aio.ServicerContext) -> None:
        """Send the status of one service, and every change. A client that reads nothing for `write_limit_s` is cut
        off."""
        if len(request.service) > _MAX_NAME_CHARS:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "the service name is too long")
        if len(self._watchers) >= self._max_watchers:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "too many watchers; use Check")
        changed = asyncio.Event()
        self._watchers[changed] = request.service
        try:
            await self._write_changes(request.service, changed, context)
        except TimeoutError:
            # The client's flow-control window is full, so the call cannot be given a status either.
            raise asyncio.CancelledError from None
        finally:
            del self._watchers[changed]

    async def _write_changes(self, service: str, changed: asyncio.Event, context: grpc.aio.ServicerContext) -> None:
        last_status = None
        while True:
            changed.clear()
            status = self._statuses.get(service, _UNKNOWN)
            if status != last_status:
                async with asyncio.timeout(self._write_limit_s):
                    await context.write(health_pb2.HealthCheckResponse(status=status))
                last_status = status
            await changed.wait()

    def _wake(self, service: str) -> None:
        for changed, watched in self._watchers.items():
            if watched == service:
                changed.set()

"""State that all requests of a gateway share: limits on their number and their bodies, and the router's health.

Every open request may hold a small body. Bytes beyond that come out of one budget shared by all requests. Large bodies
are parsed on one thread, so the event loop is blocked no longer than the parser holds the GIL in a single step.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from prometheus_client import Gauge

import tandem
from gateway.access import Gate
from gateway.metrics import Metrics
from gateway.schema import SMALL_BODY_BYTES
from gateway.settings import GatewaySettings
from mesh.domain.host import is_loopback

if TYPE_CHECKING:
    from gateway.batches.runner import Batches
    from gateway.handler.process import HandlerProcess

_HEALTH_TIMEOUT_S = 1.0
_HEALTH_FRESH_S = 0.5

T = TypeVar("T")


class RequestSlots:
    """Bounds the requests that are answered at a time. A request over the limit is refused at once, not queued."""

    def __init__(self, max_slots: int, gauge: Gauge) -> None:
        self._max_slots = max_slots
        self._num_taken = 0
        gauge.set_function(lambda: self._num_taken)

    def require_slot(self) -> None:
        """Raise Overloaded if no slot is free. Takes none."""
        if self._num_taken >= self._max_slots:
            raise tandem.Overloaded("too many requests are open; try again later", retry_after_s=1.0)

    @contextmanager
    def slot(self) -> Iterator[None]:
        """Hold a slot while the block runs. Raises Overloaded."""
        self.require_slot()
        self._num_taken += 1
        try:
            yield
        finally:
            self._num_taken -= 1


class BodyBudget:
    """Bounds the bytes that the bodies of all open requests hold beyond `SMALL_BODY_BYTES` each."""

    def __init__(self, max_bytes: int) -> None:
        self.num_bytes = 0
        self._max_bytes = max_bytes

    @contextmanager
    def share(self) -> Iterator[Callable[[int], None]]:
        """One request's share, returned at the end of the block. Yields `grow`: call it with the bytes that the body
        has so far. It raises Overloaded, and takes none, if too few are left.
        """
        num_held = 0

        def grow(num_bytes: int) -> None:
            nonlocal num_held
            num_more = max(0, num_bytes - SMALL_BODY_BYTES) - num_held
            if num_more > 0 and self.num_bytes + num_more > self._max_bytes:
                raise tandem.Overloaded("too many large bodies are being read; try again later", retry_after_s=1.0)
            self.num_bytes += num_more
            num_held += num_more

        try:
            yield grow
        finally:
            self.num_bytes -= num_held


class BodyParser:
    """Runs parsers: inline for small bodies, on a single thread for large ones."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "bodies")

    async def run(self, num_bytes: int, function: Callable[[], T]) -> T:
        """Return `function()`. Its cost is that of parsing `num_bytes`."""
        if num_bytes <= SMALL_BODY_BYTES:
            return function()
        return await asyncio.get_running_loop().run_in_executor(self._thread, function)


class RouterHealth:
    """The router's health, cached for health checks, which need no key and expect an answer within a second.

    Concurrent callers share one query.
    """

    def __init__(self, client: tandem.AsyncClient) -> None:
        self._client = client
        self._query: asyncio.Task[bool] | None = None
        self._is_ready = False
        self._fresh_until_s = 0.0

    async def is_ready(self) -> bool:
        """True if the router and at least one complete path of workers serve. Answers within a second."""
        if time.monotonic() < self._fresh_until_s:
            return self._is_ready
        if self._query is None or self._query.done():
            self._query = asyncio.create_task(self._query_router())
        return await asyncio.shield(self._query)

    async def _query_router(self) -> bool:
        try:
            await self._client.wait_ready(timeout=_HEALTH_TIMEOUT_S)
            self._is_ready = True
        except tandem.TandemError:
            self._is_ready = False
        self._fresh_until_s = time.monotonic() + _HEALTH_FRESH_S
        return self._is_ready


@dataclass(frozen=True)
class Backend:
    """The state that all requests of a gateway share. `client` has no API key: each request acts with its caller's."""

    settings: GatewaySettings
    client: tandem.AsyncClient
    gate: Gate
    router_health: RouterHealth
    metrics: Metrics
    slots: RequestSlots
    bodies: BodyBudget
    parser: BodyParser
    allowed_origins: frozenset[str]
    handler: "HandlerProcess | None" = None
    batches: "Batches | None" = None

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Run what is beside requests: the handler's process, and batches."""
        async with contextlib.AsyncExitStack() as stack:
            for part in (self.handler, self.batches):
                if part is not None:
                    await stack.enter_async_context(part.running())
            yield


def build_backend(settings: GatewaySettings, client: tandem.AsyncClient) -> Backend:
    """Construct the shared state from the settings. `client` stays the caller's to close."""
    metrics = Metrics()
    return Backend(
        settings=settings,
        client=client,
        gate=Gate(client, allow_anonymous=settings.allow_anonymous or is_loopback(settings.host)),
        router_health=RouterHealth(client),
        metrics=metrics,
        slots=RequestSlots(settings.max_open_requests, metrics.open_requests),
        bodies=BodyBudget(max(settings.max_bodies_bytes, settings.max_body_bytes)),
        parser=BodyParser(),
        allowed_origins=frozenset(settings.allowed_origins),
        handler=_handler(settings),
        batches=_batches(settings),
    )


def _handler(settings: GatewaySettings) -> "HandlerProcess | None":
    if not settings.handler:
        return None
    from gateway.handler.process import HandlerProcess

    return HandlerProcess(settings)


def _batches(settings: GatewaySettings) -> "Batches | None":
    if not settings.batch_folder:
        return None
    from gateway.batches.runner import Batches

    return Batches(settings)

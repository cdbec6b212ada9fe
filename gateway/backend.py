"""State that all requests of a gateway share."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from prometheus_client import Gauge

import tandem
from gateway.access import Gate
from gateway.bodies import BodyBudget, BodyReader
from gateway.metrics import Metrics
from gateway.readiness import Readiness
from gateway.settings import GatewaySettings
from mesh.domain.host import is_loopback

if TYPE_CHECKING:
    from gateway.handler.process import HandlerProcess


class ConcurrencyLimiter:
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


@dataclass(frozen=True)
class Backend:
    """One per process. `client` has no API key: each request acts with its caller's."""

    settings: GatewaySettings
    client: tandem.AsyncClient
    gate: Gate
    readiness: Readiness
    metrics: Metrics
    limiter: ConcurrencyLimiter
    bodies: BodyBudget
    reader: BodyReader
    allowed_origins: frozenset[str]
    handler: "HandlerProcess | None" = None


def build_backend(settings: GatewaySettings, client: tandem.AsyncClient) -> Backend:
    """Construct the shared state from the settings. `client` stays the caller's to close."""
    metrics = Metrics()
    return Backend(
        settings=settings,
        client=client,
        gate=Gate(client, allow_anonymous=settings.allow_anonymous or is_loopback(settings.host)),
        readiness=Readiness(client),
        metrics=metrics,
        limiter=ConcurrencyLimiter(settings.max_open_requests, metrics.open_requests),
        bodies=BodyBudget(max(settings.max_bodies_bytes, settings.max_body_bytes)),
        reader=BodyReader(),
        allowed_origins=frozenset(settings.allowed_origins),
        handler=_handler(settings),
    )


def _handler(settings: GatewaySettings) -> "HandlerProcess | None":
    if not settings.handler:
        return None
    from gateway.handler.process import HandlerProcess

    return HandlerProcess(settings)

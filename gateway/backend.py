"""What all routes share."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from prometheus_client import Gauge

import tandem
from gateway.access import Gate, is_loopback
from gateway.metrics import Metrics
from gateway.readiness import Readiness
from gateway.settings import GatewaySettings

if TYPE_CHECKING:
    from gateway.handler.process import HandlerProcess


class Places:
    """How many requests may be open at a time; more are refused at once, before anything is done for them."""

    def __init__(self, most: int, gauge: Gauge) -> None:
        self._most = most
        self._gauge = gauge
        self._taken = 0

    @contextmanager
    def one(self) -> Iterator[bool]:
        """A place for as long as the block runs; False if there is none."""
        if self._taken >= self._most:
            yield False
            return
        self._taken += 1
        self._gauge.inc()
        try:
            yield True
        finally:
            self._taken -= 1
            self._gauge.dec()


@dataclass(frozen=True)
class Backend:
    """One for each process. `client` has no key of its own: each request brings its caller's."""

    settings: GatewaySettings
    client: tandem.AsyncClient
    gate: Gate
    readiness: Readiness
    metrics: Metrics
    places: Places
    allowed_origins: frozenset[str]
    handler: "HandlerProcess | None" = None


def build_backend(settings: GatewaySettings, client: tandem.AsyncClient) -> Backend:
    """Put the parts together."""
    metrics = Metrics()
    return Backend(
        settings=settings,
        client=client,
        gate=Gate(client, open_to_all=settings.allow_anonymous or is_loopback(settings.host)),
        readiness=Readiness(client),
        metrics=metrics,
        places=Places(settings.max_open_requests, metrics.open_requests),
        allowed_origins=frozenset(settings.allowed_origins),
        handler=_handler(settings),
    )


def _handler(settings: GatewaySettings) -> "HandlerProcess | None":
    if not settings.handler:
        return None
    from gateway.handler.process import HandlerProcess

    return HandlerProcess(settings)

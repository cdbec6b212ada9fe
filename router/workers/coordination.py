"""How a router takes part in the mesh: where workers register, and with whom it shares permits.

Without `registry_url` this router is alone: workers register with it, and its permits are its own. With `registry_url`
workers and permits are in Redis, and any number of routers serve side by side.
"""

import asyncio
from typing import Protocol

from mesh.domain.errors import ConfigurationError
from mesh.rpc.server import Listen, Server
from mesh.v1 import worker_pb2_grpc
from router.admission.limiter import ConcurrencyLimiter, LocalLimiter
from router.settings import RouterSettings
from router.workers.channels import Caller
from router.workers.membership import Membership
from router.workers.registry_servicer import RegistryServicer, expire_forever


class Coordination(Protocol):
    """Feeds the Membership from `start` on. Call `stop` after the last stream has ended."""

    @property
    def address(self) -> str:
        """Where workers register; "" if they do not register with this router."""
        ...

    def limiter_for(self, model: str) -> ConcurrencyLimiter:
        """Return the model's concurrency limiter. Called once per model, before `start`."""
        ...

    async def start(self) -> None:
        """Start to follow the workers."""
        ...

    async def stop(self) -> None:
        """Release leases and connections. Does not raise if Redis or a worker is unreachable."""
        ...


class HostedRegistry:
    """A Coordination: this router hosts the registry. The port is bound at once."""

    def __init__(self, settings: RouterSettings, membership: Membership, caller: Caller) -> None:
        self._membership = membership
        key, tls = caller.credentials.key, caller.credentials.tls
        self._server = Server(Listen(settings.registry_host, settings.registry_port, key, tls=tls))
        self._expiry: asyncio.Task[None] | None = None
        self._cap = settings.max_concurrent_requests

    @property
    def address(self) -> str:
        return self._server.address

    def limiter_for(self, model: str) -> ConcurrencyLimiter:
        return LocalLimiter(self._cap)

    async def start(self) -> None:
        worker_pb2_grpc.add_RegistryServicer_to_server(RegistryServicer(self._membership), self._server.grpc)
        await self._server.start(["mesh.v1.Registry"])
        await self._server.set_serving(True)
        self._expiry = asyncio.create_task(expire_forever(self._membership))

    async def stop(self) -> None:
        if self._expiry is not None:
            self._expiry.cancel()
        await self._server.stop(0)


def coordinate(settings: RouterSettings, membership: Membership, caller: Caller) -> Coordination:
    """Return the Coordination that the settings select. Raises ConfigurationError."""
    if not settings.registry_url:
        return HostedRegistry(settings, membership, caller)
    try:
        from router.workers.redis_registry import SharedRegistry
    except ImportError as error:
        raise ConfigurationError("registry_url needs redis: install tandem-serve[redis]") from error
    return SharedRegistry(settings, membership, caller)

"""What ties a router to the rest of the mesh: where it learns of workers, and whom it shares permits with.

Without `registry_url` this router is alone: workers register with it, and its permits are its own. With it, both are in
Redis, and any number of routers serve side by side.
"""

import asyncio
from typing import Protocol

from mesh.domain.errors import ConfigurationError
from mesh.registry.membership import Membership
from mesh.registry.servicer import RegistryServicer, expire_forever
from mesh.rpc.server import Listen, Server
from router.admission import Admission, Permits
from router.channels import Caller
from router.settings import RouterSettings
from tandem.v1 import worker_pb2_grpc


class Coordination(Protocol):
    """One router's ties. `start` feeds the Membership, `stop` comes after the last stream has ended."""

    @property
    def address(self) -> str:
        """Where workers register; "" if not with this router."""
        ...

    def permits_of(self, model: str) -> Admission:
        """Who may be in service with this model. Called once for each, before `start`."""
        ...

    async def start(self) -> None:
        """Begin to follow the workers."""
        ...

    async def stop(self) -> None:
        """Let go of everything. Never raises because somebody cannot be reached."""
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
        """Where workers register."""
        return self._server.address

    def permits_of(self, model: str) -> Admission:
        """Of this router alone."""
        return Permits(self._cap)

    async def start(self) -> None:
        """Take workers' streams."""
        worker_pb2_grpc.add_RegistryServicer_to_server(RegistryServicer(self._membership), self._server.grpc)
        await self._server.start(["tandem.v1.Registry"])
        await self._server.set_serving(True)
        self._expiry = asyncio.create_task(expire_forever(self._membership))

    async def stop(self) -> None:
        """Break them off."""
        if self._expiry is not None:
            self._expiry.cancel()
        await self._server.stop(0)


def coordinate(settings: RouterSettings, membership: Membership, caller: Caller) -> Coordination:
    """What the settings ask for. Raises ConfigurationError."""
    if not settings.registry_url:
        return HostedRegistry(settings, membership, caller)
    try:
        from router.shared_coordination import SharedRegistry
    except ImportError as error:
        raise ConfigurationError("registry_url needs redis: install tandem-serve[redis]") from error
    return SharedRegistry(settings, membership, caller)

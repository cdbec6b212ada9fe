"""`python -m router`: the composition root, and the order in which things start and stop."""

import asyncio
import sys
import time

from mesh.domain.request import mint_id
from mesh.domain.worker import WorkerInfo
from mesh.metrics import serving_metrics
from mesh.process import ServiceProgram, announce, until_stopped
from mesh.registry.membership import Membership
from mesh.rpc.server import Listen, Server
from router.api_keys import NoKeys
from router.channels import Caller, Channels
from router.coordination import coordinate
from router.decode_links import DecodeLinks
from router.journal import Journal
from router.mesh_servicer import MeshServicer, MeshSources
from router.metrics import RouterMetrics
from router.model_router import ModelRouter, SharedParts
from router.prefill_call import PrefillClient
from router.readiness import SERVICES, Expected, Readiness
from router.served_models import ServedModels, require_fits_one
from router.servicer import GenerationServicer
from router.settings import RouterSettings
from tandem.v1 import generation_pb2_grpc, worker_pb2_grpc

# For the last statuses to leave once all streams have ended.
_FLUSH_S = 1.0


class RouterProcess:
    """All parts of one router, wired together. `await start()`, then `await stop()`.

    Raises ConfigurationError for a wrong model folder, limit or port. Models that are not on this machine are fetched.
    """

    def __init__(self, settings: RouterSettings) -> None:
        self.membership = Membership(time.monotonic, self._require_fits)
        keys, tls, anonymous = settings.load_api_keys(), settings.load_public_tls(), settings.allow_anonymous
        listen = Listen(settings.host, settings.port, keys, public=True, allow_anonymous=anonymous, tls=tls)
        self.public = Server(listen)
        self._callers = keys or NoKeys()
        caller = Caller(mint_id(), settings.load_credentials())
        self.internal = coordinate(settings, self.membership, caller)
        self.metrics = RouterMetrics()
        self.journal = Journal(time.monotonic, [self.metrics])
        self._channels = Channels(self.membership, caller.credentials.tls)
        self._links = DecodeLinks(self.membership, self._channels, caller, self._mesh_changed)
        prefills = PrefillClient(self.membership, self._channels, caller, timeout_s=settings.prefill_timeout_s)
        shared = SharedParts(
            self.membership, self._links, prefills, self.journal, self._mesh_changed, self.metrics.gaps.add
        )
        self.models = [
            ModelRouter(each.located(_downloading), self.internal.permits_of(each.served_name), shared)
            for each in settings.each_model()
        ]
        self._services = ServedModels([each.service for each in self.models], self.journal)
        expected = Expected(settings.expect_prefill, settings.expect_decode)
        meshes = [each.mesh for each in self.models]
        self._readiness = Readiness(self.public, meshes, expected, on_ready=lambda: announce("ready"))
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Serve both ports and follow the mesh."""
        self.membership.on_change(self._mesh_changed)
        self.metrics.watch(self.models)
        generation_pb2_grpc.add_GenerationServicer_to_server(
            GenerationServicer(self._services, self._callers), self.public.grpc
        )
        sources = MeshSources(self.models, self.journal, time.monotonic)
        worker_pb2_grpc.add_MeshServicer_to_server(MeshServicer(sources, self._callers), self.public.grpc)
        await self.internal.start()
        await self.public.start(SERVICES)
        runs = (self._readiness.run(), *(each.run() for each in self.models))
        self._tasks = [asyncio.create_task(run) for run in runs]

    async def stop(self, grace_s: float) -> None:
        """NOT_SERVING, refuse new requests, let running ones end, then close everything."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._readiness.end()
        await self._services.drain(grace_s)
        await self.public.stop(_FLUSH_S)
        for each in self.models:
            each.close()
        await self._links.close()
        await self._channels.close()
        await self.internal.stop()

    def _require_fits(self, info: WorkerInfo) -> None:
        require_fits_one([each.model for each in self.models], info)

    def _mesh_changed(self) -> None:
        """A worker has joined, left, reported, been proven or tripped; or a link has come up or broken."""
        self.journal.follow(self.membership.workers())
        self._channels.reconcile()
        self._links.reconcile()
        for each in self.models:
            each.mesh_changed()
        self._readiness.wake()


def _downloading(fraction: float) -> None:
    announce("downloading", fraction=fraction)


async def serve(settings: RouterSettings) -> None:
    """Run until told to stop."""
    router = RouterProcess(settings)
    async with serving_metrics(router.metrics.registry, settings):
        await router.start()
        announce("listening", address=router.public.address, registry_address=router.internal.address)
        await until_stopped(settings)
        await router.stop(settings.grace_s)


if __name__ == "__main__":
    sys.exit(ServiceProgram("router", RouterSettings, serve).main())

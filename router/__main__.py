"""`python -m router`: the composition root, and the order in which things start and stop."""

import asyncio
import sys
import time
from pathlib import Path

from mesh.domain.request import mint_id
from mesh.metrics import serving_metrics
from mesh.process import ServiceProgram, announce, until_stopped
from mesh.registry.membership import Membership
from mesh.rpc.server import Listen, Server
from router.api_keys import NoKeys
from router.canary import CanaryRunner
from router.channels import Caller, Channels
from router.coordination import coordinate
from router.decode_links import DecodeLinks
from router.dispatch import Dispatcher, Paths
from router.forecast import Forecast
from router.grammars import Grammars
from router.journal import Journal
from router.ledger import Ledger
from router.limits import LimitPolicy
from router.mesh_servicer import MeshServicer, MeshSources
from router.mesh_view import MeshView, Sources
from router.metrics import Gauged, RouterMetrics
from router.prefill_call import PrefillClient
from router.prompts import PromptEncoder
from router.prover import Prover
from router.proving import Proving
from router.queue import Outlook, PlacementQueue
from router.readiness import SERVICES, Expected, Readiness
from router.served_model import ServedModel
from router.service import GenerationService, ServiceParts
from router.servicer import GenerationServicer
from router.settings import RouterSettings
from tandem.v1 import generation_pb2_grpc, worker_pb2_grpc

# For the last statuses to leave once all streams have ended.
_FLUSH_S = 1.0


class RouterProcess:
    """All parts of one router, wired together. `await start()`, then `await stop()`.

    Raises ConfigurationError for a wrong model folder, limit or port.
    """

    def __init__(self, settings: RouterSettings) -> None:
        model = ServedModel.load(settings.served_name, Path(settings.model))
        limits = LimitPolicy(settings, model.facts)
        self.membership = Membership(time.monotonic, model.require_fits)
        keys, tls, anonymous = settings.load_api_keys(), settings.load_public_tls(), settings.allow_anonymous
        listen = Listen(settings.host, settings.port, keys, public=True, allow_anonymous=anonymous, tls=tls)
        self.public = Server(listen)
        self._callers = keys or NoKeys()
        caller = Caller(mint_id(), settings.load_credentials())
        self.internal = coordinate(settings, self.membership, caller)
        self.permits = self.internal.permits
        self.ledger = Ledger(time.monotonic)
        self.metrics = RouterMetrics()
        self.journal = Journal(time.monotonic, [self.metrics])
        self._channels = Channels(self.membership, caller.credentials.tls)
        self._links = DecodeLinks(self.membership, self._channels, caller, self._mesh_changed)
        self.proving = Proving(time.monotonic, trip_after=settings.trip_after)
        self._mesh = MeshView(
            model,
            Sources(self.membership, self._links, self.ledger, self.proving),
            prefill_threshold=settings.prefill_threshold,
        )
        forecast = Forecast(time.monotonic)
        self.queue = self._make_queue(settings, forecast)
        prefills = PrefillClient(self.membership, self._channels, caller, timeout_s=settings.prefill_timeout_s)
        paths = Paths(self.queue, self._links, prefills, self.proving, self.journal)
        canaries = CanaryRunner(model, paths, timeout_s=settings.canary_timeout_s)
        self._prover = Prover(self.proving, self._mesh, canaries.run, self._mesh_changed)
        self._encoders = PromptEncoder(model), PromptEncoder(model, num_threads=1)
        self._grammars = Grammars(Path(settings.model), disabled=settings.disable_grammar_support)
        self._service = GenerationService(
            ServiceParts(
                model=model,
                encoder=self._encoders[0],
                tokenize_encoder=self._encoders[1],
                grammars=self._grammars,
                limits=limits,
                permits=self.permits,
                forecast=forecast,
                mesh=self._mesh,
                dispatcher=Dispatcher(model, settings, paths, self._mesh_changed),
                journal=self.journal,
                slow_reader_s=settings.slow_reader_s,
                ttft_target_s=settings.ttft_target_s,
                on_gap=self.metrics.gaps.add,
            )
        )
        self._readiness = _readiness(self.public, self._mesh, settings)
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Serve both ports and follow the mesh."""
        self.membership.on_change(self._mesh_changed)
        self.ledger.on_change(self.queue.wake)
        self.metrics.watch(Gauged(self.permits, self.queue, self.ledger, self._mesh))
        generation_pb2_grpc.add_GenerationServicer_to_server(
            GenerationServicer(self._service, self._callers), self.public.grpc
        )
        sources = MeshSources(self._mesh, self.ledger, self.queue, self.permits, self.journal, time.monotonic)
        worker_pb2_grpc.add_MeshServicer_to_server(MeshServicer(sources, self._callers), self.public.grpc)
        await self.internal.start()
        await self.public.start(SERVICES)
        self._tasks = [asyncio.create_task(self._readiness.run()), asyncio.create_task(self._prover.run())]

    async def stop(self, grace_s: float) -> None:
        """NOT_SERVING, refuse new requests, let running ones end, then close everything."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for service in ("", *SERVICES):
            await self.public.set_serving(False, service)
        await self._service.drain(grace_s)
        await self.public.stop(_FLUSH_S)
        self.queue.close()
        await self._links.close()
        await self._channels.close()
        await self.internal.stop()
        for encoder in self._encoders:
            encoder.close()
        self._grammars.close()

    def _make_queue(self, settings: RouterSettings, forecast: Forecast) -> PlacementQueue:
        return PlacementQueue(
            self.ledger,
            Outlook(self._mesh.snapshot, forecast),
            max_queued=settings.max_queued_requests,
            no_worker_timeout_s=settings.no_worker_timeout_s,
        )

    def _mesh_changed(self) -> None:
        """A worker has joined, left, reported, been proven or tripped; or a link has come up or broken."""
        self.journal.follow(self._mesh.views())
        self.ledger.follow(self._mesh.views())
        self._channels.reconcile()
        self._links.reconcile()
        self._prover.wake()
        for stalled in self._mesh.to_be_left():
            self.ledger.abandon(stalled)
        self.queue.wake()
        self._readiness.wake()


def _readiness(server: Server, mesh: MeshView, settings: RouterSettings) -> Readiness:
    expected = Expected(settings.expect_prefill, settings.expect_decode)
    return Readiness(server, mesh, expected, on_ready=lambda: announce("ready"))


async def serve(settings: RouterSettings) -> None:
    """Run until told to stop."""
    router = RouterProcess(settings.located(lambda fraction: announce("downloading", fraction=fraction)))
    async with serving_metrics(router.metrics.registry, settings):
        await router.start()
        announce("listening", address=router.public.address, registry_address=router.internal.address)
        await until_stopped(settings)
        await router.stop(settings.grace_s)


if __name__ == "__main__":
    sys.exit(ServiceProgram("router", RouterSettings, serve).main())

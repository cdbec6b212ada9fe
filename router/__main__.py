"""`python -m router`: constructs the parts of a router and starts and stops them in order."""

import asyncio
import sys
import time
from collections.abc import Coroutine, Iterator
from functools import partial
from typing import Any

import structlog

from mesh.domain.errors import LayoutMismatch
from mesh.domain.request import mint_id
from mesh.domain.worker import WorkerInfo
from mesh.metrics import serving_metrics, watching_loop
from mesh.process import ServiceProgram, run_for_life, tell_parent, until_stopped
from mesh.public_tls import warn_of_open_keys
from mesh.rpc.server import Listen, Server
from mesh.tasks import cancel_all
from router.api.generation_servicer import GenerationServicer
from router.api.operators import MeshServicer
from router.garbage import collecting_rarely
from router.history import History, Reading, take_reading
from router.journal import Journal
from router.metrics import RouterMetrics
from router.model_router import ModelRouter
from router.readiness import SERVICES, Readiness
from router.role_switching import RoleSwitcher, SwitchLimits
from router.service_directory import ServiceDirectory
from router.settings import RouterSettings
from router.tenants import NoKeys
from router.traffic import Traffic, parse_traffic
from router.workers.connections import Channels, RouterIdentity, WorkerControl
from router.workers.coordination import coordinate
from router.workers.decode_link import DecodeLinks
from router.workers.membership import Membership, WorkerView
from router.workers.prefill_client import PrefillClient
from tandem.v1 import generation_pb2_grpc, mesh_pb2_grpc

log = structlog.get_logger(__name__)

# After all streams have ended, time to send their last statuses.
_FLUSH_S = 1.0
# How long a thread that processes text may hold the interpreter lock while the event loop waits for it.
_SWITCH_S = 0.001
# After following a change of the mesh, the router does other things for this many times as long.
_REST = 9
_MAX_REST_S = 0.2


class RouterProcess:
    """One router with all its models. `await start()`, then `await stop()`.

    Raises ConfigurationError for a broken model folder, limit or port. Models that are not on this machine are
    downloaded.
    """

    def __init__(self, settings: RouterSettings) -> None:
        self._settings = settings
        self.membership = Membership(time.monotonic, self._require_served)

        keys, is_open, self._tls = settings.load_api_keys(), settings.allow_anonymous, settings.load_public_tls()
        listen = Listen(settings.host, settings.port, keys, public=True, public_tls=self._tls, allow_anonymous=is_open)
        self.public = Server(listen)
        self._callers = keys or NoKeys()

        # Coordination shares what traffic has, and makes the limiters of the models' routers.
        identity = RouterIdentity(mint_id(), settings.load_credentials())
        names = [model_settings.served_name for model_settings in settings.each_model()]
        self.traffic = Traffic(parse_traffic(settings.traffic), names, self._has_workers)
        self.coordination = coordinate(settings, self.membership, identity, self.traffic)

        self.metrics = RouterMetrics()
        self.history = History()
        self.journal = Journal(time.monotonic, [self.metrics, self.history])

        self._channels = Channels(self.membership, identity.credentials.tls)
        self._control = WorkerControl(self.membership, self._channels, identity, self._serving_beside)
        self._links = DecodeLinks(self.membership, self._channels, identity, self._mesh_changed)
        prefill_client = PrefillClient(self.membership, self._channels, identity, timeout_s=settings.prefill_timeout_s)
        self.model_routers = [
            ModelRouter(
                model_settings.located(_downloading),
                self.coordination.limiter_for(model_settings.served_name),
                membership=self.membership,
                links=self._links,
                prefill_client=prefill_client,
                journal=self.journal,
                on_change=self._mesh_changed,
                on_gap=self.metrics.gaps.add,
                router_id=identity.router_id if settings.registry_url else "",
            )
            for model_settings in settings.each_model()
        ]

        self._directory = ServiceDirectory([each.service for each in self.model_routers], self.journal, self.traffic)
        self._readiness = Readiness(
            self.public,
            [model_router.mesh for model_router in self.model_routers],
            expect_prefill=settings.expect_prefill,
            expect_decode=settings.expect_decode,
            on_ready=lambda: tell_parent("ready"),
        )
        self._tasks: list[asyncio.Task[None]] = []
        self._model_runs: list[asyncio.Task[None]] = []
        self._has_changed = asyncio.Event()
        self._following: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Serve the public and the internal port, and follow the mesh."""
        self.membership.on_change(self._worker_changed)
        self.metrics.watch(self.model_routers, self.traffic)
        generation_pb2_grpc.add_GenerationServicer_to_server(
            GenerationServicer(self._directory, self._callers), self.public.grpc
        )
        mesh_servicer = MeshServicer(
            self.model_routers,
            self._callers,
            journal=self.journal,
            history=self.history,
            control=self._control,
            traffic=self.traffic,
            tell_traffic=self.coordination.tell_traffic,
            clock=time.monotonic,
        )
        mesh_pb2_grpc.add_MeshServicer_to_server(mesh_servicer, self.public.grpc)
        await asyncio.gather(*(model_router.start() for model_router in self.model_routers))
        self._following = run_for_life(self._follow_mesh())
        await self.coordination.start()
        await self.public.start(SERVICES)
        runs = [self._readiness.run(), self.history.run(self.reading), *self._role_switching()]
        runs += [] if self._tls is None else [self._tls.follow()]
        self._tasks = [run_for_life(run) for run in runs]
        self._model_runs = [run_for_life(model_router.run()) for model_router in self.model_routers]

    async def stop(self, grace_s: float) -> None:
        """Report NOT_SERVING, refuse new requests, let running ones end within the grace, then close everything."""
        await cancel_all(self._tasks)
        self._readiness.end()
        await self._directory.drain(grace_s)
        await cancel_all(self._model_runs)  # not before: a stream that loses its worker goes on at one that just joined
        await self.public.stop(_FLUSH_S)
        for model_router in self.model_routers:
            model_router.close()
        if self._following is not None:
            self._following.cancel()
        await self._links.close()
        await self._channels.close()
        await self.coordination.stop()

    def _role_switching(self) -> Iterator[Coroutine[Any, Any, None]]:
        """The tasks of the rule for each model; none without `switch_roles`."""
        settings = self._settings
        limits = SwitchLimits(settings.switch_after_s, settings.switch_pause_s)
        for router in self.model_routers if settings.switch_roles else ():
            may_act = partial(self.coordination.may_act, f"switch-roles@{router.model.name}")
            switch = self._control.switch_role
            yield RoleSwitcher(router.mesh, router.adviser, limits, may_act=may_act, switch=switch).run()

    def _serving_beside(self, info: WorkerInfo) -> frozenset[str]:
        """Incarnations of the workers of this role and model that get requests."""
        mesh = next(router.mesh for router in self.model_routers if router.model.name == info.model)
        return mesh.serving(info.role)

    def _has_workers(self, model: str) -> bool:
        return any(router.mesh.has_path for router in self.model_routers if router.model.name == model)

    def _require_served(self, info: WorkerInfo) -> None:
        """Raise LayoutMismatch, with both values, for a worker of another model or another tokenizer."""
        models = {router.model.name: router.model for router in self.model_routers}
        if info.model not in models:
            names = " and ".join(map(repr, models))
            raise LayoutMismatch(f"the router serves model {names}, worker {info.worker_id} {info.model!r}")
        models[info.model].require_fits(info)

    def reading(self) -> Reading:
        """The counters of this moment, for the history."""
        return take_reading(time.monotonic(), self.model_routers, self.journal, self.metrics.gaps)

    def _worker_changed(self, view: WorkerView) -> None:
        """The worker has joined, left or changed its state."""
        self.journal.note_worker(view)  # at once: it misses no state, however short
        self._mesh_changed()

    def _mesh_changed(self) -> None:
        """Discard what placement knows of workers, and follow the mesh soon. A worker has joined, left, changed its
        state, been proven or tripped; or a link has come up or broken."""
        for model_router in self.model_routers:
            model_router.mesh.discard_snapshot()  # at once: no request may be placed by what was
        self._has_changed.set()

    async def _follow_mesh(self) -> None:
        """After a change look at all workers, until cancelled. When hundreds join, the changes of many are followed
        together: a look takes the longer the more workers there are, and followed one by one they cost their square.
        """
        while True:
            await self._has_changed.wait()
            self._has_changed.clear()
            begun_s = time.thread_time()
            self.journal.keep(self.membership.views())
            self._channels.reconcile()
            self._links.reconcile()
            for model_router in self.model_routers:
                model_router.follow_mesh()
            self._readiness.wake()
            await asyncio.sleep(0)  # canaries and readiness look at all workers, too
            await asyncio.sleep(min(_MAX_REST_S, _REST * (time.thread_time() - begun_s)))


def _downloading(fraction: float) -> None:
    tell_parent("downloading", fraction=fraction)


def _warn_of_open_keys(settings: RouterSettings) -> None:
    if settings.api_keys_file:
        warn_of_open_keys(settings.host, settings)


async def serve(settings: RouterSettings) -> None:
    """Run until a signal stops the router."""
    sys.setswitchinterval(_SWITCH_S)
    router = RouterProcess(settings)
    _warn_of_open_keys(settings)
    async with (
        serving_metrics(router.metrics.registry, settings),
        watching_loop(router.metrics.registry),
        collecting_rarely(),
    ):
        await router.start()
        tell_parent("listening", address=router.public.address, registry_address=router.coordination.address)
        await until_stopped(settings, settings.watch_certificates)
        await router.stop(settings.grace_s)


if __name__ == "__main__":
    sys.exit(ServiceProgram("router", RouterSettings, serve).main())

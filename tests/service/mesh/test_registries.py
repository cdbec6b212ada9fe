"""What holds for every registry, in-process or in Redis: the same tests over both."""

import asyncio
import time
from collections.abc import AsyncIterator, Coroutine
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Any

import pytest
from structlog.testing import capture_logs

from mesh.domain.errors import LayoutMismatch, Unauthenticated
from mesh.domain.worker import CacheEvent, WorkerRole, WorkerState
from mesh.rpc.credentials import Credentials, MeshKey
from mesh.rpc.server import Server
from router.workers import redis_registry
from router.workers.membership import Membership
from router.workers.redis_registry import RedisRegistry
from tests.fakes.redis_server import running_redis
from tests.fakes.router_views import no_traffic
from tests.service.mesh.test_registry import KEY, MEMBER, FakeEngine, Watch, start_registry
from tests.unit.router.test_membership import INFO
from tests.waiting import until
from worker.redis_registration import RedisRegistration
from worker.registration import Registration


class InProcess:
    """A router with its own registry."""

    def __init__(self) -> None:
        self._server: Server | None = None
        self._port = 0

    async def start(self, membership: Membership) -> None:
        self._server = await start_registry(membership, self._port)
        self._port = self._server.port

    async def stop(self) -> None:
        assert self._server is not None
        await self._server.stop(0)

    def register(self, registration: Registration, key: MeshKey) -> Coroutine[Any, Any, None]:
        return registration.run(f"127.0.0.1:{self._port}")


class InRedis:
    """A router that follows Redis."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._task: asyncio.Task[None] | None = None

    async def start(self, membership: Membership) -> None:
        registry = RedisRegistry(self._url, membership, MEMBER, no_traffic())
        self._task = asyncio.create_task(registry.run())
        async with asyncio.timeout(60):
            await registry.connected.wait()

    async def stop(self) -> None:
        assert self._task is not None
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    def register(self, registration: Registration, key: MeshKey) -> Coroutine[Any, Any, None]:
        return RedisRegistration(self._url, key, registration).run()


class Rig:
    """A registry, a membership it feeds, and workers."""

    def __init__(self, registry: InProcess | InRedis) -> None:
        self.registry = registry
        self.membership = Membership(time.monotonic)
        self.watch = Watch(self.membership)
        self._tasks: list[asyncio.Task[None]] = []

    def register(self, registration: Registration, key: MeshKey = KEY) -> asyncio.Task[None]:
        self._tasks.append(asyncio.create_task(self.registry.register(registration, key)))
        return self._tasks[-1]

    async def leave(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


@pytest.fixture(params=["in-process", "redis"])
async def rig(request: pytest.FixtureRequest) -> AsyncIterator[Rig]:
    async with AsyncExitStack() as stack:
        if request.param == "redis":
            rig = Rig(InRedis((await stack.enter_async_context(running_redis())).url))
        else:
            rig = Rig(InProcess())
        await rig.registry.start(rig.membership)
        yield rig
        await rig.leave()
        await rig.registry.stop()


async def test_worker_registers_beats_drains_and_leaves(rig: Rig) -> None:
    engine = FakeEngine()
    registration = Registration(INFO, engine, MEMBER)
    running = rig.register(registration)
    await rig.watch.until(lambda view: view.load.num_running == 3 and view.cached == {b"a"})
    assert rig.membership.views()[0].info == INFO
    engine.stuck.clear()  # a long step
    seen = rig.membership.views()[0].last_seen_s
    await rig.watch.until(lambda view: view.last_seen_s > seen + 0.3)
    engine.stuck.set()
    registration.state = WorkerState.DRAINING
    registration.heartbeat_now()
    await rig.watch.until(lambda view: view.state is WorkerState.DRAINING)
    running.cancel()
    await rig.watch.until(lambda view: view.state is WorkerState.LOST)


@pytest.mark.parametrize("farewell", [WorkerState.STOPPED, WorkerState.SWITCHING])
async def test_a_worker_that_says_farewell_is_not_lost(rig: Rig, farewell: WorkerState) -> None:
    states: list[WorkerState] = []
    rig.membership.on_change(lambda _: states.extend(view.state for view in rig.membership.views()))
    registration = Registration(INFO, FakeEngine(), MEMBER)
    running = rig.register(registration)
    await rig.watch.until(lambda view: view.load.num_running == 3)
    registration.state = farewell
    registration.heartbeat_now()
    async with asyncio.timeout(60):
        await running
    await rig.watch.until(lambda view: view.state is farewell)
    rig.register(Registration(replace(INFO, incarnation="two", role=WorkerRole.PREFILL), FakeEngine(), MEMBER))
    await rig.watch.until(lambda view: view.info.incarnation == "two" and view.load.num_running == 3)
    assert set(states) == {WorkerState.READY, farewell}


async def test_cache_events_are_followed_and_a_late_router_gets_a_snapshot(rig: Rig) -> None:
    engine = FakeEngine()
    registration = Registration(INFO, engine, MEMBER)
    rig.register(registration)
    await rig.watch.until(lambda view: view.cached == {b"a"})
    engine.events = [CacheEvent(b"b", False), CacheEvent(b"a", True)]
    registration.heartbeat_now()
    await rig.watch.until(lambda view: view.cached == {b"b"})
    await rig.registry.stop()
    rig.membership = Membership(time.monotonic)
    rig.watch = Watch(rig.membership)
    await rig.registry.start(rig.membership)
    await rig.watch.until(lambda view: view.load.num_running == 3 and b"s" in view.cached)


async def test_a_worker_that_was_called_lost_comes_back_with_its_cache(rig: Rig) -> None:
    rig.register(Registration(INFO, FakeEngine(), MEMBER))
    await rig.watch.until(lambda view: view.cached == {b"a"})
    rig.membership.lose(INFO)
    assert rig.membership.views()[0].state is WorkerState.LOST
    await rig.watch.until(lambda view: view.state is WorkerState.READY and b"s" in view.cached)


async def test_a_restarted_worker_replaces_its_former_self(rig: Rig) -> None:
    first = rig.register(Registration(INFO, FakeEngine(), MEMBER))
    await rig.watch.until(lambda view: view.load.num_running == 3)
    first.cancel()
    rig.register(Registration(replace(INFO, incarnation="two", address="h:2"), FakeEngine(), MEMBER))
    await rig.watch.until(lambda view: view.info.incarnation == "two" and view.state is WorkerState.READY)
    assert [view.info.address for view in rig.membership.views()] == ["h:2"]


async def test_two_workers_with_one_id_are_reported_once(rig: Rig) -> None:
    with capture_logs() as logs:
        rig.register(Registration(INFO, FakeEngine(), MEMBER))
        await rig.watch.until(lambda view: view.load.num_running == 3)
        rig.register(Registration(replace(INFO, incarnation="two", address="h:2", pid=7), FakeEngine(), MEMBER))
        await until(lambda: twins_in(logs))
        later = rig.membership.views()[0].last_seen_s + 1.2  # two beats of everybody
        await rig.watch.until(lambda view: view.last_seen_s > later)
    assert [(line["log_level"], line["in_use"], line["ignored"]) for line in twins_in(logs)] == [
        ("error", "h:2, pid 7", "h:1, pid 0")
    ]
    assert [view.info.incarnation for view in rig.membership.views()] == ["two"]


@pytest.mark.parametrize("is_draining", [True, False])
async def test_a_restart_is_not_reported_as_a_second_worker(rig: Rig, is_draining: bool) -> None:
    with capture_logs() as logs:
        registration = Registration(INFO, FakeEngine(), MEMBER)
        first = rig.register(registration)
        await rig.watch.until(lambda view: view.load.num_running == 3)
        if is_draining:
            registration.state = WorkerState.DRAINING
        else:
            first.cancel()
        rig.register(Registration(replace(INFO, incarnation="two"), FakeEngine(), MEMBER))
        await rig.watch.until(lambda view: view.info.incarnation == "two" and view.state is WorkerState.READY)
        later = rig.membership.views()[0].last_seen_s + 2.2
        await rig.watch.until(lambda view: view.last_seen_s > later)
    assert twins_in(logs) == []


def twins_in(logs: list[Any]) -> list[Any]:
    return [line for line in logs if line["event"].startswith("two workers have one id")]


async def test_a_worker_that_does_not_fit_or_has_another_key_never_appears(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    # On a busy machine the first worker may be silent for seconds. If it were lost, another one need not fit it.
    monkeypatch.setattr(redis_registry, "SILENT_S", 3600.0)
    rig.register(Registration(INFO, FakeEngine(), MEMBER))
    await rig.watch.until(lambda view: view.load.num_running == 3)
    misfit = replace(INFO, worker_id="misfit", layout=replace(INFO.layout, num_layers=9))
    other_key = MeshKey("another-key-entirely")
    refused = [
        rig.register(Registration(misfit, FakeEngine(), MEMBER)),
        rig.register(Registration(replace(INFO, worker_id="forged"), FakeEngine(), Credentials(other_key)), other_key),
    ]
    later = rig.membership.views()[0].last_seen_s + 1.2  # two beats of everybody
    await rig.watch.until(lambda view: view.last_seen_s > later)
    assert [view.info.worker_id for view in rig.membership.views()] == [INFO.worker_id]
    for task, final in zip(refused, (LayoutMismatch, Unauthenticated), strict=True):
        assert not task.done() or isinstance(task.exception(), final)


def test_a_refusal_is_logged_once_and_old_ones_are_forgotten() -> None:
    registration = RedisRegistration("redis://127.0.0.1:1", KEY, Registration(INFO, FakeEngine(), MEMBER))
    with capture_logs() as logs:
        for number in range(3000):
            for _ in range(2):
                registration._note_refusal(
                    registration._signer.sign_refusal(INFO.incarnation, f"layouts differ from decode-{number}")
                )
    assert len(logs) == 3000
    assert len(registration._refusals._buckets) <= 1000

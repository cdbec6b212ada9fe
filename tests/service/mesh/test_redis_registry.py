"""The registry in Redis where Redis, or whoever can write to it, misbehaves."""

import asyncio
import socket
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any

import pytest
from structlog.testing import capture_logs

from mesh import wire
from mesh.domain.errors import ConfigurationError
from mesh.domain.worker import WorkerInfo, WorkerLoad, WorkerRole, WorkerState
from mesh.redis_connection import HEARTBEATS, WORKERS, record_key
from mesh.rpc.credentials import Credentials, MeshKey
from mesh.rpc.server import Listen, Server
from mesh.signed_messages import MessageSigner
from mesh.v1 import worker_pb2, worker_pb2_grpc
from router.workers import redis_registry
from router.workers.membership import Membership, WorkerView
from router.workers.redis_registry import RedisRegistry
from tests.defects import Repaired
from tests.fakes.redis_server import RedisServer
from tests.fakes.router_views import no_traffic
from tests.service.mesh.test_registry import KEY, MEMBER, FakeEngine
from tests.unit.router.test_membership import INFO
from tests.waiting import LIMIT_S, until, until_told
from worker.redis_registration import RedisRegistration
from worker.registration import Registration
from worker.servicer import WorkerServicer


def beat(**load: Any) -> worker_pb2.RegisterRequest:
    return worker_pb2.RegisterRequest(
        heartbeat=worker_pb2.Heartbeat(load=wire.load_to_proto(WorkerLoad(**load)), state=1)
    )


class Router:
    """Follows Redis; `until` waits for one worker's view."""

    def __init__(self, url: str, require_fits: Callable[[WorkerInfo], None] = lambda info: None) -> None:
        self.membership = Membership(time.monotonic, require_fits)
        self.registry = RedisRegistry(url, self.membership, MEMBER, no_traffic())
        self.states: list[WorkerState | None] = []
        self._changed = asyncio.Event()
        self.membership.on_change(lambda _: self._note())
        self.membership.on_report(lambda _: self._note())
        self.task = asyncio.create_task(self.registry.run())

    def _note(self) -> None:
        view = self.membership.find(INFO.worker_id)
        self.states.append(view.state if view else None)
        self._changed.set()

    async def until(self, condition: Any, worker_id: str = INFO.worker_id, *, within_s: float = 20.0) -> WorkerView:
        async with asyncio.timeout(within_s):
            while (view := self.membership.find(worker_id)) is None or not condition(view):
                self._changed.clear()
                await self._changed.wait()
        return view


async def never_drained(draining: bool) -> None:
    pytest.fail("nobody drains this worker")


async def never_switched(role: WorkerRole) -> None:
    pytest.fail("nobody changes this worker's role")


class Worker:
    """A worker's outside: its server and its registration."""

    def __init__(self, url: str, worker_id: str, **changes: Any) -> None:
        self.server = Server(Listen("127.0.0.1", 0, KEY))
        self.info = replace(INFO, worker_id=worker_id, incarnation=worker_id, address=self.server.address, **changes)
        self.registration = Registration(self.info, FakeEngine(), MEMBER)
        servicer = WorkerServicer(self.info, FakeEngine(), never_drained, never_switched)
        worker_pb2_grpc.add_WorkerServicer_to_server(servicer, self.server.grpc)
        self._redis = RedisRegistration(url, KEY, self.registration)

    async def start(self) -> None:
        await self.server.start(["mesh.v1.Worker"])
        self.server.set_serving(True)
        self.task = asyncio.create_task(self.run())

    async def run(self) -> None:
        await self._redis.run()

    async def kill(self) -> None:
        await self.server.stop(0)
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)


@pytest.fixture
async def router(redis_server: RedisServer) -> AsyncIterator[Router]:
    router = Router(redis_server.url)
    async with asyncio.timeout(60):
        await router.registry.connected.wait()
    yield router
    assert not router.task.done()
    router.task.cancel()
    await asyncio.gather(router.task, return_exceptions=True)


async def test_redis_away_and_back_empty(
    redis_server: RedisServer, router: Router, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redis_registry, "SILENT_S", 1.5)
    monkeypatch.setattr(redis_registry, "_PROBE_AFTER_S", 0.5)
    stays, dies = Worker(redis_server.url, INFO.worker_id), Worker(redis_server.url, "dies")
    for worker in (stays, dies):
        await worker.start()
        await router.until(lambda view: view.load.num_running == 3 and view.cached, worker.info.worker_id)
    router.states.clear()
    with capture_logs() as logs:
        redis_server.stop()
        stopped_s = time.monotonic()
        await dies.kill()
        # Its beats say 3 running, its own answer to a direct check 0.
        await router.until(lambda view: view.last_seen_s > stopped_s + 3 and view.load.num_running == 0)
        await router.until(lambda view: view.state is WorkerState.LOST, "dies")
    away_s = time.monotonic() - stopped_s
    lines = [(line["event"], line.get("what"), line.get("error")) for line in logs]
    assert max(lines.count(line) for line in lines) <= 2 + away_s  # one a second
    await redis_server.start()
    back_s = time.monotonic()
    await router.until(lambda view: view.load.num_running == 3)
    assert time.monotonic() - back_s < 5
    assert set(router.states) == {WorkerState.READY}
    assert router.membership.find("dies").state is WorkerState.LOST
    assert not stays.task.done()
    await stays.kill()


async def test_forged_tampered_and_replayed_messages_have_no_effect(redis_server: RedisServer, router: Router) -> None:
    """`last` is read in the same round as the forged record, or in a later one."""
    forged = replace(INFO, worker_id="forged", address="evil:1")
    signer, evil = MessageSigner(KEY), MessageSigner(MeshKey("not-the-key-of-this-mesh"))
    genuine = signer.sign(INFO, beat(num_running=1))
    old = MessageSigner(KEY, lambda: time.time() - 60).sign(replace(INFO, worker_id="old"), beat())
    other_address = genuine.replace(b"h:1", b"h:9")
    assert other_address != genuine
    overtaken = MessageSigner(KEY, lambda: time.time() - 5).sign(replace(INFO, address="former:1"), beat())
    last = replace(INFO, worker_id="last", incarnation="last")
    began_s = time.monotonic()
    async with redis_server.client() as redis:
        with capture_logs() as logs:
            await redis.publish(HEARTBEATS, genuine)
            for _ in range(50):
                for message in (evil.sign(forged, beat()), other_address, old, overtaken, b"noise", b""):
                    await redis.publish(HEARTBEATS, message)
            await redis.set(record_key("forged"), evil.sign(forged, beat()))
            await redis.zadd(WORKERS, {"forged": 0, b"\xff\xfe": 0})
            await redis.set(record_key("last"), signer.sign(last, beat()))
            await redis.zadd(WORKERS, {"last": 0})
            await router.until(lambda view: True, "last")
            await redis.publish(HEARTBEATS, signer.sign(INFO, beat(num_running=2)))
            view = await router.until(lambda view: view.load.num_running == 2)
    took_s = time.monotonic() - began_s
    assert view.info == INFO
    assert [view.info.worker_id for view in router.membership.views()] == [INFO.worker_id, "last"]
    causes = [line["cause"] for line in logs if line["event"] == "registry message refused"]
    assert len(set(causes)) == 4
    assert max(causes.count(cause) for cause in causes) <= 2 + took_s  # one a second


async def test_messages_that_waited_while_the_router_was_stopped_are_no_attack() -> None:
    """The newest heartbeat, from its key, comes before those that have waited in the channel."""
    now_s, membership = time.time(), Membership(time.monotonic)
    registry = RedisRegistry("redis://127.0.0.1:1", membership, MEMBER, no_traffic())
    times_s = iter((now_s - 8, now_s - 8, now_s - 4, now_s - 0.5))  # the first is that of the signer's start
    signer = MessageSigner(KEY, lambda: next(times_s))
    waited, waited_too, newest = (signer.sign(INFO, beat(num_running=number)) for number in range(3))
    with capture_logs() as logs:
        registry._take(newest)
        registry._take(waited, over_channel=True)
        registry._take(waited_too, over_channel=True)
        registry._take(newest, over_channel=True)
    assert [line for line in logs if line["event"] == "registry message refused"] == []
    assert membership.find(INFO.worker_id).load.num_running == 2
    for over_channel in (True, False):  # once more, or under the key, it is one
        registry = RedisRegistry("redis://127.0.0.1:1", Membership(time.monotonic), MEMBER, no_traffic())
        with capture_logs() as logs:
            registry._take(newest, over_channel=True)
            registry._take(waited, over_channel=over_channel)
        [cause] = [line["cause"] for line in logs if line["event"] == "registry message refused"]
        assert "replayed" in cause


async def test_an_expired_record_disappears(
    redis_server: RedisServer, router: Router, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redis_registry, "SILENT_S", 1.0)
    info: WorkerInfo = replace(INFO, address="127.0.0.1:9")
    async with redis_server.client() as redis:
        await redis.set(record_key(info.worker_id), MessageSigner(KEY).sign(info, beat(num_running=1)), px=2500)
        await redis.zadd(WORKERS, {info.worker_id: 0})
        await router.until(lambda view: view.load.num_running == 1)
        await router.until(lambda view: view.state is WorkerState.LOST)
        async with asyncio.timeout(60):
            while await redis.zcard(WORKERS):  # noqa: ASYNC110
                await asyncio.sleep(0.05)
    later = Router(redis_server.url)
    async with asyncio.timeout(60):
        await later.registry.connected.wait()
    assert later.membership.views() == []
    later.task.cancel()
    await asyncio.gather(later.task, return_exceptions=True)


async def test_connections_are_closed_also_where_that_is_cancelled(redis_server: RedisServer) -> None:
    redis = redis_server.client(timeout_s=LIMIT_S)
    await redis.ping()
    closing = asyncio.create_task(redis.aclose())
    await asyncio.sleep(0)
    closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closing
    async with redis_server.client(timeout_s=LIMIT_S) as other:
        await until_told(other.client_list, lambda clients: len(clients) == 1)


@pytest.mark.parametrize(
    ("url", "key", "message"), [("http://x", KEY, "must be redis://"), ("redis://x", None, "needs a mesh key")]
)
def test_wrong_settings_are_said_in_words(url: str, key: MeshKey | None, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        RedisRegistry(url, Membership(time.monotonic), Credentials(key), no_traffic())


async def test_a_worker_that_answers_is_not_lost_while_many_others_do_not(
    monkeypatch: pytest.MonkeyPatch, repaired: Repaired
) -> None:
    """Redis is away, and a part of the network with it: each check of a worker there ends with its timeout."""
    monkeypatch.setattr(redis_registry, "_MAX_CONCURRENT", 2)
    server = Server(Listen("127.0.0.1", 0, KEY))
    worker_pb2_grpc.add_WorkerServicer_to_server(
        WorkerServicer(INFO, FakeEngine(), never_drained, never_switched), server.grpc
    )
    await server.start([])
    server.set_serving(True)
    membership = Membership(time.monotonic)
    membership.join(replace(INFO, address=server.address))
    with socket.create_server(("127.0.0.1", 0), backlog=64) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        silent_ids = [f"{INFO.worker_id}-silent-{number}" for number in range(14)]
        for name in silent_ids:
            membership.join(replace(INFO, worker_id=name, incarnation=name, address=address))
        states: list[tuple[str, WorkerState]] = []
        membership.on_change(lambda view: states.append((view.info.worker_id, view.state)))
        registry = RedisRegistry("redis://127.0.0.1:1", membership, MEMBER, no_traffic())
        watch = asyncio.create_task(registry._watch_silence())
        await until(lambda: len(states) >= len(silent_ids), LIMIT_S)
        watch.cancel()
        await asyncio.gather(watch, return_exceptions=True)
    await server.stop(0)
    assert sorted(states) == sorted((name, WorkerState.LOST) for name in silent_ids)
    repaired("D49", "a worker that answers is alive, however long the checks of others take")

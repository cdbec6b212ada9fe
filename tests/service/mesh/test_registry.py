"""A worker's registration with a real registry server."""

import asyncio
import gc
import time
from collections import Counter
from dataclasses import replace

import pytest
import structlog
from structlog.testing import capture_logs

from mesh import wire
from mesh.domain.errors import LayoutMismatch, Unauthenticated, WorkerLost
from mesh.domain.worker import CacheEvent, WorkerInfo, WorkerLoad, WorkerState
from mesh.rpc.credentials import Credentials, MeshKey
from mesh.rpc.server import Listen, Server
from mesh.tasks import cancel_all
from mesh.v1 import worker_pb2, worker_pb2_grpc
from router.workers import coordination
from router.workers.coordination import RegistryServicer
from router.workers.membership import Membership
from tests.defects import Repaired
from tests.evidence import Evidence
from tests.unit.router.test_membership import INFO
from tests.waiting import LIMIT_S, until
from worker.registration import CacheSnapshot, Registration, Report

KEY = MeshKey("a-key-for-tests-only")
MEMBER = Credentials(KEY)


class FakeEngine:
    """A ReportSource; `stuck` makes reports wait, as a long step does."""

    def __init__(self) -> None:
        self.stuck = asyncio.Event()
        self.stuck.set()
        self.events = [CacheEvent(b"a", False)]
        self.next_number = 0

    async def report(self) -> Report:
        await self.stuck.wait()
        events, self.events = self.events, []
        first, self.next_number = self.next_number, self.next_number + len(events)
        return Report(WorkerLoad(num_running=3), first, events)

    async def load(self) -> WorkerLoad:
        return WorkerLoad()

    async def snapshot(self) -> CacheSnapshot:
        await self.stuck.wait()
        self.next_number += len(self.events)
        self.events = []
        return CacheSnapshot(WorkerLoad(num_running=3), self.next_number, [b"a", b"s"])


class Watch:
    """Waits for a condition on a membership, woken by its changes."""

    def __init__(self, membership: Membership) -> None:
        self.membership = membership
        self._changed = asyncio.Event()
        membership.on_change(lambda _: self._changed.set())
        membership.on_report(lambda _: self._changed.set())

    async def until(self, condition, timeout_s: float = LIMIT_S) -> None:
        async with asyncio.timeout(timeout_s):
            while not (self.membership.views() and condition(self.membership.views()[0])):
                self._changed.clear()
                await self._changed.wait()


async def start_registry(membership: Membership, port: int = 0) -> Server:
    server = Server(Listen("127.0.0.1", port, KEY))
    worker_pb2_grpc.add_RegistryServicer_to_server(RegistryServicer(membership), server.grpc)
    await server.start(["mesh.v1.Registry"])
    return server


async def test_worker_registers_beats_through_a_long_step_and_leaves() -> None:
    membership = Membership(asyncio.get_running_loop().time)
    watch = Watch(membership)
    server = await start_registry(membership)
    engine = FakeEngine()
    registration = Registration(INFO, engine, MEMBER)
    running = asyncio.create_task(registration.run(server.address))
    await watch.until(lambda view: view.load.num_running == 3 and view.cached == {b"a"})
    engine.stuck.clear()
    seen = membership.views()[0].last_seen_s
    await watch.until(lambda view: view.last_seen_s > seen + 0.3)
    engine.stuck.set()
    registration.state = WorkerState.DRAINING
    registration.heartbeat_now()
    await watch.until(lambda view: view.state is WorkerState.DRAINING)
    running.cancel()
    await watch.until(lambda view: view.state is WorkerState.LOST)
    await server.stop(0)


async def test_what_changes_during_a_slow_write_is_sent_at_once() -> None:
    registration = Registration(INFO, FakeEngine(), MEMBER)
    states: asyncio.Queue[WorkerState] = asyncio.Queue()

    async def write(request: worker_pb2.RegisterRequest) -> None:
        states.put_nowait(wire.state_from_proto(request.heartbeat.state))
        if states.qsize() == 1:
            registration.state = WorkerState.DRAINING
            registration.heartbeat_now()

    sending = asyncio.create_task(registration.send_heartbeats(write, interval_s=3600))
    async with asyncio.timeout(LIMIT_S):
        assert await states.get() is WorkerState.READY
        assert await states.get() is WorkerState.DRAINING
    sending.cancel()


async def test_agent_comes_back_after_the_router_restarts() -> None:
    membership = Membership(asyncio.get_running_loop().time)
    server = await start_registry(membership)
    registration = Registration(INFO, FakeEngine(), MEMBER)
    running = asyncio.create_task(registration.run(server.address))
    await Watch(membership).until(lambda view: view.load.num_running == 3)
    await server.stop(0)
    restarted = Membership(asyncio.get_running_loop().time)
    watch = Watch(restarted)
    server = await start_registry(restarted, server.port)
    # Its cache events do not begin at 0 any more, so the new router asks for a snapshot.
    await watch.until(lambda view: view.load.num_running == 3 and b"s" in view.cached)
    running.cancel()
    await server.stop(0)


async def test_workers_do_not_all_come_back_at_the_same_moment() -> None:
    with capture_logs() as logs:
        running = [asyncio.create_task(Registration(INFO, FakeEngine(), MEMBER).run("127.0.0.1:1")) for _ in range(8)]
        await until(lambda: len(logs) >= len(running))
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
    first = [line["retry_in_s"] for line in logs if line["retry_in_s"] <= 0.1]
    assert len(set(first)) > len(running) // 2


class HugeEngine(FakeEngine):
    """Its prefix cache is larger than what one gRPC message can say."""

    num_blocks = 900_000

    def __init__(self) -> None:
        super().__init__()
        self.hashes = [number.to_bytes(32, "big") for number in range(self.num_blocks)]
        self.events = [CacheEvent(block_hash, False) for block_hash in self.hashes]

    async def snapshot(self) -> CacheSnapshot:
        await super().snapshot()
        return CacheSnapshot(WorkerLoad(num_running=3), self.next_number, self.hashes)


async def test_a_huge_prefix_cache_does_not_break_the_registration(repaired: Repaired) -> None:
    membership = Membership(asyncio.get_running_loop().time)
    watch = Watch(membership)
    server = await start_registry(membership)
    engine = HugeEngine()
    running = asyncio.create_task(Registration(INFO, engine, MEMBER).run(server.address))
    await watch.until(lambda view: bool(view.cached))
    num_known = len(membership.views()[0].cached)
    assert 0 < num_known <= 1 << 16
    assert engine.hashes[-1] in membership.views()[0].cached
    engine.events = [CacheEvent(b"new", False)]
    await watch.until(lambda view: b"new" in view.cached)
    assert membership.views()[0].state is WorkerState.READY
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    await server.stop(0)
    repaired("S4", f"a worker with {engine.num_blocks:,} cached blocks stays registered; {num_known:,} are told")


async def test_refusals_are_final() -> None:
    membership = Membership(asyncio.get_running_loop().time)
    membership.join(INFO)
    server = await start_registry(membership)
    misfit = replace(INFO, worker_id="w", layout=replace(INFO.layout, num_layers=9))
    with pytest.raises(LayoutMismatch, match="num_layers: 2 here, 9 there"):
        await Registration(misfit, FakeEngine(), MEMBER).run(server.address)
    with pytest.raises(Unauthenticated):
        await Registration(INFO, FakeEngine(), Credentials(MeshKey("another-key-entirely"))).run(server.address)
    assert [view.info.worker_id for view in membership.views()] == ["decode-0"]
    await server.stop(0)


async def test_worker_of_another_model_or_tokenizer_is_refused_at_the_handshake(evidence: Evidence) -> None:
    def require_fits(info: WorkerInfo) -> None:
        raise LayoutMismatch(f"tokenizers differ: x at the router, {info.tokenizer_fingerprint} at worker")

    server = await start_registry(Membership(asyncio.get_running_loop().time, require_fits))
    started_s = time.monotonic()
    with pytest.raises(LayoutMismatch, match="x at the router, t at worker"):
        await asyncio.wait_for(Registration(INFO, FakeEngine(), MEMBER).run(server.address), 60)
    waited_s = time.monotonic() - started_s
    is_fast = waited_s <= 1
    evidence(
        "R14",
        "misfit refused, both values named",
        f"{waited_s:.2f} s",
        target="<= 1 s",
        ok=is_fast,
        is_reported_only=True,
    )
    await server.stop(0)


async def test_end_of_an_old_stream_does_not_lose_a_worker_that_is_back() -> None:
    membership = Membership(asyncio.get_running_loop().time)
    server = await start_registry(membership)
    watch = Watch(membership)
    first = asyncio.create_task(Registration(INFO, FakeEngine(), MEMBER).run(server.address))
    await watch.until(lambda view: view.load.num_running == 3 and view.cached == {b"a"})
    second = asyncio.create_task(Registration(INFO, FakeEngine(), MEMBER).run(server.address))
    await watch.until(lambda view: not view.cached)  # it has joined anew
    await watch.until(lambda view: view.cached == {b"a"})
    first.cancel()
    await asyncio.wait([first])
    await asyncio.sleep(0.2)
    assert membership.views()[0].state is WorkerState.READY
    second.cancel()
    await watch.until(lambda view: view.state is WorkerState.LOST)
    await server.stop(0)


async def test_beats_go_on_while_a_snapshot_waits_for_a_long_step() -> None:
    membership = Membership(asyncio.get_running_loop().time)
    watch = Watch(membership)
    server = await start_registry(membership)
    engine = FakeEngine()
    registration = Registration(INFO, engine, MEMBER)
    running = asyncio.create_task(registration.run(server.address))
    await watch.until(lambda view: view.cached == {b"a"})
    engine.stuck.clear()
    registration.ask_snapshot()
    seen = membership.views()[0].last_seen_s
    await watch.until(lambda view: view.last_seen_s > seen + 1.0)
    engine.stuck.set()
    await watch.until(lambda view: b"s" in view.cached)
    running.cancel()
    await server.stop(0)


@pytest.mark.parametrize("num_stops", [1, 2])
async def test_a_router_that_was_stopped_waits_for_what_came_meanwhile(
    num_stops: int, monkeypatch: pytest.MonkeyPatch, repaired: Repaired
) -> None:
    """Also if it is stopped again before it has read that, as on a machine that swaps."""
    monkeypatch.setattr(coordination, "SILENT_S", 0.8)
    membership = Membership(asyncio.get_running_loop().time)
    states: list[WorkerState] = []
    server = await start_registry(membership)
    running = asyncio.create_task(Registration(INFO, FakeEngine(), MEMBER).run(server.address))
    watch = Watch(membership)
    await watch.until(lambda view: view.load.num_running == 3)
    membership.on_change(lambda view: states.append(view.state))
    expiry = asyncio.create_task(coordination.expire_forever(membership))
    for _ in range(num_stops):
        for _ in range(3):  # turns of the event loop, in which the task goes on
            await asyncio.sleep(0)
        time.sleep(2 * coordination.SILENT_S)  # noqa: ASYNC251 - stops the whole router, as SIGSTOP does
    seen_s = membership.views()[0].last_seen_s
    await watch.until(lambda view: view.last_seen_s > seen_s + 1)
    assert states == []
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    await watch.until(lambda view: view.state is WorkerState.LOST)
    expiry.cancel()
    await server.stop(0)
    repaired("D50", "it waits anew until it was not stopped")


class BrokenEngine(FakeEngine):
    """Every report fails, so that every registration breaks at once."""

    async def report(self) -> Report:
        raise RuntimeError("no report")


async def test_a_registration_that_breaks_at_once_costs_few_lines(evidence: Evidence) -> None:
    server = await start_registry(Membership(asyncio.get_running_loop().time))
    clock = asyncio.get_running_loop().time
    begun_s = clock()
    with structlog.testing.capture_logs() as lines:
        running = asyncio.create_task(Registration(INFO, BrokenEngine(), MEMBER).run(server.address))
        await asyncio.sleep(8.0)
    watched_s = clock() - begun_s
    running.cancel()
    await server.stop(0)
    [(cause, most), *_] = Counter(line["event"] for line in lines).most_common(1)
    assert most > 2
    evidence(
        "R26",
        "lines of a registration that breaks at once",
        f"{most} in {watched_s:.1f} s ({cause})",
        target="<= 1 per s",
        ok=most <= watched_s,
    )


async def test_a_report_that_the_engine_owes_when_it_stops_is_no_error_in_the_log() -> None:
    class Stopping(FakeEngine):
        async def report(self) -> Report:
            await self.stuck.wait()
            raise WorkerLost("the engine has stopped")

    engine, unhandled = Stopping(), []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: unhandled.append(context["message"]))
    registration = Registration(INFO, engine, MEMBER)
    sent: asyncio.Queue[worker_pb2.RegisterRequest] = asyncio.Queue()
    engine.stuck.clear()
    beating = asyncio.create_task(registration.send_heartbeats(sent.put, 60.0))
    assert (await sent.get()).HasField("heartbeat"), "with the last load, because the report has not come"
    await cancel_all([beating])
    engine.stuck.set()
    for _ in range(3):
        await asyncio.sleep(0)
    del registration, beating
    gc.collect()
    assert unhandled == []

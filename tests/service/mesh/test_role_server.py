"""A worker's stay in the mesh: what it says while its engine is stuck, and in which order it stops."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from structlog.testing import capture_logs

from engine.engine import Engine
from engine.loop import EngineLoop
from engine.sequence import SequenceState
from mesh.domain.errors import WorkerDraining
from mesh.domain.worker import WorkerInfo, WorkerRole, WorkerState
from mesh.rpc.channel import open_channel
from mesh.rpc.credentials import Credentials
from mesh.v1 import worker_pb2, worker_pb2_grpc
from router.workers.membership import Membership, WorkerView
from tests.evidence import Evidence
from tests.fakes.requests import make_request
from tests.service.mesh.test_registry import KEY, start_registry
from tests.service.worker_rig import EngineRig
from tests.unit.router.test_membership import INFO
from tests.waiting import until
from worker import role_server as role_server_module
from worker.role_server import RoleServer
from worker.settings import WorkerSettings

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
STALL_S = 0.3
WAIT_S = 60.0


def clock() -> float:
    return asyncio.get_running_loop().time()


class Worker:
    """A RoleServer over a fake engine, registered with a real registry, and asked for its health."""

    def __init__(self, settings: WorkerSettings, membership: Membership, info: WorkerInfo) -> None:
        self.rig = EngineRig.make()
        self.engine = EngineLoop(
            Engine(self.rig.scheduler, self.rig.runner),
            on_step=lambda _: None,
            on_death=lambda _: self.rig.died.set(),
        )
        self.role_server = RoleServer(settings, info, self.engine)
        self.told_to_stop = asyncio.Event()
        self.next_role: WorkerRole | None = None
        self.may_drain = asyncio.Event()
        self.draining = asyncio.Event()
        self.membership = membership
        self.seen: list[WorkerState] = []
        self._changed = asyncio.Event()
        membership.on_change(lambda _: self._note())
        membership.on_report(lambda _: self._changed.set())

    def _note(self) -> None:
        self.seen += [view.state for view in self.membership.views()]
        self._changed.set()

    async def drained(self) -> None:
        self.draining.set()
        await self.may_drain.wait()

    async def serve(self) -> None:
        self.engine.start()
        stopped = asyncio.create_task(self.stopped())
        try:
            self.next_role = await self.role_server.serve(
                services=(), drained=self.drained, stopped=stopped, engine_died=self.rig.died
            )
        finally:
            stopped.cancel()
            await self.engine.stop(within_s=0.1)

    async def stopped(self) -> None:
        await self.told_to_stop.wait()

    async def health(self) -> Any:
        async with open_channel(self.role_server.server.address) as channel:
            return (await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=5)).status

    async def seen_as(self, state: WorkerState) -> WorkerView:
        """What the router has once it sees this state."""
        async with asyncio.timeout(WAIT_S):
            while not self.membership.views() or self.membership.views()[0].state is not state:
                self._changed.clear()
                await self._changed.wait()
        return self.membership.views()[0]

    async def stall(self) -> None:
        """Let the engine get stuck in a step."""
        self.rig.runner.gate.clear()
        await self.engine.call(
            lambda scheduler: scheduler.add(SequenceState(make_request("a", [1, 2], max_new_tokens=2)))
        )
        assert await asyncio.to_thread(self.rig.runner.in_step.wait, WAIT_S)


@asynccontextmanager
async def worker(info: WorkerInfo = INFO, **changes: Any) -> AsyncIterator[tuple[Worker, asyncio.Task[None]]]:
    membership = Membership(clock)
    registry = await start_registry(membership)
    settings = WorkerSettings(model="m", registry_address=registry.address, mesh_key=KEY.secret, **changes)
    worker = Worker(settings, membership, info)
    serving = asyncio.create_task(worker.serve())
    await worker.seen_as(WorkerState.READY)
    try:
        yield worker, serving
    finally:
        worker.rig.runner.gate.set()
        worker.may_drain.set()
        worker.told_to_stop.set()
        try:
            await serving
        finally:
            await registry.stop(0)


async def test_a_stalled_step_takes_the_worker_out_until_it_ends(evidence: Evidence) -> None:
    async with worker(stall_after_s=STALL_S) as (stuck, _):
        assert await stuck.health() == SERVING
        with capture_logs() as logs:
            began = clock()
            await stuck.stall()
            await stuck.seen_as(WorkerState.STALLED)
            seen_s = clock() - began
            assert await stuck.health() == NOT_SERVING
            stuck.rig.runner.gate.set()
            await stuck.seen_as(WorkerState.READY)
            assert await stuck.health() == SERVING
        errors = [entry for entry in logs if entry["log_level"] == "error"]
        assert [entry["event"] for entry in errors] == ["engine stalled"]
        assert "self.gate.wait()" in errors[0]["stack"]
        evidence(
            "R13",
            "not ready after a stalled step",
            f"{seen_s:.2f} s (limit {STALL_S:g} s for 12 s)",
            target="<= limit + 3 s",
            ok=seen_s <= STALL_S + 3,
            is_reported_only=True,
        )


async def test_a_worker_that_is_cancelled_while_it_drains_leaves_no_task() -> None:
    tasks: list[str] = []

    async def cancel_while_draining() -> None:
        async with worker() as (draining, serving), asyncio.timeout(WAIT_S):
            draining.told_to_stop.set()
            await draining.draining.wait()
            serving.cancel()
            await asyncio.wait([serving])
            tasks.extend(repr(task.get_coro()) for task in asyncio.all_tasks())

    with pytest.raises(asyncio.CancelledError):
        await cancel_while_draining()
    assert tasks
    assert not [task for task in tasks if "Worker.drained" in task]


async def test_a_worker_that_drains_is_not_made_ready_by_the_end_of_a_stall() -> None:
    async with worker(stall_after_s=STALL_S) as (stuck, _):
        await stuck.stall()
        await stuck.seen_as(WorkerState.STALLED)
        await stuck.role_server.set_draining(True)
        await stuck.seen_as(WorkerState.DRAINING)
        stuck.rig.runner.gate.set()
        with capture_logs() as logs:
            async with asyncio.timeout(WAIT_S):
                while not any(entry["event"] == "engine goes on" for entry in logs):  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
        assert await stuck.health() == NOT_SERVING
        assert stuck.role_server.is_draining()


async def test_an_operator_takes_a_worker_out_of_service_and_back() -> None:
    async with worker() as (drained, _), open_channel(drained.role_server.server.address) as channel:
        credentials = Credentials(KEY).metadata()

        async def set_draining(draining: bool) -> None:
            request = worker_pb2.SetDrainingRequest(draining=draining)
            await worker_pb2_grpc.WorkerStub(channel).SetDraining(request, timeout=WAIT_S, metadata=credentials)

        await set_draining(True)
        await drained.seen_as(WorkerState.DRAINING)
        assert (await drained.health(), drained.role_server.is_draining()) == (NOT_SERVING, True)
        await set_draining(False)
        await drained.seen_as(WorkerState.READY)
        assert (await drained.health(), drained.role_server.is_draining()) == (SERVING, False)
        drained.told_to_stop.set()
        await drained.draining.wait()
        await set_draining(False)  # a worker that stops is not taken back
        assert (await drained.health(), drained.role_server.is_draining()) == (NOT_SERVING, True)


async def test_an_engine_that_never_comes_back_ends_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    status: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    monkeypatch.setattr(role_server_module.os, "_exit", status.set_result)
    async with worker(stall_after_s=STALL_S, wedged_exit_s=2 * STALL_S) as (stuck, _):
        await stuck.stall()
        async with asyncio.timeout(WAIT_S):
            assert await status == 1


async def test_a_watch_for_stalls_that_fails_ends_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody would notice a wedged engine any more, nor that a stall is over."""
    status: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    monkeypatch.setattr(role_server_module.os, "_exit", status.set_result)

    def broken() -> str:
        raise LookupError("unforeseen")

    async with worker(stall_after_s=STALL_S) as (stuck, _):
        monkeypatch.setattr(stuck.engine, "stack", broken)
        await stuck.stall()
        async with asyncio.timeout(10):
            assert await status == 1


async def test_stop_order_not_serving_refuse_drain_stop_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    async with worker() as (stopping, serving):
        assert not stopping.role_server.is_draining()
        stopping.told_to_stop.set()
        async with asyncio.timeout(WAIT_S):
            await stopping.draining.wait()
        # It refuses new work, says so, and still serves and computes what it has.
        assert stopping.role_server.is_draining()
        assert await stopping.health() == NOT_SERVING
        await stopping.seen_as(WorkerState.DRAINING)
        assert (await stopping.engine.call(lambda scheduler: scheduler.load())).num_running == 0
        assert not serving.done()
        stops: list[bool] = []
        stop = stopping.role_server.server.stop

        async def stop_server(grace_s: float) -> None:
            stops.append(stopping.engine._closed)
            await stop(grace_s)

        monkeypatch.setattr(stopping.role_server.server, "stop", stop_server)
        stopping.may_drain.set()
        async with asyncio.timeout(WAIT_S):
            await serving
        assert stops == [False], "the server stops while the engine still runs"
        assert stopping.engine._closed
        assert (await stopping.seen_as(WorkerState.STOPPED)).cached == set()
        assert WorkerState.LOST not in stopping.seen


async def test_a_registry_that_never_answers_does_not_hold_up_a_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is nobody to say farewell to."""
    monkeypatch.setattr(role_server_module, "_FAREWELL_S", 10 * WAIT_S)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        stopping = Worker(WorkerSettings(model="m", registry_address=address), Membership(clock), INFO)
        stopping.may_drain.set()
        serving = asyncio.create_task(stopping.serve())
        connection, _ = await asyncio.to_thread(silent.accept)
        connection.sendall(b"\0\0\0\4\0\0\0\0\0")  # HTTP/2's settings, and nothing more: a call begins
        stopping.told_to_stop.set()
        async with asyncio.timeout(WAIT_S):
            await serving
        connection.close()


@pytest.mark.parametrize("is_stuck", [False, True])
async def test_it_stops_within_its_grace_whatever_is_left(evidence: Evidence, is_stuck: bool) -> None:
    grace_s = 0.5
    async with worker(drain_grace_s=grace_s) as (stopping, serving):
        if is_stuck:
            await stopping.stall()
        began = clock()
        stopping.told_to_stop.set()
        async with asyncio.timeout(WAIT_S):
            await serving
        took_s = clock() - began
        evidence(
            "R10",
            f"worker with {'a stuck step' if is_stuck else 'work left'} stopped",
            f"{took_s:.2f} s (grace {grace_s:g} s for 30 s)",
            target="<= grace + 2 s",
            ok=took_s <= grace_s + 2,
            is_reported_only=True,
        )


class Operator:
    """Asks a worker for roles, as routers do."""

    def __init__(self, channel: Any) -> None:
        self._stub = worker_pb2_grpc.WorkerStub(channel)

    async def switch(self, role: int) -> None:
        request = worker_pb2.SwitchRoleRequest(role=role)
        await self._stub.SwitchRole(request, timeout=WAIT_S, metadata=Credentials(KEY).metadata())

    async def drain(self, draining: bool) -> None:
        request = worker_pb2.SetDrainingRequest(draining=draining)
        await self._stub.SetDraining(request, timeout=WAIT_S, metadata=Credentials(KEY).metadata())


SWITCHABLE = replace(INFO, switchable=True)
OTHER_ROLE = {
    WorkerRole.PREFILL: (WorkerRole.DECODE, worker_pb2.WORKER_ROLE_DECODE),
    WorkerRole.DECODE: (WorkerRole.PREFILL, worker_pb2.WORKER_ROLE_PREFILL),
}
OWN_NUMBER = OTHER_ROLE[OTHER_ROLE[INFO.role][0]][1]


@pytest.mark.parametrize("ends_in_time", [True, False])
async def test_a_worker_drains_before_it_changes_its_role(ends_in_time: bool) -> None:
    wanted, number = OTHER_ROLE[INFO.role]
    grace_s = WAIT_S if ends_in_time else 0.2
    async with worker(SWITCHABLE, drain_grace_s=grace_s) as (switching, serving):
        async with open_channel(switching.role_server.server.address) as channel:
            await Operator(channel).switch(number)
        await switching.seen_as(WorkerState.DRAINING)
        await switching.draining.wait()
        if ends_in_time:
            assert not serving.done()
            switching.may_drain.set()
        async with asyncio.timeout(WAIT_S):
            await serving
        assert switching.next_role is wanted
        await switching.seen_as(WorkerState.SWITCHING)
        assert WorkerState.LOST not in switching.seen
        assert switching.role_server.is_draining(), "nobody gives it work any more"


@pytest.mark.parametrize("wish", ["own role", "undrain", "drain"])
async def test_a_switch_is_taken_back_while_the_worker_drains(wish: str) -> None:
    async with (
        worker(SWITCHABLE) as (switching, serving),
        open_channel(switching.role_server.server.address) as channel,
    ):
        operator = Operator(channel)
        await operator.switch(OTHER_ROLE[INFO.role][1])
        await switching.draining.wait()
        await switching.seen_as(WorkerState.DRAINING)
        if wish == "own role":
            await operator.switch(OWN_NUMBER)
        else:
            await operator.drain(wish == "drain")
        is_out = wish == "drain"
        await switching.seen_as(WorkerState.DRAINING if is_out else WorkerState.READY)
        assert await switching.health() == (NOT_SERVING if is_out else SERVING)
        switching.may_drain.set()
        switching.told_to_stop.set()
        async with asyncio.timeout(WAIT_S):
            await serving
        assert switching.next_role is None


async def test_an_order_after_the_farewell_of_a_switch_is_refused() -> None:
    """The worker cannot carry it out any more, and must not say that it has."""
    async with worker(SWITCHABLE) as (switching, serving):
        switching.may_drain.set()
        await switching.role_server.switch_role(OTHER_ROLE[INFO.role][0])
        await switching.seen_as(WorkerState.SWITCHING)
        for order in (
            switching.role_server.set_draining(True),
            switching.role_server.set_draining(False),
            switching.role_server.switch_role(INFO.role),
        ):
            with pytest.raises(WorkerDraining, match="is changing its role: ask again once it has joined"):
                await order
        async with asyncio.timeout(WAIT_S):
            await serving
        assert switching.next_role is OTHER_ROLE[INFO.role][0]


async def test_a_stop_during_the_drain_for_a_switch_ends_the_worker() -> None:
    async with (
        worker(SWITCHABLE) as (switching, serving),
        open_channel(switching.role_server.server.address) as channel,
    ):
        operator = Operator(channel)
        await operator.switch(OTHER_ROLE[INFO.role][1])
        await switching.draining.wait()
        switching.told_to_stop.set()
        await until(lambda: switching.role_server._is_stopping)
        with pytest.raises(grpc.aio.AioRpcError, match="is stopping"):
            await operator.switch(OTHER_ROLE[INFO.role][1])
        switching.may_drain.set()
        async with asyncio.timeout(WAIT_S):
            await serving
        assert switching.next_role is None


async def test_a_worker_with_one_role_keeps_it() -> None:
    async with worker() as (single, _), open_channel(single.role_server.server.address) as channel:
        operator = Operator(channel)
        with pytest.raises(
            grpc.aio.AioRpcError, match="cannot change its role: start it with `tandem up --switchable`"
        ):
            await operator.switch(OTHER_ROLE[INFO.role][1])
        with pytest.raises(grpc.aio.AioRpcError, match="unknown worker role 0"):
            await operator.switch(worker_pb2.WORKER_ROLE_UNSPECIFIED)
        await operator.switch(OWN_NUMBER)
        assert await single.health() == SERVING

"""Links to decode workers are opened a few at a time, the first workers' first."""

import asyncio
import socket
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import grpc
import pytest

from mesh.domain.worker import WorkerInfo, WorkerRole
from mesh.rpc.credentials import Credentials
from mesh.rpc.server import Listen, Server
from mesh.v1 import decode_pb2, decode_pb2_grpc
from router.workers.connections import Channels, RouterIdentity
from router.workers.decode_link import DecodeLink, DecodeLinks
from router.workers.membership import Membership
from tests.fakes.router_views import make_view
from tests.waiting import LIMIT_S, until

NAMES = [f"d{number}" for number in range(7)]
IMPATIENT = [("grpc.min_reconnect_backoff_ms", 2_000), ("grpc.initial_reconnect_backoff_ms", 2_000)]
"""gRPC gives up a connection after so long."""


class Workers(decode_pb2_grpc.DecodeServicer):
    """Decode workers behind one port. One that is not in `answering` leaves the router waiting for its welcome."""

    def __init__(self) -> None:
        self.attached: list[str] = []
        self.answering: dict[str, asyncio.Event] = {name: asyncio.Event() for name in NAMES}

    def answer(self, *names: str) -> None:
        for name in names:
            self.answering[name].set()

    async def Attach(
        self, request_iterator: AsyncIterator[decode_pb2.AttachRequest], context: Any
    ) -> AsyncIterator[decode_pb2.AttachResponse]:
        hello = (await anext(aiter(request_iterator))).hello
        self.attached.append(hello.worker_incarnation)
        await self.answering[hello.worker_incarnation].wait()
        yield decode_pb2.AttachResponse(welcome=decode_pb2.AttachWelcome(worker_incarnation=hello.worker_incarnation))
        async for _ in request_iterator:
            pass


class Rig:
    """The links of a router to `workers`, all of which have registered."""

    def __init__(self, address: str, workers: Workers) -> None:
        self.workers = workers
        self.membership = Membership(lambda: 0.0)
        self.infos = {name: self._info(name, address) for name in NAMES}
        caller = RouterIdentity("router", Credentials())
        self._channels = Channels(self.membership, None)
        self.links = DecodeLinks(self.membership, self._channels, caller, lambda: None)

    def _info(self, name: str, address: str) -> WorkerInfo:
        return replace(make_view(name, WorkerRole.DECODE).info, address=address, incarnation=name)

    def join(self) -> None:
        for info in reversed(self.infos.values()):  # the table has them in order
            self.membership.join(info)
        self.links.reconcile()

    def up(self) -> list[str]:
        return [name for name, info in self.infos.items() if self.links.find(info) is not None]

    async def close(self) -> None:
        await self.links.close()
        await self._channels.close()


@pytest.fixture
async def rig(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Rig]:
    monkeypatch.setattr("router.workers.decode_link._MAX_OPENING", 2)
    monkeypatch.setattr("router.workers.decode_link._MAX_TURN_S", 600.0)
    monkeypatch.setattr("router.workers.decode_link._WELCOME_TIMEOUT_S", 600.0)
    workers, server = Workers(), Server(Listen("127.0.0.1", 0))
    decode_pb2_grpc.add_DecodeServicer_to_server(workers, server.grpc)
    await server.start([])
    rig = Rig(server.address, workers)
    yield rig
    await rig.close()
    await server.stop(0)


async def test_no_more_than_the_limit_are_opened_at_a_time_in_order(rig: Rig) -> None:
    rig.join()
    for number, name in enumerate(NAMES):
        begun = NAMES[: number + 2]
        await until(lambda begun=begun: sorted(rig.workers.attached) == begun)
        assert rig.up() == NAMES[:number]
        rig.workers.answer(name)
        await until(lambda number=number: rig.up() == NAMES[: number + 1])


async def test_a_worker_that_never_answers_ends_its_turn(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.workers.decode_link._MAX_TURN_S", 0.01)
    rig.workers.answer(*NAMES[2:])
    rig.join()
    await until(lambda: rig.up() == NAMES[2:])
    rig.workers.answer("d1")  # late, and still welcome
    await until(lambda: rig.up() == NAMES[1:])


async def test_a_worker_that_refuses_holds_up_none(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.workers.decode_link._FIRST_RETRY_S", 600.0)
    for name in NAMES[:2]:
        rig.infos[name] = replace(rig.infos[name], address="127.0.0.1:1")  # nobody listens there
    rig.workers.answer(*NAMES)
    rig.join()
    await until(lambda: rig.up() == NAMES[2:])


async def test_workers_that_leave_while_others_are_opened_take_no_turn(rig: Rig) -> None:
    rig.join()
    await until(lambda: len(rig.workers.attached) == 2)
    for name in NAMES[:4]:  # two that are being opened, two that wait
        rig.membership.lose(rig.infos[name])
    rig.links.reconcile()
    rig.workers.answer(*NAMES[4:])
    await until(lambda: rig.up() == NAMES[4:])
    assert sorted(rig.workers.attached) == sorted({"d0", "d1", *NAMES[4:]})


async def test_a_link_that_is_closed_as_its_connection_fails_leaves_no_task() -> None:
    """Where packets vanish, both limits are of 5 s. A task that awaits the connection for ever is destroyed some day,
    with an error in the log.
    """
    loop, tasks = asyncio.get_running_loop(), asyncio.all_tasks()
    with socket.create_server(("127.0.0.1", 0)) as silent:
        silent.setblocking(False)
        info = replace(make_view("d0", WorkerRole.DECODE).info, address=f"127.0.0.1:{silent.getsockname()[1]}")
        async with grpc.aio.insecure_channel(info.address, options=IMPATIENT) as channel:
            link = DecodeLink(info, channel, RouterIdentity("router", Credentials()))
            running = asyncio.create_task(link.run(lambda: None))
            connection, _ = await loop.sock_accept(silent)
            with connection:
                loop.call_later(0.0, running.cancel)
                # The loop stands still until gRPC tells of the failure, so it learns of both in one round.
                assert loop._selector.select(LIMIT_S)
                await asyncio.gather(running, return_exceptions=True)
    await until(lambda: asyncio.all_tasks() == tasks, state=asyncio.all_tasks)

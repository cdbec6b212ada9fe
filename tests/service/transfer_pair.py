"""A KVSender and a KVReceiver with a real connection between them, in one process."""

import asyncio
import json
import os
import socket
import sys
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvtransfer import (
    SERVICE_NAME,
    ExpectedTransfer,
    KVReceiver,
    KVSender,
    OutgoingTransfer,
    TransferSettings,
    TransferSpec,
)
from kvtransfer.transports import open_send_transports
from kvtransfer.transports.link import Link
from kvtransfer.transports.memory_reads import ReadSendTransport
from kvtransfer.transports.shm import ShmSendTransport
from mesh.domain.errors import MeshError
from mesh.domain.kv import Span
from mesh.rpc.credentials import Credentials, MeshKey
from mesh.rpc.server import Listen, Server
from mesh.v1 import kvtransfer_pb2_grpc
from tests.fakes.kv_store import TINY, FakeKVStore
from tests.fakes.transfers import FIRST_TOKEN, INCARNATION, Outcomes
from tests.waiting import LIMIT_S, describe
from tests.waiting import until as soon

KEY = MeshKey("a mesh key for tests")
SOURCE_IDS = (1, 2, 3)
RESERVATION = ExpectedTransfer("transfer", 1, (4, 9, 2), 0, 11)
WAIT_S = LIMIT_S


def arenas(directory: str | Path) -> list[str]:
    return [name for name in os.listdir(directory) if name.startswith("tandem-kv-")]


def pair_threads() -> list[str]:
    """Threads of transports in this process."""
    names = [thread.name for thread in threading.enumerate()]
    return [name for name in names if name.startswith(("kv-gloo", "kv-nixl", "kv-mooncake"))]


async def turn_until(condition: Callable[[], bool]) -> None:
    """Let the event loop turn until `condition` holds."""
    try:
        async with asyncio.timeout(WAIT_S):
            while not condition():  # noqa: ASYNC110 - sees each turn of the loop
                await asyncio.sleep(0)
    except TimeoutError:
        raise TimeoutError(f"not within {WAIT_S:g} s: {describe(condition)}") from None


async def until(event: threading.Event) -> None:
    assert await asyncio.to_thread(event.wait, WAIT_S), f"a thread has not set its event in {WAIT_S:g} s"


@asynccontextmanager
async def serving(servicer: Any, key: MeshKey = KEY) -> AsyncIterator[Server]:
    server = Server(Listen("127.0.0.1", 0, key))
    if isinstance(servicer, KVReceiver):
        servicer.add_to(server.grpc)
    else:
        kvtransfer_pb2_grpc.add_KvTransferServicer_to_server(servicer, server.grpc)
    await server.start([SERVICE_NAME])
    try:
        yield server
    finally:
        await server.stop(0)


class Pair:
    """A prefill worker's sender and a decode worker's receiver, with a real connection between them."""

    def __init__(self, directory: Path, transport: str, target: FakeKVStore | None = None, **settings: Any) -> None:
        # One layer of one block per chunk: 9 chunks; 3 slots.
        self.settings = TransferSettings(
            transports=(transport,),
            chunk_bytes=TINY.layer_block_bytes,
            arena_bytes=4 * 4096,
            credit_chunks=2,
            shm_dir=str(directory),
            **settings,
        )
        self.source, self.target = FakeKVStore(seed=1), target or FakeKVStore()
        self.outcomes = Outcomes()
        self.server: Server

    @asynccontextmanager
    async def running(
        self, *, receive: TransferSettings | None = None, key: MeshKey | None = KEY
    ) -> AsyncIterator["Pair"]:
        self.receiver = KVReceiver(self.target, INCARNATION, self.outcomes.callbacks(), receive or self.settings)
        async with serving(self.receiver) as self.server:
            self.transports = open_send_transports(self.settings, TINY.layer_block_bytes)
            self.sender = KVSender(self.source, "prefill-0", Credentials(key), self.settings, self.transports)
            assert self.source.num_pinned == sum(transport.memory() is not None for transport in self.transports)
            try:
                yield self
            finally:
                for gate in (self.source.reading, self.target.writing):
                    gate.open()
                self.require_slots_back()
                await self.sender.close()
                assert self.source.num_pinned == 0
                await self.receiver.close()
                assert arenas(self.settings.shm_dir) == []
                await soon(lambda: not pair_threads())

    def require_slots_back(self) -> None:
        for transport in self.transports:
            if isinstance(transport, ShmSendTransport | ReadSendTransport):
                assert transport.slots.num_free == transport.slots.num_slots
            elif transport.name == "gloo":
                assert transport.slots.num_taken == 0  # type: ignore[attr-defined]

    def open(self, reservation: ExpectedTransfer = RESERVATION, **change: object) -> OutgoingTransfer:
        spec = TransferSpec(
            reservation.transfer_id,
            reservation.attempt,
            self.server.address,
            INCARNATION,
            SOURCE_IDS,
            TINY.whole,
            reservation.first_block,
        )
        return self.sender.open(replace(spec, **change))  # type: ignore[arg-type]

    def start(self, reservation: ExpectedTransfer = RESERVATION) -> OutgoingTransfer:
        """Expected, opened, and all announced."""
        self.receiver.expect(reservation)
        transfer = self.open(reservation)
        announce_all(transfer)
        return transfer

    async def link(self) -> None:
        """A first transfer, after which conversations go over the link; it leaves no trace."""
        await self.start(replace(RESERVATION, transfer_id="first")).commit(11, FIRST_TOKEN)
        self.outcomes.committed.clear()
        self.outcomes.changed.clear()
        for store in (self.source, self.target):
            store.written[:] = 0
            store.reading.arrived.clear()
            store.writing.arrived.clear()
        self.target.data[:] = 0
        assert self.links

    @property
    def links(self) -> list[Link]:
        """The sender's ends."""
        arenas = [transport._arena for transport in self.transports if isinstance(transport, ShmSendTransport)]
        return [link for arena in arenas for link in arena.links_by_receiver.values()]

    def cut_links(self) -> None:
        """As when a process ends: both ends are told so."""
        for link in self.links:
            link._socket.shutdown(socket.SHUT_RDWR)

    async def start_process(self, **settings: Any) -> asyncio.subprocess.Process:
        """Expect the transfer of another sender, whose process has announced all and goes on until it is killed."""
        self.receiver.expect(RESERVATION)
        spec = {
            "transfer_id": RESERVATION.transfer_id,
            "attempt": RESERVATION.attempt,
            "address": self.server.address,
            "receiver_incarnation": INCARNATION,
            "block_ids": SOURCE_IDS,
        }
        program = (sys.executable, "-m", "tests.service.sender_program")
        process = await asyncio.create_subprocess_exec(*program, json.dumps([spec, settings, KEY.secret]))
        try:
            await until(self.target.writing.arrived)
        except BaseException:
            process.kill()
            await process.wait()
            raise
        return process

    async def require_working(self) -> None:
        """A fresh transfer of the same blocks goes through."""
        before = len(self.outcomes.committed)
        reservation = replace(RESERVATION, transfer_id=f"probe-{before}")
        await self.start(reservation).commit(11, FIRST_TOKEN)
        assert self.outcomes.committed[before:] == [(reservation.transfer_id, FIRST_TOKEN)]
        assert self.target.blocks(RESERVATION.block_ids) == self.source.blocks(SOURCE_IDS)

    async def failure(self) -> MeshError:
        """What on_failed was told, once."""
        await asyncio.wait_for(self.outcomes.changed.wait(), WAIT_S)
        ((transfer_id, error),) = self.outcomes.failed
        assert transfer_id == "transfer"
        return error


def announce_all(transfer: OutgoingTransfer) -> None:
    for layer in range(TINY.num_layers):
        transfer.announce(Span(0, 3), Span(layer, 1))

"""`make chaos`: many transfers, with connections cut under them; a long stall; storms of cancellations.

TANDEM_CHAOS_TRANSFERS sets how many transfers go over connections that break (default 5,000),
TANDEM_CHAOS_CLEAN_TRANSFERS how many go undisturbed (default 10,000), TANDEM_CHAOS_STORMS how many storms (default 20).
"""

import asyncio
import os
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from kvtransfer import SERVICE_NAME, ExpectedTransfer
from mesh.domain.errors import MeshError
from mesh.rpc.server import Listen, Server
from tests.evidence import Evidence
from tests.fakes.transfers import FIRST_TOKEN
from tests.service.cancel_storm import check_storms
from tests.service.stalled_pass import check_stalled_pass
from tests.service.transfer_pair import KEY, Pair, announce_all
from tests.unit.kvtransfer.clean_transfers import check_no_false_alarms

NUM_TRANSFERS = int(os.environ.get("TANDEM_CHAOS_TRANSFERS", "5000"))
NUM_CLEAN = int(os.environ.get("TANDEM_CHAOS_CLEAN_TRANSFERS", "10000"))
NUM_STORMS = int(os.environ.get("TANDEM_CHAOS_STORMS", "20"))
NUM_AT_ONCE = 5
CUT_EVERY = 250
"""Transfers between two cuts of all connections."""


class Cuts:
    """Transfers of one Pair, whose server is killed and started anew while they run."""

    def __init__(self, pair: Pair, servers: "Servers") -> None:
        self.num_done = self.num_retried = self.num_cuts = 0
        self._pair = pair
        self._servers = servers

    async def run_some(self, client: int, count: int) -> None:
        """Transfers one after another, each until it gets through."""
        for number in range(count):
            attempt = 0
            while not await self._get_through(
                ExpectedTransfer(f"{client}-{number}", attempt, self._blocks(client), 0, 11)
            ):
                attempt += 1
                self.num_retried += 1
            self.num_done += 1

    async def cut(self) -> None:
        """Cut all connections each time so many transfers more are done."""
        while True:
            done = self.num_done
            while self.num_done < done + CUT_EVERY:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            self._pair.cut_links()
            await self._servers.restart()
            self.num_cuts += 1

    def _blocks(self, client: int) -> tuple[int, ...]:
        return (3 * client, 3 * client + 1, 3 * client + 2)

    async def _get_through(self, reservation: ExpectedTransfer) -> bool:
        pair = self._pair
        pair.receiver.expect(reservation)
        transfer = pair.open(reservation, address=self._servers.address)
        announce_all(transfer)
        try:
            await transfer.commit(11, FIRST_TOKEN)
        except MeshError:
            await pair.receiver.abort(reservation.transfer_id)
            await asyncio.sleep(random.uniform(0, 0.05))  # a router, too, waits a little before it tries again
            return False
        return pair.target.blocks(reservation.block_ids) == pair.source.blocks((1, 2, 3))


class Servers:
    """The receiver's server, again and again at the same address."""

    def __init__(self, pair: Pair) -> None:
        self._pair = pair
        self._server: Server
        self._port = 0

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self._port}"

    async def restart(self) -> None:
        """Cut what is connected, and listen again."""
        await self.stop()
        await self.start()

    async def start(self) -> None:
        self._server = Server(Listen("127.0.0.1", self._port, KEY))
        self._port = self._server.port
        self._pair.receiver.add_to(self._server.grpc)
        await self._server.start([SERVICE_NAME])

    async def stop(self) -> None:
        await self._server.stop(0)


@asynccontextmanager
async def cuts(pair: Pair) -> AsyncIterator[Cuts]:
    servers = Servers(pair)
    await servers.start()
    cuts = Cuts(pair, servers)
    cutting = asyncio.create_task(cuts.cut())
    yield cuts
    cutting.cancel()
    await asyncio.wait([cutting])
    await servers.stop()


@pytest.mark.soak
@pytest.mark.timeout(300 + NUM_TRANSFERS // 10)
@pytest.mark.parametrize("transport", ["shm", "grpc", "gloo"])
async def test_transfers_over_connections_that_break(transport: str, tmp_path: Path, evidence: Evidence) -> None:
    count = NUM_TRANSFERS // 2 // NUM_AT_ONCE
    pair = Pair(tmp_path, transport)
    # Whole transfers in a chunk, and room for all: it is the conversation that is tried here.
    pair.settings = replace(pair.settings, chunk_bytes=1 << 20)
    async with pair.running(), cuts(pair) as running:
        await asyncio.gather(*(running.run_some(client, count) for client in range(NUM_AT_ONCE)))
        assert running.num_cuts >= min(1, running.num_done // CUT_EVERY - 1)
        evidence(
            "R24",
            f"{transport} transfers done, over {running.num_cuts} cuts of all connections",
            f"{running.num_done} of {count * NUM_AT_ONCE} ({running.num_retried} repeated)",
            target="all, 0 restarts by hand",
            ok=running.num_done == count * NUM_AT_ONCE,
        )
        assert pair.receiver._incoming == {}


@pytest.mark.soak
async def test_a_stalled_forward_pass_loses_no_lease(evidence: Evidence) -> None:
    await check_stalled_pass(lease_s=10.0, stall_s=30.0, evidence=evidence)


@pytest.mark.soak
@pytest.mark.timeout(300 + NUM_CLEAN // 20)
async def test_clean_transfers_raise_no_alarm(evidence: Evidence) -> None:
    await check_no_false_alarms(NUM_CLEAN, evidence)


@pytest.mark.soak
@pytest.mark.timeout(300 + 60 * NUM_STORMS)
async def test_storms_of_cancellations(evidence: Evidence) -> None:
    await check_storms(NUM_STORMS, num_rounds=5, evidence=evidence)

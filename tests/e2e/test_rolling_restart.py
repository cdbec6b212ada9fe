"""Every service of a mesh is restarted in turn, under load: no request may fail. Part of `make chaos`."""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

import tandem
from tests.chaos.cluster import Cluster, Shape, running
from tests.evidence import Evidence
from tests.waiting import LIMIT_S, until

pytestmark = pytest.mark.soak

NUM_CLIENTS = 4
ROUTER_GRACE_S = 10.0
WORKER_GRACE_S = 30.0
# For the last statuses to leave, and for the process to end.
MARGIN_S = 5.0
REQUESTS = [
    {"token_ids": [(13 * i + j) % 256 for j in range(8 + 11 * i)], "max_new_tokens": 16 + i, "ignore_eos": True}
    for i in range(6)
]


class Load:
    """Clients that ask without pause, and compare every answer with an undisturbed one."""

    def __init__(self, client: tandem.AsyncClient, requests: Sequence[Mapping[str, Any]] = REQUESTS) -> None:
        self._client = client
        self._requests = requests
        self._expected: list[list[int]] = []
        self._stop = asyncio.Event()
        self.num_done = 0
        self.failures: list[str] = []

    async def learn(self) -> None:
        self._expected = [await self._ids(number) for number in range(len(self._requests))]

    async def run(self, first: int) -> None:
        number = first
        while not self._stop.is_set():
            number = (number + 1) % len(self._requests)
            try:
                if await self._ids(number) != self._expected[number]:
                    self.failures.append("other tokens")
            except tandem.TandemError as error:
                self.failures.append(f"{type(error).__name__}: {error}")
            self.num_done += 1

    async def more(self, count: int) -> None:
        """Return when this many more requests are done."""
        wanted = self.num_done + count
        await until(lambda: self.num_done >= wanted, state=lambda: (self.num_done, self.failures))

    def stop(self) -> None:
        self._stop.set()

    async def _ids(self, number: int) -> list[int]:
        result = await self._client.generate(**self._requests[number])
        return [token.id for token in result.tokens]


async def health_until_gone(address: str, is_watched: asyncio.Event) -> list[int]:
    """The health statuses of a service from now until its end."""
    said = []
    async with grpc.aio.insecure_channel(address) as channel:
        call = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
        try:
            async for answer in call:
                said.append(answer.status)
                is_watched.set()
        except grpc.aio.AioRpcError:
            pass
    return said


async def restart(cluster: Cluster, name: str) -> tuple[float, int, bool]:
    """Seconds until it had ended, its exit status, and whether it said NOT_SERVING before."""
    is_watched = asyncio.Event()
    address = f"127.0.0.1:{cluster.proxies[name].port}"
    watch = asyncio.create_task(health_until_gone(address, is_watched))
    await asyncio.wait_for(is_watched.wait(), LIMIT_S)
    started_s = time.monotonic()
    end = await cluster.restart(name)
    took_s = end.at_s - started_s
    said = await asyncio.wait_for(watch, LIMIT_S)
    status = health_pb2.HealthCheckResponse
    return took_s, end.status, said == [status.SERVING, status.NOT_SERVING]


@pytest.mark.timeout(400)
async def test_each_service_restarted_in_turn_under_load(
    checkpoint: Callable[[str], Path], tmp_path: Path, evidence: Evidence
) -> None:
    shape = Shape(checkpoint("llama-tied"), tmp_path, num_prefill=1, num_decode=2)
    async with running(shape) as cluster:
        addresses = ",".join(f"127.0.0.1:{cluster.proxies[name].port}" for name in cluster.routers)
        async with tandem.AsyncClient(addresses, timeout=60) as client:
            load = Load(client)
            await load.learn()
            clients = [asyncio.create_task(load.run(first)) for first in range(NUM_CLIENTS)]
            ends = {}
            for name in cluster.nodes:
                await load.more(2 * NUM_CLIENTS)
                ends[name] = await restart(cluster, name)
                await cluster.wait_whole()
            await load.more(2 * NUM_CLIENTS)
            load.stop()
            await asyncio.gather(*clients)
        await cluster.wait_at_rest()
        assert [end for end in cluster.exits() if not end.wanted] == []
    failed = f"{len(load.failures)} of {load.num_done}"
    evidence("R10", "requests that failed while 5 services restarted in turn", failed, target="0", ok=not load.failures)
    told = [name for name, (_, status, told_first) in ends.items() if told_first and status == 0]
    evidence("R10", "services that said NOT_SERVING first and exited with 0", f"{len(told)} of {len(ends)}",
             target="all", ok=len(told) == len(ends))  # fmt: skip
    for role, grace_s in (("router", ROUTER_GRACE_S), ("prefill", WORKER_GRACE_S), ("decode", WORKER_GRACE_S)):
        slowest_s = max(took_s for name, (took_s, _, _) in ends.items() if name.startswith(role))
        evidence("R10", f"{role}: slowest exit", f"{slowest_s:.1f} s", target=f"<= {grace_s:g} s",
                 ok=slowest_s <= grace_s, is_reported_only=True)  # fmt: skip
        assert slowest_s <= grace_s + MARGIN_S
    assert load.failures == []

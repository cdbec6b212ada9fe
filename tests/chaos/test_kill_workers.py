"""`make chaos`: workers are killed under load, again and again; every stream is held against an undisturbed run.

TANDEM_CHAOS_ROUNDS sets how many kills (default 20).
"""

import asyncio
import os
import random
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

import tandem
from tests.e2e.mesh_process import MeshProcess, mesh, pools_are_whole

ROUNDS = int(os.environ.get("TANDEM_CHAOS_ROUNDS", "20"))
NUM_CLIENTS = 6
MODULES = ("decode_worker", "prefill_worker")


def request(rng: random.Random) -> dict[str, object]:
    """One of a small set, so that each has an undisturbed run to be compared with."""
    i = rng.randrange(12)
    return {
        "token_ids": [(13 * i + j) % 256 for j in range(5 + 25 * i)],
        "max_new_tokens": 40 + 10 * i,
        "temperature": 0.9 if i % 2 else 0.0,
        "presence_penalty": 0.5 if i % 3 == 0 else 0.0,
        "seed": i,
        "ignore_eos": True,
    }


class Load:
    """Clients that ask without pause and compare every answer."""

    def __init__(self, client: tandem.AsyncClient) -> None:
        self._client = client
        self._expected: dict[str, list[int]] = {}
        self.num_checked = 0

    async def learn(self) -> None:
        """Undisturbed runs of all requests."""
        rng = random.Random(0)
        while len(self._expected) < 12:
            wanted = request(rng)
            self._expected[str(wanted)] = await self._ids(wanted)

    async def run(self, seed: int, stop: asyncio.Event) -> None:
        """One client's requests until told to stop."""
        rng = random.Random(seed)
        while not stop.is_set():
            wanted = request(rng)
            assert await self._ids(wanted) == self._expected[str(wanted)]
            self.num_checked += 1

    async def _ids(self, wanted: dict[str, object]) -> list[int]:
        """Token ids, with exactly one terminal event, at the end."""
        events = [event async for event in self._client.stream(**wanted)]
        assert [event.finish_reason for event in events if event.finish_reason] == ["length"]
        assert events[-1].finish_reason == "length"
        return [event.token.id for event in events]


async def kill_one(running: MeshProcess, rng: random.Random) -> None:
    """SIGKILL a worker once all workers are up, so that a spare is left."""
    while len(running.pids("decode_worker")) < 2 or not running.pids("prefill_worker"):  # noqa: ASYNC110
        await asyncio.sleep(0.2)
    module = rng.choice(MODULES)
    running.signal(module, signal.SIGKILL, rng.randrange(len(running.pids(module))))


@pytest.mark.soak
@pytest.mark.timeout(120 + 30 * ROUNDS)
async def test_workers_killed_over_and_over(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    rng = random.Random(1)
    async with (
        mesh(checkpoint("llama-tied"), tmp_path, "--decode", "2") as running,
        tandem.AsyncClient(running.address) as client,
    ):
        load, stop = Load(client), asyncio.Event()
        await load.learn()
        clients = [asyncio.create_task(load.run(seed, stop)) for seed in range(NUM_CLIENTS)]
        for _ in range(ROUNDS):
            await asyncio.sleep(rng.uniform(0.5, 3.0))
            await kill_one(running, rng)
            # A restarted worker counts once it serves: wait until the mesh has its three workers again.
            while sum(worker.state == "ready" for worker in await client.workers()) < 3:  # noqa: ASYNC110
                await asyncio.sleep(0.2)
        stop.set()
        await asyncio.gather(*clients)
        assert load.num_checked > ROUNDS
        await pools_are_whole(client)

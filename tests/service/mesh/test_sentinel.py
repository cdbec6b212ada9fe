"""Redis behind sentinels, and Redis Cluster: routers and workers follow the master, and a failover under load loses no
permit and no stream."""

import asyncio
import math
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

import tandem
from checkpoint.model_facts import read_model_facts
from mesh.domain.errors import ConfigurationError
from mesh.redis_connection import FAILURES, WORKERS, name_in, open_redis, require_registry
from mesh.rpc.credentials import Credentials, MeshKey
from router.__main__ import RouterProcess
from router.settings import RouterSettings
from tests.evidence import Evidence
from tests.fakes.redis_server import Clustered, Watched, free_port, num_leased
from tests.fakes.router_model import write_checkpoint
from tests.fakes.router_workers import FakeDecodeWorker, expected_tokens
from tests.service.mesh.test_registry import FakeEngine
from tests.waiting import until, until_told
from worker.redis_registration import RedisRegistration
from worker.registration import Registration

KEY = "sentinel " * 4
CAP = 6
NUM_TOKENS = 400  # at 20 ms each: longer than a failover
Replicated = Watched | Clustered


@pytest.fixture(params=[Watched, Clustered])
async def watched(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Replicated]:
    watched: Replicated = request.param(tmp_path)
    try:
        await watched.start()
        yield watched
    finally:
        watched.stop()


@asynccontextmanager
async def decode_worker(url: str, model_dir: Path) -> AsyncIterator[FakeDecodeWorker]:
    """A worker that is registered in Redis."""
    fingerprint = read_model_facts(model_dir).tokenizer_fingerprint
    identity = {"model": "tiny", "tokenizer_fingerprint": fingerprint, "num_blocks": 1024, "max_model_len": 1024}
    worker = FakeDecodeWorker("decode-0", mesh_key=KEY, **identity)
    worker.pace_s = 0.02
    await worker.start()
    registration = Registration(worker.info, FakeEngine(), Credentials(MeshKey(KEY)))
    running = asyncio.create_task(RedisRegistration(url, MeshKey(KEY), registration).run())
    try:
        yield worker
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await worker.kill()


@asynccontextmanager
async def two_routers(url: str, model_dir: Path) -> AsyncIterator[list[RouterProcess]]:
    settings = RouterSettings(model=str(model_dir), port=0, registry_url=url, mesh_key=KEY, max_concurrent_requests=CAP)
    routers = [RouterProcess(settings) for _ in range(2)]
    try:
        await asyncio.gather(*(router.start() for router in routers))
        for router in routers:
            await until(lambda router=router: router.model_routers[0].mesh.has_path)
            await until(lambda router=router: router.model_routers[0].limiter.share == CAP // 2)
        yield routers
    finally:
        await asyncio.gather(*(router.stop(0.2) for router in routers))


async def until_leased(watched: Replicated, count: int) -> None:
    """Return when the master, whichever it is, has this many leases."""

    async def num_leased_there() -> int | None:
        try:
            async with watched.client() as redis:
                return await num_leased(redis, "tiny")
        except FAILURES:
            return None  # there is no master now

    await until_told(num_leased_there, lambda found: found == count)


async def test_a_failover_under_load_loses_no_permit_and_no_stream(
    watched: Replicated, tmp_path: Path, evidence: Evidence
) -> None:
    """Three streams at each router hold all permits. The master is killed in their middle."""
    model_dir = write_checkpoint(tmp_path / "tiny")
    async with decode_worker(watched.url, model_dir) as worker, two_routers(watched.url, model_dir) as routers:
        clients = [tandem.AsyncClient(router.public.address, max_retries=0) for router in routers]
        prompts = [[65 + number, 66] for number in range(CAP)]
        streams = [
            asyncio.create_task(clients[number % 2].generate(token_ids=prompt, max_new_tokens=NUM_TOKENS))
            for number, prompt in enumerate(prompts)
        ]
        await until(lambda: worker.num_running == CAP)
        watched.master.stop()
        await until_leased(watched, CAP)
        for client in clients:  # the cap of both together holds at the new master
            with pytest.raises(tandem.Overloaded):
                await client.generate(token_ids=[80], max_new_tokens=1)
        assert not any(stream.done() for stream in streams), "they have ended before the failover"
        results = await asyncio.gather(*streams)
        await until_leased(watched, 0)
        async with watched.client() as redis:
            assert await redis.zrange(name_in(redis, WORKERS), 0, -1) == [b"decode-0"]
        for client in clients:
            assert (await client.generate(token_ids=[80], max_new_tokens=1)).tokens
            await client.close()
    wrong = sum(
        [token.id for token in result.tokens] != expected_tokens(prompt, NUM_TOKENS)
        for prompt, result in zip(prompts, results, strict=True)
    )
    evidence("R9", "streams lost or changed by a failover of Redis", f"{wrong} of {CAP}", target="0", ok=not wrong)
    assert wrong == 0


async def test_a_client_follows_a_planned_failover(tmp_path: Path) -> None:
    """The old master lives on, and keeps connections open: only its answers tell that it is a replica now."""
    cluster = Clustered(tmp_path)
    try:
        await cluster.start()
        async with cluster.client() as redis, cluster.replica.client() as new_master:
            await redis.set(f"{cluster.prefix}x", 1)

            last_asked = -math.inf

            async def role() -> object:
                nonlocal last_asked
                found = (await new_master.info("replication"))["role"]
                # A failover that takes 5 s is given up; one that is asked for while it goes on begins anew.
                if found != "master" and time.monotonic() - last_asked > 6:
                    last_asked = time.monotonic()
                    await new_master.execute_command("CLUSTER", "FAILOVER")
                return found

            await until_told(role, lambda found: found == "master")

            async def written() -> bool:
                try:
                    return bool(await redis.set(f"{cluster.prefix}x", 2))
                except FAILURES:
                    return False

            await until_told(written, bool)
            assert await new_master.get(f"{cluster.prefix}x") == b"2"
    finally:
        cluster.stop()


async def test_an_operators_url_may_name_sentinels_that_are_away(watched: Replicated) -> None:
    async with watched.client() as redis:
        await redis.set(f"{watched.prefix}x", 1)
    async with watched.master.client() as redis:
        assert await redis.get(f"{watched.prefix}x") == b"1"


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("redis+sentinel://localhost:1", "registry_url cannot be used"),
        ("redis+sentinel://localhost:1,localhost:x/mesh", "registry_url cannot be used"),
        ("redis+sentinel://localhost:1,/mesh", "registry_url cannot be used"),
        ("redis+sentinel://:a/b@localhost:1/mesh", "registry_url cannot be used"),
        ("redis+cluster://localhost:1/3", "registry_url cannot be used"),
        ("redis+cluster://localhost:1,:2", "registry_url cannot be used"),
        ("redis://[::1:6379", r"registry_url must be redis://HOST:PORT/DB"),
        ("sentinel://localhost:1/mesh", r"must be redis://HOST:PORT/DB, redis\+sentinel://.* redis\+cluster://"),
    ],
)
def test_wrong_urls_are_said_in_words(url: str, said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        open_redis_of(url)


def open_redis_of(url: str) -> None:
    require_registry(url, MeshKey(KEY))
    open_redis(url)


async def test_options_in_the_url_go_before_the_usual_ones() -> None:
    async with open_redis("redis+sentinel://localhost:1/mesh/3?socket_timeout=7") as redis:
        options = redis.connection_pool.connection_kwargs
        assert (options["socket_timeout"], options["socket_connect_timeout"], options["db"]) == (7.0, 1.0, 3)


async def test_without_any_sentinel_redis_is_away() -> None:
    async with open_redis(f"redis+sentinel://127.0.0.1:{free_port()}/mesh") as redis:
        with pytest.raises(FAILURES):
            await redis.ping()

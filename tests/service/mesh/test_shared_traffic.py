"""Shares of revisions that routers know from each other, through Redis."""

import asyncio

from structlog.testing import capture_logs

from mesh.redis_connection import TRAFFIC
from mesh.rpc.credentials import Credentials, MeshKey
from router.traffic import Traffic, TrafficTable
from router.workers.membership import Membership
from router.workers.redis_registry import RedisRegistry
from tests.fakes.redis_server import RedisServer
from tests.waiting import until

KEY = MeshKey("traffic " * 4)


class Sharing:
    """A router's part in Redis, with its traffic."""

    def __init__(self, url: str, key: MeshKey = KEY) -> None:
        self.traffic = Traffic(TrafficTable({}), ["v1", "v2"], lambda model: True)
        self.registry = RedisRegistry(url, Membership(lambda: 0.0), Credentials(key), self.traffic)
        self.task = asyncio.create_task(self.registry.run())

    async def knows(self, shares: dict[str, float]) -> None:
        await until(lambda: self.traffic.table.shares.get("chat") == shares)


async def test_routers_share_the_traffic_through_redis(redis_server: RedisServer) -> None:
    routers = [Sharing(redis_server.url) for _ in range(2)]
    routers[0].traffic.share_out("chat", {"v1": 90, "v2": 10})
    await routers[1].knows({"v1": 90, "v2": 10})
    routers[1].traffic.share_out("chat", {"v1": 50, "v2": 50})
    await routers[0].knows({"v1": 50, "v2": 50})
    async with redis_server.client() as redis:
        await redis.flushall()  # as after a failover to an empty one
        late = Sharing(redis_server.url)
        await late.knows({"v1": 50, "v2": 50})
        foreign = Sharing(redis_server.url, MeshKey("another " * 4))
        with capture_logs() as logs:
            await until(lambda: any(line["event"] == "traffic refused" for line in logs))
        assert foreign.traffic.table.shares == {}
        assert await redis.exists(TRAFFIC)
    tasks = [router.task for router in (*routers, late, foreign)]
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_routers_that_are_told_of_different_names_at_once_learn_both(redis_server: RedisServer) -> None:
    routers = [Sharing(redis_server.url) for _ in range(2)]
    routers[0].traffic.share_out("chat", {"v1": 90, "v2": 10})
    routers[1].traffic.share_out("code", {"v2": 1})
    for router in routers:
        await until(lambda router=router: router.traffic.table.shares.keys() == {"chat", "code"})
        router.task.cancel()
    await asyncio.gather(*(router.task for router in routers), return_exceptions=True)


async def test_a_redis_that_refuses_the_traffic_is_named_and_discovery_goes_on(redis_server: RedisServer) -> None:
    async with redis_server.client() as redis:
        await redis.acl_setuser("default", enabled=True, nopass=True, commands=["-set"])
    router = Sharing(redis_server.url)
    await until(router.registry.connected.is_set)
    with capture_logs() as logs:
        router.traffic.share_out("chat", {"v1": 90, "v2": 10})
        await until(lambda: any(line["event"].startswith("other routers do not get") for line in logs))
        await asyncio.sleep(2.5)  # two more rounds
    assert router.registry.connected.is_set()
    assert not [line for line in logs if "discovery" in str(line)]
    router.task.cancel()
    await asyncio.gather(router.task, return_exceptions=True)

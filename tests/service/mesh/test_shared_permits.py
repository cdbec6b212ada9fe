"""Permits shared by routers: never above the cap, given back exactly once, and what holds while Redis is away."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator

import pytest
from redis.exceptions import ResponseError

from mesh.domain.errors import Overloaded
from router.admission.permit_leases import LeaseTimes, PermitRequest, PermitStore
from router.admission.shared_limiter import SharedLimiter
from router.tenants import Tenant
from tests.defects import Repaired
from tests.fakes.redis_server import RedisServer, num_leased
from tests.waiting import LIMIT_S, until

CAP = 6
TIMES = LeaseTimes(lease_s=0.8, renew_s=0.2)
ALICE = Tenant("alice", max_concurrent_requests=3)


class Routers:
    """Some routers of one mesh."""

    def __init__(self, server: RedisServer) -> None:
        self.server = server
        self.tasks: dict[SharedLimiter, asyncio.Task[None]] = {}

    async def start(self, count: int) -> list[SharedLimiter]:
        for _ in range(count):
            permits = SharedLimiter(self.server.url, f"router-{len(self.tasks)}", CAP, TIMES)
            self.tasks[permits] = asyncio.create_task(permits.run())
        await until(lambda: all(p.connected.is_set() and p.share == CAP // count for p in self.tasks))
        return list(self.tasks)

    async def kill(self, permits: SharedLimiter) -> None:
        """As a dead router: nothing is given back."""
        self.tasks[permits].cancel()
        await asyncio.gather(self.tasks[permits], return_exceptions=True)

    async def num_leased(self) -> int:
        async with self.server.client() as redis:
            return await num_leased(redis)


async def until_acquired(permits: SharedLimiter, count: int, timeout_s: float) -> None:
    async with asyncio.timeout(timeout_s):
        while True:
            try:
                await permits.acquire(count)
                return
            except Overloaded:
                await asyncio.sleep(0.02)


@pytest.fixture
async def routers(redis_server: RedisServer) -> AsyncIterator[Routers]:
    routers = Routers(redis_server)
    yield routers
    for permits in routers.tasks:
        await routers.kill(permits)


async def test_two_routers_never_pass_the_cap_in_a_storm_with_cancellations(routers: Routers) -> None:
    both = await routers.start(2)
    held, most, outcomes = 0, 0, {"served": 0, "refused": 0, "cancelled": 0}

    async def request(permits: SharedLimiter, number: int) -> None:
        nonlocal held, most
        count = 1 + number % 3
        try:
            await permits.acquire(count)
        except Overloaded:
            outcomes["refused"] += 1
            return
        except asyncio.CancelledError:
            outcomes["cancelled"] += 1
            raise
        held += count
        most = max(most, held)
        for _ in range(number % 7):
            await asyncio.sleep(0)
        held -= count
        for _ in range(count):
            permits.release()
        outcomes["served"] += 1

    for _ in range(5):
        tasks = [asyncio.create_task(request(both[n % 2], n)) for n in range(200)]
        for number, task in enumerate(tasks):
            if number % 5 == 0:
                await asyncio.sleep(0)
                task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert all(permits.num_held == 0 for permits in both)
    assert 0 < most <= CAP
    assert min(outcomes.values()) > 0
    await until_acquired(both[0], CAP, LIMIT_S)  # all of them are there again
    for _ in range(CAP):
        both[0].release()


async def test_held_permits_outlive_their_lease_and_a_dead_routers_do_not(routers: Routers) -> None:
    alive, dying = await routers.start(2)
    await dying.acquire(CAP)
    async with asyncio.timeout(LIMIT_S):
        for _ in range(12):  # longer than a lease
            started_s = time.monotonic()
            with pytest.raises(Overloaded, match="6 of 6"):
                await alive.acquire(1)
            assert time.monotonic() - started_s < 0.5
            await asyncio.sleep(0.1)
    await routers.kill(dying)
    await until_acquired(alive, CAP, TIMES.lease_s + 0.5)
    await until(lambda: alive.share == CAP)  # the dead router counts no more


async def test_a_tenants_cap_holds_over_all_routers(routers: Routers) -> None:
    first, second = await routers.start(2)
    await first.acquire(2, ALICE)
    with pytest.raises(Overloaded, match="2 of your 3"):
        await second.acquire(2, ALICE)
    await second.acquire(1, ALICE)
    await second.acquire(2, Tenant("bob"))
    first.release("alice")
    await until_acquired(second, 1, 1)


async def test_redis_away_each_router_has_its_share_and_heals(routers: Routers, redis_server: RedisServer) -> None:
    first, second = await routers.start(2)
    await first.acquire(1)
    await second.acquire(3)
    redis_server.stop()
    await first.acquire(2)
    for permits in (first, second):
        started_s = time.monotonic()
        with pytest.raises(Overloaded, match="3 of 6"):
            await permits.acquire(1)
        assert time.monotonic() - started_s < 0.5
    second.release()
    await until(lambda: not second.connected.is_set())
    started_s = time.monotonic()
    await second.acquire(1)
    with pytest.raises(Overloaded):
        await second.acquire(1)
    assert time.monotonic() - started_s < 0.5
    await redis_server.start()
    await until(lambda: first.connected.is_set() and second.connected.is_set())
    assert await routers.num_leased() == 6
    with pytest.raises(Overloaded, match="6 of 6"):
        await first.acquire(1)
    second.release()
    await until_acquired(first, 1, 2)  # Redis decides again, not the share


async def test_no_cap_is_passed_while_leases_are_written_anew(routers: Routers, redis_server: RedisServer) -> None:
    first, second = await routers.start(2)
    await second.acquire(4)
    async with redis_server.client() as redis:
        await redis.flushall()
        while not await redis.exists("tandem:settling"):  # noqa: ASYNC110
            await asyncio.sleep(0.002)
    granted = 0
    for _ in range(CAP):
        try:
            await first.acquire(1)
            granted += 1
        except Overloaded:
            await asyncio.sleep(0.02)
    assert granted <= 3
    assert all(permits.share == 3 for permits in (first, second))


async def test_after_longer_than_a_lease_out_of_reach_the_others_are_waited_for(redis_server: RedisServer) -> None:
    """Both routers live, hold all permits, and find their leases expired. The first to return gets no one else's."""
    first, second = PermitStore("first", TIMES), PermitStore("second", TIMES)
    take = PermitRequest("", None, CAP, 1)
    async with redis_server.client() as redis:
        for store in (first, second):
            await store.exchange(redis, 2, 3, {"": 3})
        await asyncio.sleep(TIMES.lease_s)
        known, [taken] = await first.exchange(redis, 2, 3, {}, [take], allowance=3)
        assert known.settling
        assert not taken.granted
        await second.exchange(redis, 2, 3, {})
        assert await num_leased(redis) == CAP
        _, [taken] = await first.exchange(redis, 2, 3, {}, [take], allowance=3)
        assert not taken.granted


async def test_a_round_trip_that_redis_executes_late_changes_nothing(redis_server: RedisServer) -> None:
    """As after a Redis that hung: it executes what the router no longer waits for, perhaps after what came later."""
    permits, late = PermitStore("router", TIMES), PermitStore("router", TIMES)
    async with redis_server.client() as redis:
        await permits.exchange(redis, 1, 1, {"alice": 1})
        await permits.exchange(redis, 1, 3, {"alice": 3})
        with pytest.raises(ResponseError, match="newer counts"):
            await late.exchange(redis, 1, 0, {"alice": 0}, [PermitRequest("bob", None, CAP, 2)], allowance=CAP)
        assert await num_leased(redis) == 3
        other = PermitStore("other", TIMES)
        _, [taken] = await other.exchange(redis, 2, 0, {}, [PermitRequest("alice", 3, CAP, 1)])
        assert (taken.by_tenant, taken.num_held) == (True, 3)


async def test_a_grant_whose_answer_was_lost_is_taken_back(redis_server: RedisServer) -> None:
    """The router counts on without it, and tells so in its next round trip."""
    permits = PermitStore("router", TIMES)
    async with redis_server.client() as redis:
        await permits.exchange(redis, 1, 0, {}, [PermitRequest("alice", None, CAP, 1)])
        await permits.exchange(redis, 1, 1, {"alice": 1}, [PermitRequest("alice", None, CAP, 4)])
        assert await num_leased(redis) == 5
        known, _ = await permits.exchange(redis, 1, 1, {"alice": 1})
        assert (known.num_leased, known.settling) == (1, False)


async def test_a_tenants_cap_holds_after_redis_has_lost_its_data(routers: Routers, redis_server: RedisServer) -> None:
    first, second = await routers.start(2)
    await first.acquire(2, ALICE)
    async with redis_server.client() as redis:
        await redis.flushall()
        while await num_leased(redis) != 2 or await redis.exists("tandem:settling"):  # noqa: ASYNC110
            await asyncio.sleep(0.02)
    with pytest.raises(Overloaded, match="2 of your 3"):
        await second.acquire(2, ALICE)
    await second.acquire(1, ALICE)


async def test_a_renewal_costs_the_same_for_any_number_of_permits(redis_server: RedisServer) -> None:
    permits = PermitStore("router", TIMES)
    costs = []
    async with redis_server.client() as redis:
        for held in (1, 100_000):
            await permits.exchange(redis, 1, held, {f"tenant-{number}": held // 10 for number in range(10)})
            before = int((await redis.info("stats"))["total_commands_processed"])
            await permits.exchange(redis, 1, held, {})
            costs.append(int((await redis.info("stats"))["total_commands_processed"]) - before)
        assert await num_leased(redis) == 100_000
    assert costs[1] <= costs[0]


async def test_a_router_that_is_late_is_waited_for_a_lease(routers: Routers, redis_server: RedisServer) -> None:
    first, second = await routers.start(2)
    await first.acquire(2)
    await second.acquire(3)
    await asyncio.sleep(2 * TIMES.renew_s)  # each hears what the other holds
    await routers.kill(second)
    lost_s = time.monotonic()
    async with redis_server.client() as redis:
        await redis.flushall()
    while time.monotonic() - lost_s < TIMES.lease_s + 2 * TIMES.renew_s:
        with contextlib.suppress(Overloaded):
            await first.acquire(2)
            break
        await asyncio.sleep(0.02)
    age_s = time.monotonic() - lost_s  # at the grant: a call begins earlier, and may wait
    assert age_s > 2 * TIMES.settling_ms / 1000, "its leases may come back"
    await first.acquire(2)  # a whole lease is over: it holds none


async def test_redis_hangs(routers: Routers, redis_server: RedisServer) -> None:
    (permits,) = await routers.start(1)
    redis_server.pause()
    started_s = time.monotonic()
    waiting = [asyncio.create_task(permits.acquire(1)) for _ in range(CAP + 2)]
    done = await asyncio.gather(*waiting, return_exceptions=True)
    assert time.monotonic() - started_s < 1
    assert [type(error) for error in done if isinstance(error, Exception)] == [Overloaded] * 2
    redis_server.resume()
    await until(permits.connected.is_set)
    assert await routers.num_leased() == permits.num_held == CAP


async def test_a_server_that_has_become_a_replica_is_left(routers: Routers, redis_server: RedisServer) -> None:
    """It keeps the connections that it has; its name leads to the new master by then, which only a new one finds."""
    (permits,) = await routers.start(1)
    async with redis_server.client() as redis:

        async def num_connections() -> int:
            return int((await redis.info("stats"))["total_connections_received"])

        await redis.execute_command("REPLICAOF", "127.0.0.1", "1")
        await until(lambda: not permits.connected.is_set())
        before = await num_connections()
        async with asyncio.timeout(LIMIT_S):
            while await num_connections() == before:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        await redis.execute_command("REPLICAOF", "NO", "ONE")
        await until(permits.connected.is_set)


async def test_a_router_that_stops_gives_everything_back_at_once(routers: Routers) -> None:
    first, second = await routers.start(2)
    await first.acquire(CAP)
    await routers.kill(first)
    await first.leave()
    await second.acquire(CAP)


async def test_an_hour_without_redis_heals(redis_server: RedisServer, repaired: Repaired) -> None:
    num_seconds, num_each = 3600, 100
    permits = SharedLimiter(redis_server.url, "router", num_each, LeaseTimes())
    run = asyncio.create_task(permits.run())
    await until(permits.connected.is_set)
    await permits.acquire(2)
    redis_server.stop()
    await until(lambda: not permits.connected.is_set())
    for _ in range(num_seconds):
        for _ in range(num_each):
            await permits.acquire(1)
            permits.release()
        await asyncio.sleep(0)
    assert permits._holdings.untold == {""}
    loop_stops, stop = [0.0], asyncio.Event()

    async def watch_loop() -> None:
        while not stop.is_set():
            begun_s = time.monotonic()
            await asyncio.sleep(0.001)
            loop_stops.append(time.monotonic() - begun_s)

    watch = asyncio.create_task(watch_loop())
    begun_s = time.monotonic()
    await redis_server.start()
    await until(permits.connected.is_set)
    took_s = time.monotonic() - begun_s
    await until(lambda: not permits._holdings.untold)
    stop.set()
    await watch
    async with redis_server.client() as redis:
        assert await num_leased(redis) == permits.num_held == 2
    await permits.acquire(num_each - 2)
    with pytest.raises(Overloaded):
        await permits.acquire(1)
    run.cancel()
    await asyncio.gather(run, return_exceptions=True)
    repaired(
        "D13",
        f"{num_seconds * num_each:,} permits given back in an hour without Redis: {took_s:.1f} s after its return they "
        f"are shared again, event loop stopped for {max(loop_stops) * 1000:.0f} ms at most",
    )


async def test_thousands_of_permits_are_given_back(routers: Routers, redis_server: RedisServer) -> None:
    permits = SharedLimiter(redis_server.url, "router", 5000, TIMES)
    routers.tasks[permits] = asyncio.create_task(permits.run())
    await until(permits.connected.is_set)
    for number in range(3000):
        await permits.acquire(1, Tenant(f"tenant-{number % 7}"))
    assert await routers.num_leased() == 3000
    for number in range(3000):
        permits.release(f"tenant-{number % 7}")
    async with asyncio.timeout(60):
        while await routers.num_leased():  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        async with redis_server.client() as redis:
            while await redis.zcard("tandem:held") > 1:  # of tenants without permits nothing stays  # noqa: ASYNC110
                await asyncio.sleep(0.01)

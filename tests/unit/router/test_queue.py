"""Limiter, work in flight and queue: exact counts, strict order, nothing left behind."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mesh.domain.errors import InvalidRequest, NoWorkers, Overloaded
from mesh.domain.worker import WorkerRole, WorkerState
from router.admission.fair_queue import QueueEntry
from router.admission.forecast import Forecast
from router.admission.in_flight import CapacityClaim, InFlightTable
from router.admission.limiter import LocalLimiter, Permit
from router.admission.placement import MeshSnapshot, Placement
from router.admission.queue import PlacementQueue
from router.admission.roster import InFlight
from router.tenants import Priority, Tenant
from router.workers.membership import WorkerView
from tests.fakes.router_views import decode, prefill, query, snapshot

ENTRY = QueueEntry()
entries = st.builds(QueueEntry, st.sampled_from(["", "a", "b"]), st.sampled_from(Priority))


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 4))))
async def test_permits_are_exact(steps: list[tuple[bool, int]]) -> None:
    permits, held = LocalLimiter(6), list[Permit]()
    for take, count in steps:
        if take:
            if permits.num_held + count <= 6:
                held += await permits.acquire(count)
            else:
                with pytest.raises(Overloaded, match="of 6 requests are in service"):
                    await permits.acquire(count)
        elif held:
            permit = held.pop()
            permit.release()
            permit.release()
        assert permits.num_held == len(held) <= 6


async def test_tenants_are_forgotten_with_their_last_permit() -> None:
    permits = LocalLimiter(6)
    for number in range(100):
        [permit] = await permits.acquire(1, Tenant(f"tenant-{number}"))
        permit.release()
    assert not permits._held_by


class FakeMesh:
    """Views that tests change, with an in-flight table and a queue over them."""

    def __init__(self, *views: WorkerView, **changes: Any) -> None:
        self.views: Sequence[WorkerView] = views
        self.now_s = 0.0
        self.in_flight = InFlightTable(lambda: self.now_s)
        limits = {"max_queued": 10, "no_worker_timeout_s": 60.0} | changes
        self.forecast = Forecast(lambda: self.now_s)
        self.queue = PlacementQueue(self.in_flight, self.snapshot, self.forecast, **limits)
        self.in_flight.on_change(self.queue.wake)

    def snapshot(self) -> MeshSnapshot:
        return snapshot(*self.views, in_flight=self.in_flight.by_worker())


async def settled() -> None:
    """Let everything that is due run."""
    for _ in range(5):
        await asyncio.sleep(0)


def test_the_ledger_follows_an_attempt() -> None:
    mesh = FakeMesh()
    p, d = prefill(), decode(last_seen_s=0.0)
    claim = mesh.in_flight.claim(Placement(p.info, d.info), 10)
    assert mesh.in_flight.by_worker() == {"p0": InFlight(1, 3, 0, 10), "d0": InFlight(1, 4, 4, 0)}
    claim.confirm()
    mesh.in_flight.reported(decode(last_seen_s=0.05))
    assert mesh.in_flight.by_worker()["d0"].num_unreported_blocks == 4
    mesh.in_flight.reported(decode(last_seen_s=0.2))
    assert mesh.in_flight.by_worker()["d0"].num_unreported_blocks == 0
    claim.prefill_computed()
    assert mesh.in_flight.by_worker()["p0"] == InFlight(1, 3, 0, 0)
    claim.prefill_released()
    claim.grow(17)
    assert mesh.in_flight.by_worker() == {"d0": InFlight(1, 6, 0, 0)}
    claim.release()
    claim.release()
    assert mesh.in_flight.by_worker() == {}


async def test_placed_at_once_if_there_is_room() -> None:
    mesh = FakeMesh(decode())
    claim = await mesh.queue.place(query(), ENTRY)
    assert claim.placement.decode.worker_id == "d0"
    assert mesh.queue.num_queued == 0


async def test_first_come_first_served_and_replays_in_front() -> None:
    mesh = FakeMesh(decode(max_num_seqs=1))
    running = await mesh.queue.place(query(), ENTRY)
    order: list[str] = []

    async def wait(name: str, *, is_replay: bool = False) -> None:
        claim = await mesh.queue.place(query(), ENTRY, is_replay=is_replay)
        order.append(name)
        claim.release()

    tasks = [asyncio.create_task(wait(name)) for name in "abc"]
    await settled()
    tasks.append(asyncio.create_task(wait("replay", is_replay=True)))
    await settled()
    assert order == []
    assert mesh.queue.num_queued == 4
    running.release()
    await asyncio.gather(*tasks)
    assert order == ["replay", "a", "b", "c"]
    assert mesh.in_flight.by_worker() == {}


async def test_tenants_take_turns() -> None:
    mesh = FakeMesh(decode(max_num_seqs=1))
    running = await mesh.queue.place(query(), ENTRY)
    order: list[str] = []

    async def wait(tenant: str) -> None:
        claim = await mesh.queue.place(query(), QueueEntry(tenant))
        order.append(tenant)
        claim.release()

    tasks = [asyncio.create_task(wait(tenant)) for tenant in ("greedy", "greedy", "greedy", "modest")]
    await settled()
    running.release()
    await asyncio.gather(*tasks)
    assert order == ["greedy", "modest", "greedy", "greedy"]


async def test_a_big_request_is_not_overtaken() -> None:
    mesh = FakeMesh(decode())
    half = await mesh.queue.place(query(28), ENTRY)
    big = asyncio.create_task(mesh.queue.place(query(40), ENTRY))
    await settled()
    small = asyncio.create_task(mesh.queue.place(query(4), ENTRY))
    await settled()
    assert not big.done()
    assert not small.done()
    half.release()
    await asyncio.gather(big, small)


async def test_a_short_prompt_does_not_wait_behind_long_ones_for_prefill() -> None:
    mesh = FakeMesh(prefill(num_blocks=100), decode(num_blocks=100, max_num_seqs=9))
    running = await mesh.queue.place(query(40), ENTRY)
    waiting = asyncio.create_task(mesh.queue.place(query(41), ENTRY))
    await settled()
    assert mesh.queue.num_queued == 1, "two passes of long prompts are there"
    shorts = [await mesh.queue.place(query(8), ENTRY) for _ in range(4)]
    assert all(claim.placement.prefill is not None for claim in shorts)
    late = asyncio.create_task(mesh.queue.place(query(8), ENTRY))
    await settled()
    assert mesh.queue.num_queued == 2, "two passes of short prompts are there"
    running.prefill_computed()
    await settled()
    assert waiting.done(), "however many short ones there are"
    assert not late.done()
    shorts[0].prefill_computed()
    await settled()
    assert late.done()
    mesh.queue.close()


@pytest.mark.parametrize(("max_num_seqs", "role"), [(4, "prefill"), (1, "decode")])
async def test_waiting_tokens_are_told_by_the_role_that_the_head_waits_for(max_num_seqs: int, role: str) -> None:
    mesh = FakeMesh(prefill(num_blocks=100), decode(num_blocks=100, max_num_seqs=max_num_seqs))
    await mesh.queue.place(query(40), ENTRY)
    waiting = [asyncio.create_task(mesh.queue.place(query(num_tokens), ENTRY)) for num_tokens in (41, 42)]
    await settled()
    assert waiting_tokens(mesh) == {"prefill": 0, "decode": 0} | {role: 41 + 42}
    for task in waiting:
        task.cancel()
    await settled()
    assert waiting_tokens(mesh) == {"prefill": 0, "decode": 0}


def waiting_tokens(mesh: FakeMesh) -> dict[str, int]:
    return {role.value: mesh.queue.num_tokens_waiting(role) for role in WorkerRole}


async def test_a_cancelled_waiter_leaves_at_once_and_the_next_moves_up() -> None:
    mesh = FakeMesh(decode())
    await mesh.queue.place(query(28), ENTRY)
    big = asyncio.create_task(mesh.queue.place(query(40), ENTRY))
    small = asyncio.create_task(mesh.queue.place(query(4), ENTRY))
    await settled()
    big.cancel()
    await asyncio.wait_for(small, 60)
    assert big.cancelled()
    assert mesh.queue.num_queued == 0


async def test_cancelled_in_the_moment_of_placement() -> None:
    mesh = FakeMesh(decode(max_num_seqs=1))
    running = await mesh.queue.place(query(), ENTRY)
    waiting = asyncio.create_task(mesh.queue.place(query(), ENTRY))
    await settled()
    running.release()
    mesh.queue._pump()  # placed, but the waiter has not run yet
    waiting.cancel()
    await settled()
    assert waiting.cancelled()
    assert mesh.in_flight.by_worker() == {}


async def test_a_full_queue_refuses_new_requests_but_no_replay() -> None:
    mesh = FakeMesh(decode(max_num_seqs=1), max_queued=1)
    await mesh.queue.place(query(), ENTRY)
    tasks = [asyncio.create_task(mesh.queue.place(query(), ENTRY))]
    await settled()
    with pytest.raises(Overloaded):
        await mesh.queue.place(query(), ENTRY)
    tasks.append(asyncio.create_task(mesh.queue.place(query(), ENTRY, is_replay=True)))
    await settled()
    assert mesh.queue.num_queued == 2
    for task in tasks:
        task.cancel()


async def test_a_tenant_leaves_places_for_others() -> None:
    mesh = FakeMesh(decode(max_num_seqs=1), max_queued=8)
    await mesh.queue.place(query(), ENTRY)
    tasks: list[asyncio.Task[CapacityClaim]] = []

    async def joined(tenant: str) -> int:
        """How many of the tenant's requests find a place before one is refused."""
        for count in range(9):
            tasks.append(asyncio.create_task(mesh.queue.place(query(), QueueEntry(tenant))))
            await settled()
            if tasks[-1].done():
                with pytest.raises(Overloaded, match="waiting already"):
                    await tasks.pop()
                return count
        raise AssertionError("nobody is refused")

    assert [await joined(tenant) for tenant in "abcd"] == [4, 2, 1, 1]
    assert await joined("") == 0  # the queue is full
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert await joined("") == 8  # without keys there is one tenant, and the queue is its own
    for task in tasks:
        task.cancel()


class Measured(FakeMesh):
    """One decode worker with one slot, taken; the queue gives 8 tokens, one `query()`, a second to workers."""

    def __init__(self, **changes: Any) -> None:
        super().__init__(decode(max_num_seqs=1), **changes)
        self.forecast.queue.begin()
        for _ in range(20):
            self.now_s += 1.0
            self.forecast.queue.did(8)
        self.forecast.queue.end()

    async def wait(
        self, *, ttft_s: float | None = None, time_left_s: float | None = None, **entry: Any
    ) -> CapacityClaim:
        now_s = asyncio.get_running_loop().time()
        by_s, deadline_s = (None if left_s is None else now_s + left_s for left_s in (ttft_s, time_left_s))
        return await self.queue.place(query(), QueueEntry(**entry, first_token_by_s=by_s, deadline_s=deadline_s))


async def test_what_would_come_too_late_is_refused_at_once() -> None:
    mesh = Measured()
    running = await mesh.wait(ttft_s=0.5)  # there is room: no forecast is asked
    tasks = [asyncio.create_task(mesh.wait()) for _ in range(3)]
    await settled()
    with pytest.raises(Overloaded, match=r"expected in 4\.8 s") as refused:
        await mesh.wait(ttft_s=3.0)
    assert refused.value.retry_after_s == pytest.approx(1.8, abs=0.2)
    with pytest.raises(Overloaded, match=r"expected in 4\.8 s"):
        await mesh.wait(time_left_s=3.0)
    with pytest.raises(Overloaded, match=r"expected in 4\.8 s"):
        await mesh.wait(ttft_s=3.0, priority=Priority.BATCH)
    tasks.append(asyncio.create_task(mesh.wait(ttft_s=60.0, time_left_s=60.0)))
    tasks.append(asyncio.create_task(mesh.wait(ttft_s=3.0, priority=Priority.INTERACTIVE)))  # nobody is before it
    await settled()
    assert mesh.queue.num_queued == 5
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    running.release()
    await settled()
    assert mesh.in_flight.by_worker() == {}


async def test_the_first_in_line_is_not_judged_by_a_dark_forecast() -> None:
    mesh = Measured()
    mesh.forecast.queue.begin()
    mesh.now_s += 100.0  # a gap, now over
    mesh.forecast.queue.did(8)
    mesh.forecast.queue.end()
    running = await mesh.wait()
    first = asyncio.create_task(mesh.wait(ttft_s=3.0))
    await settled()
    with pytest.raises(Overloaded, match="expected in"):
        await mesh.wait(ttft_s=3.0)
    running.release()
    (await first).release()


async def test_while_nothing_is_known_everybody_may_try() -> None:
    mesh = FakeMesh(decode(max_num_seqs=1))
    running = await mesh.queue.place(query(), ENTRY)
    by_s = asyncio.get_running_loop().time() + 30
    waiting = asyncio.create_task(mesh.queue.place(query(), QueueEntry(first_token_by_s=by_s)))
    await settled()
    assert mesh.queue.num_queued == 1
    running.release()
    (await waiting).release()


async def test_who_waits_too_long_for_its_target_is_refused() -> None:
    mesh = FakeMesh(decode(max_num_seqs=1))
    running = await mesh.queue.place(query(), ENTRY)
    by_s = asyncio.get_running_loop().time() + 0.01
    others = [asyncio.create_task(mesh.queue.place(query(), ENTRY)) for _ in range(2)]
    with pytest.raises(Overloaded, match="ttft_target") as refused:
        async with asyncio.timeout(60):
            await mesh.queue.place(query(), QueueEntry(first_token_by_s=by_s))
    assert refused.value.retry_after_s > 0
    assert mesh.queue.num_queued == 2
    running.release()
    (await others[0]).release()
    (await others[1]).release()


async def test_the_target_leaves_time_for_the_way_to_the_first_token() -> None:
    mesh = FakeMesh(decode(max_num_seqs=1))
    mesh.forecast.first_token.record(1.0, 8)
    await mesh.queue.place(query(), ENTRY)
    by_s = asyncio.get_running_loop().time() + 0.9
    with pytest.raises(Overloaded, match="ttft_target"):
        await mesh.queue.place(query(), QueueEntry(first_token_by_s=by_s))


async def test_a_replay_is_never_refused() -> None:
    mesh = Measured(max_queued=1)
    running = await mesh.wait()
    queue_entry = QueueEntry(first_token_by_s=asyncio.get_running_loop().time())
    replay = asyncio.create_task(mesh.queue.place(query(), queue_entry, is_replay=True))
    await settled()
    running.release()
    (await replay).release()


async def test_the_forecast_learns_the_pace_of_the_queue_from_those_who_wait() -> None:
    mesh = FakeMesh(decode(max_num_seqs=1))
    claim = await mesh.queue.place(query(), ENTRY)
    assert mesh.forecast.queue.wait_s(0) is None
    tasks = [asyncio.create_task(mesh.queue.place(query(), ENTRY)) for _ in range(4)]
    await settled()
    for task in tasks:
        mesh.now_s += 0.5
        claim.release()
        claim = await task
        claim.first_token()
    assert mesh.forecast.queue.wait_s(0) == pytest.approx(0.5)
    mesh.now_s += 30  # nobody waits: this time does not count
    assert mesh.forecast.queue.wait_s(0) == pytest.approx(0.5)


async def test_an_outage_does_not_count_as_slowness() -> None:
    mesh = Measured()
    views, mesh.views = mesh.views, []
    waiting = asyncio.create_task(mesh.wait())
    await settled()
    mesh.now_s += 30
    mesh.views = views
    mesh.queue.wake()
    await waiting
    assert mesh.forecast.queue.wait_s(0) == pytest.approx(1.0)
    mesh.queue.close()


async def test_too_large_for_all_is_refused_at_once() -> None:
    mesh = FakeMesh(decode(num_blocks=2))
    with pytest.raises(InvalidRequest, match="12 tokens"):
        await mesh.queue.place(query(8), ENTRY)


async def test_a_replay_waits_for_workers_that_are_away_and_others_pass_it() -> None:
    big, small = decode("d1", num_blocks=64), decode("d0", num_blocks=16)
    lost = replace(big, state=WorkerState.LOST)
    mesh = FakeMesh(small, lost)
    replay = asyncio.create_task(mesh.queue.place(query(100), ENTRY, is_replay=True))
    await settled()
    assert (await mesh.queue.place(query(), ENTRY)).placement.decode == small.info
    assert mesh.queue.num_queued == 1
    mesh.views = [small, big]
    mesh.queue.wake()
    assert (await replay).placement.decode == big.info
    mesh.views = [small, lost]
    cancelled = asyncio.create_task(mesh.queue.place(query(100), ENTRY, is_replay=True))
    await settled()
    cancelled.cancel()
    await asyncio.wait([cancelled])
    assert mesh.queue.num_queued == 0


async def test_a_replay_does_not_wait_for_ever_for_workers_that_are_away() -> None:
    mesh = FakeMesh(
        decode(num_blocks=16), decode("d1", num_blocks=64, state=WorkerState.LOST), no_worker_timeout_s=0.02
    )
    with pytest.raises(NoWorkers, match="can hold 104 tokens are away"):
        await mesh.queue.place(query(100), ENTRY, is_replay=True)
    assert mesh.queue.num_queued == 0


async def test_without_decode_workers_requests_wait_then_fail_fast() -> None:
    mesh = FakeMesh(prefill(), no_worker_timeout_s=0.02)
    with pytest.raises(NoWorkers):
        await mesh.queue.place(query(), ENTRY)
    with pytest.raises(NoWorkers):  # the outage is known by now
        async with asyncio.timeout(0.01):
            await mesh.queue.place(query(), ENTRY)
    mesh.views = [decode()]
    await mesh.queue.place(query(), ENTRY)
    mesh.views = []
    waiting: asyncio.Task[CapacityClaim] = asyncio.create_task(mesh.queue.place(query(), ENTRY))
    await settled()
    assert not waiting.done()  # a new outage, a new wait
    mesh.views = [decode()]
    mesh.queue.wake()
    await asyncio.wait_for(waiting, 60)
    mesh.queue.close()


async def test_an_outage_ends_also_while_nothing_waits() -> None:
    """Otherwise the first request after a worker's restart, hours later, would be refused for the outage of then."""
    mesh = FakeMesh(prefill(), no_worker_timeout_s=0.02)
    with pytest.raises(NoWorkers):
        await mesh.queue.place(query(), ENTRY)
    mesh.views = [decode()]
    mesh.queue.wake()
    await settled()
    mesh.views = []
    waiting: asyncio.Task[CapacityClaim] = asyncio.create_task(mesh.queue.place(query(), ENTRY))
    await settled()
    assert not waiting.done()
    mesh.views = [decode()]
    mesh.queue.wake()
    await asyncio.wait_for(waiting, 60)
    mesh.queue.close()


@given(st.lists(st.tuples(st.sampled_from(["place", "cancel", "finish"]), st.integers(1, 30), entries), max_size=40))
def test_nothing_is_lost_or_left(steps: list[tuple[str, int, QueueEntry]]) -> None:
    async def run() -> None:
        mesh = FakeMesh(decode(), max_queued=5)
        tasks: list[asyncio.Task[CapacityClaim]] = []
        loop = asyncio.get_running_loop()
        for step, number, entry in steps:
            mesh.now_s += 1.0
            if step == "place":
                timed_entry = replace(
                    entry,
                    first_token_by_s=None if number % 2 else loop.time() + number / 1000,
                    deadline_s=loop.time() + number,
                )
                tasks.append(asyncio.create_task(mesh.queue.place(query(number), timed_entry)))
            elif tasks and step == "cancel":
                tasks[number % len(tasks)].cancel()
            elif tasks:
                task = tasks[number % len(tasks)]
                if task.done() and not task.cancelled() and task.exception() is None:
                    task.result().release()
            await asyncio.sleep(0)
            used = mesh.in_flight.by_worker().get("d0", InFlight())
            assert used.num_seqs <= 4
            assert used.num_blocks <= 16
        for task in tasks:
            task.cancel()
        for result in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(result, CapacityClaim):
                result.first_token()
                result.release()
            else:
                assert isinstance(result, asyncio.CancelledError | Overloaded)
        await settled()
        assert mesh.queue.num_queued == 0
        assert mesh.in_flight.by_worker() == {}

    asyncio.run(run())


def test_who_is_abandoned() -> None:
    """Those that need the worker: for its sequence, or for a prompt whose KV is still there."""
    in_flight, left = InFlightTable(lambda: 0.0), list[str]()
    p0, d0, d1 = prefill("p0").info, decode("d0").info, decode("d1").info
    placements = {"on d0": Placement(p0, d0), "on d1": Placement(p0, d1), "sent": Placement(p0, d1)}
    claims = {name: in_flight.claim(placement, 8) for name, placement in placements.items()}
    for name, claim in claims.items():
        claim.on_abandoned = lambda info, name=name: left.append(f"{name}: {info.worker_id}")  # type: ignore[misc]
    claims["sent"].prefill_released()
    in_flight.abandon(d0)
    in_flight.abandon(p0)
    assert left == ["on d0: d0", "on d0: p0", "on d1: p0"]
    claims["on d0"].release()
    in_flight.abandon(d0)
    assert len(left) == 3

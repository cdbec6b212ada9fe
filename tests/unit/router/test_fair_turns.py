"""Turns for work on texts: tenants in turn, bounded waiting, nothing lost when callers leave."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mesh.domain.errors import Overloaded
from router.text.fair_turns import FairTurns
from tests.defects import Repaired


class Desk:
    """Work that ends when it is told to."""

    def __init__(self, turns: FairTurns) -> None:
        self.turns = turns
        self.begun: list[str] = []
        self.ends: dict[str, asyncio.Future[str]] = {}

    def bring(self, name: str, tenant: str = "", num_chars: int = 0) -> "asyncio.Task[str]":
        async def work() -> str:
            self.begun.append(name)
            self.ends[name] = asyncio.get_running_loop().create_future()
            return await self.ends[name]

        return asyncio.create_task(self.turns.run(work, tenant=tenant, num_chars=num_chars))

    async def finish(self, name: str) -> None:
        self.ends[name].set_result(name)
        await settled()


async def settled() -> None:
    for _ in range(6):
        await asyncio.sleep(0)


async def test_tenants_take_turns(repaired: Repaired) -> None:
    desk = Desk(FairTurns())
    tasks = [desk.bring(f"greedy-{place}", "greedy") for place in range(20)]
    await settled()
    tasks.append(desk.bring("modest", "modest"))
    await settled()
    await desk.finish("greedy-0")
    await desk.finish("greedy-1")
    assert desk.begun == ["greedy-0", "greedy-1", "modest"]
    for name in (task_name for task_name in ("modest", *(f"greedy-{place}" for place in range(2, 20)))):
        await desk.finish(name)
    assert [await task for task in tasks] == [*(f"greedy-{place}" for place in range(20)), "modest"]
    repaired("S7", "20 texts of one tenant: another's first is next but one; short texts have a thread of their own")


async def test_waiting_text_is_bounded_in_all_and_by_tenant() -> None:
    desk = Desk(FairTurns(max_waiting_chars=100))
    tasks = [desk.bring("runs", "a", 100), desk.bring("waits", "a", 40)]
    await settled()
    with pytest.raises(Overloaded, match="40 characters of your texts"):
        await desk.bring("too much of one tenant's", "a", 25)
    tasks.append(desk.bring("other", "b", 25))
    await settled()
    with pytest.raises(Overloaded, match="texts of 65 characters"):
        await desk.bring("too much of all", "c", 36)
    tasks[1].cancel()
    await settled()
    tasks.append(desk.bring("room again", "c", 36))
    await settled()
    for name in ("runs", "other", "room again"):
        await desk.finish(name)
    assert not desk.turns._chars


async def test_work_that_has_begun_keeps_its_turn_when_its_caller_leaves() -> None:
    desk = Desk(FairTurns())
    left, stays = desk.bring("left"), desk.bring("stays")
    await settled()
    left.cancel()
    await settled()
    assert desk.begun == ["left"], "its thread is still busy"
    desk.ends["left"].set_exception(ValueError("nobody hears it"))
    await settled()
    assert desk.begun == ["left", "stays"]
    await desk.finish("stays")
    assert await stays == "stays"


async def test_a_caller_that_leaves_as_a_turn_is_passed_on_does_not_pass_it_on_again() -> None:
    desk = Desk(FairTurns())
    tasks = [desk.bring("runs"), desk.bring("leaves")]
    await settled()
    desk.ends["runs"].set_result("runs")
    await asyncio.sleep(0)  # the work ends now; its turn is passed on in the loop's next one
    tasks[1].cancel()
    await settled()
    tasks += [desk.bring("first"), desk.bring("second")]
    await settled()
    assert desk.begun == ["runs", "first"]
    await desk.finish("first")
    await desk.finish("second")
    await asyncio.gather(*tasks, return_exceptions=True)


@given(st.lists(st.tuples(st.sampled_from(["bring", "leave", "finish"]), st.integers(0, 5)), max_size=40))
def test_no_turn_is_lost(steps: list[tuple[str, int]]) -> None:
    async def check() -> None:
        desk, tasks = Desk(FairTurns()), list[asyncio.Task[str]]()
        for number, (step, place) in enumerate(steps):
            if step == "bring":
                tasks.append(desk.bring(str(number), f"t{place % 3}", place))
            elif step == "leave" and tasks:
                tasks[place % len(tasks)].cancel()
            elif step == "finish" and (open_ends := [end for end in desk.ends.values() if not end.done()]):
                open_ends[place % len(open_ends)].set_result("")
            if place % 2:
                await settled()
            assert sum(not end.done() for end in desk.ends.values()) <= 1
        await settled()
        while open_ends := [end for end in desk.ends.values() if not end.done()]:
            open_ends[0].set_result("")
            await settled()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert desk.turns._is_free
        assert not desk.turns._chars

    asyncio.run(check())


async def test_work_that_cannot_begin_passes_its_turn_on() -> None:
    turns = FairTurns()

    def no_thread() -> asyncio.Future[str]:
        raise RuntimeError("can't start new thread")

    async def work() -> str:
        return "done"

    with pytest.raises(RuntimeError, match="thread"):
        await turns.run(no_thread)
    assert await asyncio.wait_for(turns.run(work), 5) == "done"

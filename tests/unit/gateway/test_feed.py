"""How prompts of a list take turns, with calls that a test lets in, refuses and ends one by one."""

import asyncio
from collections.abc import AsyncGenerator
from functools import partial

import pytest

import tandem
from gateway.feed import Feed
from tandem import FinishReason, Token, TokenEvent, Usage

NEVER_S = 3600.0


class ConcurrencyLimiter:
    """Calls in service, `most` at a time; one ends when it is let go."""

    def __init__(self, most: int, retry_after_s: float = NEVER_S) -> None:
        self.most = most
        self.retry_after_s = retry_after_s
        self.num_refused = 0
        self.in_service: dict[int, asyncio.Event] = {}
        self.order: list[int] = []
        self.changed = asyncio.Condition()

    async def call(self, number: int) -> AsyncGenerator[TokenEvent, None]:
        await asyncio.sleep(0)  # as any call of another process
        if len(self.in_service) >= self.most:
            self.num_refused += 1
            await self._tell()
            raise tandem.Overloaded("full", retry_after_s=self.retry_after_s)
        ending = self.in_service[number] = asyncio.Event()
        self.order.append(number)
        await self._tell()
        try:
            await ending.wait()
            yield TokenEvent(0, Token(number, "x"), "r", FinishReason.LENGTH, Usage(1, 1))
        finally:
            del self.in_service[number]

    async def _tell(self) -> None:
        async with self.changed:
            self.changed.notify_all()

    async def until(self, *, started: int, refused: int) -> None:
        async with self.changed, asyncio.timeout(60):
            await self.changed.wait_for(lambda: len(self.order) == started and self.num_refused == refused)

    def feed(self, num_prompts: int, patience_s: float = 2 * NEVER_S) -> Feed:
        return Feed([partial(self.call, number) for number in range(num_prompts)], patience_s=patience_s)


async def take(feed: Feed) -> list[int]:
    """The prompts whose answers have come."""
    async with asyncio.timeout(60):
        return [event.index async for events in feed.batches() for event in events]


async def test_all_prompts_start_at_once_if_the_router_has_capacity() -> None:
    places = ConcurrencyLimiter(32)
    feed = places.feed(32)
    await places.until(started=32, refused=0)
    for ending in list(places.in_service.values()):
        ending.set()
    assert sorted(await take(feed)) == list(range(32))


async def test_a_list_at_the_cap_leaves_half_of_its_slots_to_others() -> None:
    places = ConcurrencyLimiter(8)
    feed = places.feed(20)
    await places.until(started=8, refused=12)
    answered = asyncio.create_task(take(feed))
    for number in range(4):
        places.in_service[number].set()
    for _ in range(100):  # turns of the event loop in which it could take places again
        await asyncio.sleep(0)
    assert len(places.in_service) == 4, "four places are free for others, and stay so"
    places.in_service[4].set()
    await places.until(started=9, refused=12)
    assert len(places.in_service) == 4
    while not answered.done():
        for ending in list(places.in_service.values()):
            ending.set()
        await asyncio.sleep(0)
    assert sorted(answered.result()) == list(range(20))
    assert places.order == sorted(places.order), "in the order of the list"
    assert places.num_refused == 12, "no prompt was refused twice"


async def test_one_slot_is_enough_for_any_list() -> None:
    places = ConcurrencyLimiter(1)
    feed = places.feed(5)
    answered = asyncio.create_task(take(feed))
    while not answered.done():
        for ending in list(places.in_service.values()):
            ending.set()
        await asyncio.sleep(0)
    assert sorted(answered.result()) == list(range(5))
    assert places.num_refused == 4


async def test_a_list_without_any_slot_is_refused() -> None:
    places = ConcurrencyLimiter(0)
    with pytest.raises(tandem.Overloaded):
        await take(places.feed(3))
    assert places.num_refused == 3


async def test_a_refused_prompt_is_retried_until_the_deadline() -> None:
    places = ConcurrencyLimiter(1, retry_after_s=0.01)
    feed = places.feed(2, patience_s=0.2)
    answered = asyncio.create_task(take(feed))
    await places.until(started=1, refused=1)
    places.most = 0  # somebody else is there from now on
    places.in_service[0].set()
    with pytest.raises(tandem.Overloaded):
        await answered
    assert places.num_refused > 2
    await feed.close()


async def test_closing_cancels_running_and_waiting_calls() -> None:
    places = ConcurrencyLimiter(1)
    feed = places.feed(3)
    await places.until(started=1, refused=2)
    async with asyncio.timeout(60):
        await feed.close()
    assert not places.in_service

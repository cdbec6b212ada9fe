"""Garbage collection of a router, which may not stop its streams for long."""

import asyncio
import gc
import weakref
from collections.abc import Iterator

import pytest

from router import garbage
from router.garbage import collecting_rarely
from tests.waiting import until


class Node:
    """An object that refers to itself."""

    def __init__(self) -> None:
        self.itself = self


@pytest.fixture(autouse=True)
def frozen() -> Iterator[None]:
    """What other tests of this process have left counts for nothing."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def num_full() -> int:
    return int(gc.get_stats()[2]["collections"])


def num_full_while_many_objects_come() -> int:
    before = num_full()
    kept = [[number] for number in range(1_000_000)]
    del kept
    return num_full() - before


async def test_objects_that_come_start_no_collection_of_all() -> None:
    thresholds = gc.get_threshold()
    assert num_full_while_many_objects_come() > 0
    async with collecting_rarely():
        assert num_full_while_many_objects_come() == 0
    assert gc.get_threshold() == thresholds
    assert num_full_while_many_objects_come() > 0


async def test_cycles_of_old_objects_are_collected(monkeypatch: pytest.MonkeyPatch) -> None:
    node = Node()
    gc.collect()  # it is old now
    gone = weakref.ref(node)
    del node
    monkeypatch.setattr(garbage, "_MIN_REST_S", 0.01)
    async with collecting_rarely():
        await until(lambda: gone() is None)


async def test_a_collection_that_takes_long_is_not_soon_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a clock on which it takes a tenth of a second: after the first one there is a rest of 20 s."""
    times_s = iter(number / 10 for number in range(1000))
    monkeypatch.setattr(garbage, "_MIN_REST_S", 0.0)
    monkeypatch.setattr("router.garbage.time.thread_time", lambda: next(times_s))
    before = num_full()
    async with collecting_rarely():
        await until(lambda: num_full() > before)
        for _ in range(1000):
            await asyncio.sleep(0)
    assert num_full() == before + 1

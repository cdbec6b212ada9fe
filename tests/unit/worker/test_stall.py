"""What counts as a stall, and who hears of it how often."""

import asyncio
import time
from collections.abc import AsyncIterator

import pytest
from structlog.testing import capture_logs

from engine.loop import Busy
from mesh.domain.errors import ConfigurationError, MeshError
from tests.defects import Repaired
from worker import worker
from worker.settings import WorkerSettings
from worker.stall_watch import watch_stalls


class Engine:
    """Says of itself what a test tells it to; `looked` is released at each look."""

    def __init__(self) -> None:
        self.now: Busy | None = None
        self.looked = asyncio.Semaphore(0)

    def busy(self) -> Busy | None:
        self.looked.release()
        return self.now

    def stack(self) -> str:
        return "in the driver"

    async def be_looked_at(self, now: Busy | None) -> None:
        self.now = now
        while not self.looked.locked():
            await self.looked.acquire()
        for _ in range(3):
            await self.looked.acquire()


@pytest.fixture
def engine() -> Engine:
    return Engine()


@pytest.fixture
async def changes(engine: Engine) -> AsyncIterator[list[bool]]:
    heard: list[bool] = []

    async def hear(is_stalled: bool) -> None:
        heard.append(is_stalled)

    watch = asyncio.create_task(watch_stalls(engine, stall_after_s=0.05, wedged_exit_s=60, on_change=hear))
    yield heard
    watch.cancel()


async def test_one_word_for_each_stall_and_each_end(engine: Engine, changes: list[bool]) -> None:
    with capture_logs() as logs:
        await engine.be_looked_at(None)
        await engine.be_looked_at(Busy(0.04, 1))
        assert changes == []
        await engine.be_looked_at(Busy(0.05, 1))
        await engine.be_looked_at(Busy(9.0, 1))
        assert changes == [True]
        await engine.be_looked_at(Busy(0.0, 1))
        await engine.be_looked_at(None)
        assert changes == [True, False]
        await engine.be_looked_at(Busy(0.06, 0))
        assert changes == [True, False, True]
    assert [entry["event"] for entry in logs] == ["engine stalled", "engine goes on", "engine stalled"]
    assert [entry.get("stack") for entry in logs] == ["in the driver", None, "in the driver"]


async def test_a_chunk_of_a_prompt_takes_as_many_times_longer_as_it_has_more_tokens(
    engine: Engine, changes: list[bool]
) -> None:
    for busy, expected in (
        (Busy(0.39, 512), []),
        (Busy(0.41, 512), [True]),
        (Busy(0.39, 512), [True, False]),
        (Busy(0.06, 64), [True, False, True]),
    ):
        await engine.be_looked_at(busy)
        assert changes == expected


@pytest.mark.parametrize(("wedged_exit_s", "ends"), [(30.0, True), (0.0, False)])
async def test_beyond_hope(engine: Engine, wedged_exit_s: float, ends: bool) -> None:
    async def hear(is_stalled: bool) -> None:
        pass

    watch = asyncio.create_task(watch_stalls(engine, stall_after_s=0.05, wedged_exit_s=wedged_exit_s, on_change=hear))
    await engine.be_looked_at(Busy(29.9, 1))
    assert not watch.done()
    engine.now = Busy(30.0, 1)
    await asyncio.wait([watch], timeout=10 if ends else 0.3)
    assert watch.done() is ends
    watch.cancel()


async def test_time_in_which_a_process_stands_still_is_not_taken_for_a_stall(repaired: Repaired) -> None:
    """The engine is in one step before, during and after a pause that is longer than both limits."""
    begun_s, stalled = time.monotonic(), asyncio.Event()

    class OneStep(Engine):
        def busy(self) -> Busy | None:
            super().busy()
            return Busy(time.monotonic() - begun_s, 1)

    async def hear(is_stalled: bool) -> None:
        stalled.set()

    engine = OneStep()
    watch = asyncio.create_task(watch_stalls(engine, stall_after_s=1.0, wedged_exit_s=2.0, on_change=hear))
    await engine.looked.acquire()
    time.sleep(2.5)  # noqa: ASYNC251 - the process stands still
    resumed_s = time.monotonic()
    await stalled.wait()
    assert time.monotonic() - resumed_s > 0.8, "the step has its whole limit"
    await watch
    assert time.monotonic() - resumed_s > 1.8
    repaired("D47", "time in which the process stood still counts for no step: it goes on, and joins again")


@pytest.mark.parametrize("wrong", [{"stall_after_s": 0.0}, {"stall_after_s": float("nan")}, {"wedged_exit_s": -1.0}])
def test_limits_that_make_no_sense_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigurationError, match=next(iter(wrong))):
        WorkerSettings(model="m", registry_address="127.0.0.1:1", **wrong)


async def test_time_in_which_a_process_stands_still_is_not_taken_from_the_limit_of_a_role(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(worker, "_SECOND_S", 0.001)

    async def work() -> None:
        time.sleep(0.1)  # noqa: ASYNC251 - the process stands still for longer than the limit
        await asyncio.sleep(0.01)

    await worker._within_limit(work())
    with pytest.raises(MeshError, match="did not end its work within 60 s"):
        await worker._within_limit(asyncio.sleep(3600))

"""The engine's thread: commands, idleness, stop and death."""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import Future

import pytest
import pytest_asyncio
from structlog.testing import capture_logs

from engine import loop as loop_module
from engine.batch import ScheduledBatch
from engine.cores import ComputeCores
from engine.engine import Engine, StepResult
from engine.kv.block_pool import BlockPool
from engine.loop import EngineLoop
from engine.scheduler import Scheduler
from engine.sequence import BlockPayloads, SequenceState
from engine.settings import SchedulerConfig
from mesh.domain.block_hashes import BlockHash
from mesh.domain.errors import WorkerLost
from mesh.domain.kv import Span
from tests.fakes.drafters import FakeDrafter, eager_speculator
from tests.fakes.requests import make_request
from tests.fakes.runner import FAKE_LAYOUT, FakeKVStore, FakeRunner, fake_continuation

NUM_BLOCKS = 8


class LendingCores(ComputeCores):
    """Lends core 7 for the first step of each stretch of work; notes when there is nothing to compute."""

    def __init__(self) -> None:
        self.is_resting = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._next: tuple[int, ...] = (7,)
        self.num_ended = 0
        self.wanted_back = False

    def begin_step(self, *, borrow: bool = True, has_prompt: bool = False) -> tuple[int, ...]:
        lent, self._next = self._next, ()
        return lent if borrow else ()

    def must_yield(self) -> bool:
        return self.wanted_back and self.num_ended == 0

    def end_step(self) -> None:
        self.num_ended += 1

    def set_idle(self) -> None:
        self._next = (7,)
        self._loop.call_soon_threadsafe(self.is_resting.set)


class Rig:
    """An EngineLoop over a FakeRunner, with what it has said."""

    def __init__(self) -> None:
        self.steps: asyncio.Queue[StepResult] = asyncio.Queue()
        self.death: asyncio.Future[BaseException] = asyncio.get_running_loop().create_future()
        self.runner = FakeRunner(FakeKVStore(NUM_BLOCKS))
        config = SchedulerConfig(FAKE_LAYOUT.block_size, max_batch_tokens=64, max_num_seqs=4, max_model_len=200)
        self.scheduler = Scheduler(config, BlockPool(NUM_BLOCKS))
        self.cores = LendingCores()
        self.loop = EngineLoop(
            Engine(self.scheduler, self.runner, cores=self.cores),
            on_step=self.steps.put_nowait,
            on_death=self.death.set_result,
        )


@pytest_asyncio.fixture
async def rig() -> AsyncIterator[Rig]:
    rig = Rig()
    rig.loop.start()
    yield rig
    await rig.loop.stop()


async def test_tokens_come_one_step_at_a_time(rig: Rig) -> None:
    await rig.loop.call(lambda scheduler: scheduler.add(SequenceState(make_request("a", [1, 2, 3], max_new_tokens=4))))
    ids = [(await rig.steps.get()).outputs[0].tokens[0].id for _ in range(4)]
    assert ids == fake_continuation([1, 2, 3], 4)


class SilentDisk:
    """A disk that never answers."""

    def fetch(self, hashes: Sequence[BlockHash]) -> "Future[BlockPayloads]":
        return Future()

    def restore(self, block_ids: Sequence[int], payloads: Sequence[bytes]) -> None:
        raise AssertionError("nothing was read")

    def close(self) -> None:
        pass


async def test_a_silent_disk_holds_a_prompt_up_for_a_while_only(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop_module, "_MAX_FETCH_S", 0.05)
    rig.scheduler.tables.evicted = SilentDisk()
    sequence = SequenceState(make_request("a", list(range(3 * FAKE_LAYOUT.block_size)), max_new_tokens=1))
    await asyncio.wait_for(rig.loop.fetch_evicted(sequence), 60)
    await rig.loop.call(lambda scheduler: scheduler.add(sequence))
    assert len((await rig.steps.get()).outputs) == 1


async def test_the_runner_hears_before_each_step_which_cores_are_lent(rig: Rig) -> None:
    for request_id in ("a", "b"):
        rig.cores.is_resting.clear()
        request = make_request(request_id, [1, 2, 3], max_new_tokens=3)
        await rig.loop.call(lambda scheduler, request=request: scheduler.add(SequenceState(request)))
        await asyncio.wait_for(rig.cores.is_resting.wait(), 60)
    assert rig.runner.lent_cores == [(7,), (), ()] * 2
    assert rig.cores.num_ended == 6


async def test_cores_that_nobody_uses_are_not_borrowed(rig: Rig) -> None:
    """The fake's step would say so: it notes what it is lent."""
    for runner_borrows, drafter_borrows in ((False, False), (False, True), (True, False)):
        rig.runner.borrows_cores = runner_borrows
        speculator = eager_speculator(FakeDrafter(lambda *_: ()), 2)
        speculator.drafter.borrows_cores = drafter_borrows
        rig.cores.set_idle()
        engine = Engine(rig.scheduler, rig.runner, cores=rig.cores, speculator=speculator)
        rig.scheduler.add(SequenceState(make_request(f"{runner_borrows}{drafter_borrows}", [1, 2], max_new_tokens=1)))
        engine.step()
    assert rig.runner.lent_cores == [(), (7,), (7,)]


async def test_lent_cores_go_back_between_layers_if_they_are_wanted(rig: Rig) -> None:
    announced = []

    def on_layers(batch: ScheduledBatch, layers: Span) -> None:
        announced.append(layers)
        rig.cores.wanted_back = True

    engine = Engine(rig.scheduler, rig.runner, on_layers=on_layers, cores=rig.cores)
    rig.scheduler.add(SequenceState(make_request("a", [1, 2, 3], max_new_tokens=3)))
    engine.step()
    assert rig.runner.lent_cores == [(7,), ()]
    assert len(announced) > 1
    assert rig.cores.num_ended == 2


async def test_a_prompt_that_nobody_sends_on_gives_lent_cores_back_between_layers_too(rig: Rig) -> None:
    engine = Engine(rig.scheduler, rig.runner, cores=rig.cores)
    rig.cores.wanted_back = True
    rig.scheduler.add(SequenceState(make_request("a", [1, 2, 3], max_new_tokens=3)))
    engine.step()
    assert rig.runner.lent_cores == [(7,), ()]
    rig.cores.set_idle()  # lends for a step of one token, which is short
    rig.cores.num_ended = 0
    engine.step()
    assert rig.runner.lent_cores == [(7,), (), (7,)]


async def test_engine_that_cannot_go_on_waits_instead_of_spinning(rig: Rig) -> None:
    holder = SequenceState(make_request("holder", range(1, 25)))
    await rig.loop.call(lambda scheduler: scheduler.reserve(holder))
    await rig.loop.call(lambda scheduler: scheduler.add(SequenceState(make_request("waits", range(40, 60)))))
    assert rig.scheduler.has_work
    used, started = time.process_time(), time.monotonic()
    while time.monotonic() < started + 0.3:  # noqa: ASYNC110
        await asyncio.sleep(0.05)
    assert time.process_time() - used < 0.15
    rig.loop.abort(holder)
    assert (await asyncio.wait_for(rig.steps.get(), 60)).outputs[0].request_id == "waits"


async def test_failed_call_is_the_callers_alone(rig: Rig) -> None:
    def fail(scheduler: Scheduler) -> None:
        raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        await rig.loop.call(fail)
    assert await rig.loop.call(lambda scheduler: scheduler.pool.num_free) == NUM_BLOCKS


@pytest.mark.parametrize("way", ["step", "command"])
async def test_death_is_heard_of_once_and_nothing_hangs(rig: Rig, way: str) -> None:
    rig.runner.gate.clear()
    await rig.loop.call(lambda scheduler: scheduler.add(SequenceState(make_request("a", [1]))))
    await asyncio.to_thread(rig.runner.in_step.wait, 5)  # what is posted from now on comes after this step
    if way == "step":
        rig.runner.fail_with = RuntimeError("boom")
    rig.loop.post(lambda scheduler: scheduler.pool.free([0, 0]))  # raises: block 0 is not held twice
    waiting = asyncio.create_task(rig.loop.call(Scheduler.load))
    await asyncio.sleep(0)
    rig.runner.gate.set()
    assert isinstance(await asyncio.wait_for(rig.death, 60), RuntimeError if way == "step" else ValueError)
    with pytest.raises(WorkerLost):
        await asyncio.wait_for(waiting, 60)
    with pytest.raises(WorkerLost):
        await rig.loop.call(Scheduler.load)
    rig.loop.abort(SequenceState(make_request("a", [1])))


async def test_call_after_stop_does_not_hang(rig: Rig) -> None:
    await rig.loop.stop()
    with pytest.raises(WorkerLost):
        await asyncio.wait_for(rig.loop.call(Scheduler.load), 60)


async def test_stop_closes_the_runner_after_its_last_step(rig: Rig) -> None:
    rig.runner.gate.clear()
    sequence = SequenceState(make_request("a", [1, 2, 3], max_new_tokens=4))
    await rig.loop.call(lambda scheduler: scheduler.add(sequence))
    await asyncio.to_thread(rig.runner.in_step.wait, 60)
    stopping = asyncio.create_task(rig.loop.stop(60))
    await asyncio.sleep(0)
    assert not rig.runner.is_closed
    rig.runner.gate.set()
    await stopping
    assert rig.runner.is_closed


async def test_a_long_step_shows_from_outside(rig: Rig) -> None:
    assert rig.loop.busy() is None
    rig.runner.gate.clear()
    await rig.loop.call(
        lambda scheduler: scheduler.add(SequenceState(make_request("a", range(1, 8), max_new_tokens=1)))
    )
    await asyncio.to_thread(rig.runner.in_step.wait, 5)
    busy = rig.loop.busy()
    assert busy is not None
    assert busy.num_tokens == 7
    assert "self.gate.wait()" in rig.loop.stack()
    later = rig.loop.busy()
    assert later is not None
    assert later.for_s >= busy.for_s
    rig.runner.gate.set()
    await rig.steps.get()
    await rig.loop.call(Scheduler.load)
    async with asyncio.timeout(60):
        while rig.loop.busy() is not None:  # noqa: ASYNC110 - the thread announces nothing
            await asyncio.sleep(0)


async def test_stop_does_not_wait_for_ever_for_a_step(rig: Rig) -> None:
    rig.runner.gate.clear()
    await rig.loop.call(lambda scheduler: scheduler.add(SequenceState(make_request("a", [1]))))
    await asyncio.to_thread(rig.runner.in_step.wait, 5)
    with capture_logs() as logs:
        await rig.loop.stop(within_s=0.1)
    assert [entry["event"] for entry in logs] == ["engine left in its step"]
    rig.runner.gate.set()


async def test_a_stop_that_is_cancelled_still_closes_the_runner_behind_the_step(rig: Rig) -> None:
    rig.runner.gate.clear()
    await rig.loop.call(lambda scheduler: scheduler.add(SequenceState(make_request("a", [1]))))
    await asyncio.to_thread(rig.runner.in_step.wait, 60)
    stopping = asyncio.create_task(rig.loop.stop(within_s=60))
    await asyncio.sleep(0)  # it has begun
    stopping.cancel()
    await asyncio.sleep(0)
    rig.runner.gate.set()
    with pytest.raises(asyncio.CancelledError):
        await stopping
    assert rig.runner.is_closed
    assert not rig.loop._thread.is_alive()
    await rig.loop.stop()


@pytest.mark.parametrize("fails", [False, True])
def test_a_thread_that_was_left_in_its_step_ends_after_its_event_loop(fails: bool) -> None:
    async def leave() -> Rig:
        rig = Rig()
        rig.loop.start()
        rig.runner.gate.clear()
        await rig.loop.call(lambda scheduler: scheduler.add(SequenceState(make_request("a", [1]))))
        await asyncio.to_thread(rig.runner.in_step.wait, 60)
        await rig.loop.stop(within_s=0.1)
        return rig

    with capture_logs() as logs:
        rig = asyncio.run(leave())
        rig.runner.fail_with = RuntimeError("boom") if fails else None
        rig.runner.gate.set()
        rig.loop._thread.join(60)
    assert not rig.loop._thread.is_alive()
    assert [entry["event"] for entry in logs] == ["engine left in its step", *["engine died"] * fails]

"""One client's stream: merged, ended exactly once, never left behind."""

import asyncio
import time
from collections.abc import Callable, Coroutine

import pytest

from mesh.domain.errors import NoWorkers, SlowReader
from mesh.domain.tokens import FinishReason, SampledToken, SequenceOutput
from router import answer_stream
from router.admission.limiter import Permit
from router.answer_stream import AnswerStream
from router.choice import Choice, ChoiceEvents
from tests.unit.router.test_choice import make_choice, output

Run = Callable[[Choice], Coroutine[object, object, None]]


class Driver:
    """Runs choices by hand."""

    def __init__(self, *runs: Run, slow_reader_s: float = 10.0, num_best: int | None = None) -> None:
        self.num_held = len(runs)
        self.choices = [make_choice(index=index) for index in range(len(runs))]
        self.stream = AnswerStream(
            self.choices,
            [Permit(self._give_back) for _ in runs],
            lambda choice: runs[choice.index](choice),
            slow_reader_s=slow_reader_s,
            num_best=num_best,
        )

    def _give_back(self) -> None:
        self.num_held -= 1

    async def read(self) -> list[ChoiceEvents]:
        return [events async for events in self.stream.events()]


async def three_tokens(choice: Choice) -> None:
    for index in range(3):
        await asyncio.sleep(0)
        choice.accept(output(index, [40 + index], FinishReason.LENGTH if index == 2 else None))


async def forever(choice: Choice) -> None:
    choice.accept(output(0, [40]))
    await asyncio.Event().wait()


async def failing(choice: Choice) -> None:
    raise NoWorkers("nobody there")


async def test_choices_are_merged_and_each_ends_once() -> None:
    driver = Driver(three_tokens, three_tokens)
    read = await driver.read()
    for index in range(2):
        mine = [events for events in read if events.index == index]
        assert [token.id for events in mine for token in events.tokens] == [40, 41, 42]
        assert [events.finish_reason for events in mine if events.finish_reason] == [FinishReason.LENGTH]
        assert mine[-1].usage is not None
    assert driver.num_held == 0


async def test_tokens_that_are_ready_together_share_a_message() -> None:
    async def burst(choice: Choice) -> None:
        for index in range(3):
            choice.accept(output(index, [40 + index], FinishReason.LENGTH if index == 2 else None))

    assert [len(events.tokens) for events in await Driver(burst).read()] == [3]


def with_logprobs(*logprobs: float) -> Run:
    async def run(choice: Choice) -> None:
        for index, logprob in enumerate(logprobs):
            await asyncio.sleep(0)
            reason = FinishReason.LENGTH if index == len(logprobs) - 1 else None
            choice.accept(SequenceOutput("r", 0, index, (SampledToken(40 + len(logprobs), logprob),), reason))

    return run


async def test_the_best_are_those_with_the_highest_mean_logprob() -> None:
    runs = [with_logprobs(-1.0, -3.0), with_logprobs(-0.5, -0.5, -1.4), with_logprobs(-1.5), with_logprobs(-2.0)]
    driver = Driver(*runs, num_best=3)
    read = await driver.read()
    assert [events.index for events in read] == [0, 1, 2]
    assert [len(events.tokens) for events in read] == [3, 1, 2], "of equal ones the first"
    assert all(events.finish_reason is FinishReason.LENGTH and events.usage is not None for events in read)
    assert driver.num_held == 0


async def test_nothing_is_ranked_if_one_fails() -> None:
    driver = Driver(three_tokens, failing, num_best=1)
    with pytest.raises(NoWorkers):
        await driver.read()
    driver = Driver(three_tokens, forever, num_best=1)
    await asyncio.sleep(0)
    driver.stream.close()
    await driver.stream.ended
    assert driver.num_held == 0


async def test_one_failure_ends_all() -> None:
    driver = Driver(forever, failing)
    with pytest.raises(NoWorkers):
        await driver.read()
    await driver.stream.ended
    assert driver.num_held == 0


async def test_a_bug_in_one_request_is_raised_too() -> None:
    async def broken(choice: Choice) -> None:
        raise RuntimeError("bug")

    with pytest.raises(RuntimeError):
        await Driver(broken).read()


async def test_closing_before_anything_ran_gives_permits_back() -> None:
    driver = Driver(forever, forever)
    driver.stream.close()
    await driver.stream.ended
    assert driver.num_held == 0


async def test_leaving_in_the_middle_cancels_the_work() -> None:
    driver = Driver(forever)
    events = driver.stream.events()
    await anext(events)
    await events.aclose()
    await driver.stream.ended
    assert driver.num_held == 0


async def test_a_reader_that_takes_nothing_is_cut_off() -> None:
    driver = Driver(forever, slow_reader_s=0.02)
    events = driver.stream.events()
    await anext(events)  # and then it hangs
    await asyncio.wait_for(driver.stream.ended, 60)
    assert driver.num_held == 0
    with pytest.raises(SlowReader):
        await anext(events)


async def test_a_reader_that_takes_nothing_is_cut_off_after_an_error_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answer_stream, "_LAST_READ_S", 0.02)
    fails = asyncio.Event()

    async def fails_later(choice: Choice) -> None:
        choice.accept(output(0, [40]))
        await fails.wait()
        raise NoWorkers("nobody there")

    driver = Driver(fails_later, slow_reader_s=0.02)
    stuck: asyncio.Future[BaseException] = asyncio.get_running_loop().create_future()
    driver.stream.on_stuck = stuck.set_result
    events = driver.stream.events()
    await anext(events)
    fails.set()
    assert isinstance(await asyncio.wait_for(stuck, 60), NoWorkers)
    with pytest.raises(NoWorkers):
        await anext(events)


async def test_a_stream_that_is_cut_off_keeps_no_events() -> None:
    async def endless(choice: Choice) -> None:
        choice.accept(output(0, [40]))
        await asyncio.sleep(0)
        for index in range(1, 1000):
            choice.accept(output(index, [40]))
        await asyncio.Event().wait()

    driver = Driver(endless, slow_reader_s=0.02)
    driver.choices[0]._max_new_tokens = 10**9
    events = driver.stream.events()
    await anext(events)
    await asyncio.wait_for(driver.stream.ended, 60)
    assert driver.choices[0].num_pending == 0
    with pytest.raises(SlowReader):
        await anext(events)


async def test_time_in_which_the_router_stood_still_counts_against_no_reader() -> None:
    """As when its process was stopped, or on a machine that swaps: the client could have read, and will."""
    driver = Driver(three_tokens, slow_reader_s=0.4)
    events = driver.stream.events()
    await anext(events)
    time.sleep(0.6)  # noqa: ASYNC251 - the event loop is to stand still
    for _ in range(3):
        await asyncio.sleep(0)  # timers that are due run first
    assert [event async for event in events][-1].finish_reason is FinishReason.LENGTH


async def test_a_reader_that_takes_nothing_after_a_standstill_is_cut_off() -> None:
    driver = Driver(forever, slow_reader_s=0.1)
    events = driver.stream.events()
    await anext(events)
    time.sleep(0.3)  # noqa: ASYNC251 - the event loop is to stand still
    await asyncio.wait_for(driver.stream.ended, 60)
    with pytest.raises(SlowReader):
        await anext(events)


async def test_a_reader_that_waits_for_tokens_is_not_slow() -> None:
    go_on = asyncio.Event()

    async def slow_model(choice: Choice) -> None:
        await go_on.wait()
        await three_tokens(choice)

    driver = Driver(slow_model, slow_reader_s=0.02)
    reading = asyncio.create_task(driver.read())
    await asyncio.wait([reading], timeout=0.1)
    go_on.set()
    assert (await reading)[-1].finish_reason is FinishReason.LENGTH


async def test_a_backlog_is_bounded() -> None:
    async def endless(choice: Choice) -> None:
        index = 0
        while True:
            choice.accept(output(index, [40] * 100))
            index += 100
            await asyncio.sleep(0)

    driver = Driver(endless)
    driver.choices[0]._max_new_tokens = 10**9
    events = driver.stream.events()
    await anext(events)
    await asyncio.wait_for(driver.stream.ended, 60)
    with pytest.raises(SlowReader, match="too slowly"):
        await anext(events)


async def test_the_bound_is_for_all_choices_together() -> None:
    async def long_answer(choice: Choice) -> None:
        choice.accept(output(0, [40] * 3000))
        await asyncio.Event().wait()

    async with asyncio.timeout(60):
        driver = Driver(long_answer, long_answer)
        for choice in driver.choices:
            choice._max_new_tokens = 10**9
        await driver.stream.ended
    with pytest.raises(SlowReader, match="too slowly"):
        await driver.read()


async def test_failing_from_outside() -> None:
    driver = Driver(forever)
    reading = asyncio.create_task(driver.read())
    await asyncio.sleep(0)
    driver.stream.fail(NoWorkers("stopping"))
    with pytest.raises(NoWorkers):
        await reading
    await driver.stream.ended
    assert [choice.ended_by for choice in driver.choices] == ["NoWorkers"]

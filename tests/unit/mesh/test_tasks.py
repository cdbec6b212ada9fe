"""Delays between attempts, the end of tasks, and waiting for an event."""

import asyncio
import threading

import pytest

from mesh.tasks import Backoff, call_on, cancel_all, set_within
from tests.waiting import LIMIT_S


def test_delays_grow_and_begin_again_after_an_attempt_that_lasted() -> None:
    backoff = Backoff(0.5, 30.0)
    assert [backoff.next_s(1.0) for _ in range(8)] == [0.5, 1, 2, 4, 8, 16, 30, 30]
    assert backoff.next_s(31.0) == 0.5
    assert backoff.next_s(1.0) == 1


async def test_cancelled_tasks_have_ended_whatever_their_errors() -> None:
    cleaned_up, begun = [], asyncio.Event()

    async def run() -> None:
        try:
            begun.set()
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            cleaned_up.append(True)

    async def fail() -> None:
        raise ValueError("its error is dropped")

    tasks = [asyncio.create_task(run()), asyncio.create_task(fail())]
    await begun.wait()
    await cancel_all(task for task in tasks)
    assert cleaned_up
    assert all(task.done() for task in tasks)


async def test_an_own_cancellation_is_not_lost_while_others_are_cancelled() -> None:
    is_cleaning_up, may_end = asyncio.Event(), asyncio.Event()

    async def run() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            is_cleaning_up.set()
            await may_end.wait()

    task = asyncio.create_task(run())
    await asyncio.sleep(0)
    cancelling = asyncio.create_task(cancel_all([task]))
    await is_cleaning_up.wait()
    cancelling.cancel()
    with pytest.raises(asyncio.CancelledError):
        await cancelling
    may_end.set()
    await asyncio.wait([task])


async def test_waiting_for_an_event_ends_with_it_or_with_the_time() -> None:
    event = asyncio.Event()
    assert not await set_within(event, 0.01)
    asyncio.get_running_loop().call_soon(event.set)
    assert await set_within(event, None)
    assert await set_within(event, 60.0)


def test_another_thread_calls_on_a_loop_until_it_is_closed() -> None:
    loop, called = asyncio.new_event_loop(), list[int]()

    async def wait_called() -> None:
        is_called = asyncio.Event()
        caller = threading.Thread(target=lambda: [call_on(loop, called.append, 1), call_on(loop, is_called.set)])
        caller.start()
        await asyncio.wait_for(is_called.wait(), LIMIT_S)
        caller.join()

    loop.run_until_complete(wait_called())
    loop.close()
    call_on(loop, called.append, 2)
    assert called == [1]

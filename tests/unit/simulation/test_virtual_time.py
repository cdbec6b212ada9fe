import asyncio
import time

import pytest

from tandem_cli.simulation.virtual_time import run_in_virtual_time


def test_an_hour_takes_no_time() -> None:
    async def main() -> list[tuple[str, float]]:
        loop, seen = asyncio.get_running_loop(), []

        async def wait(name: str, seconds: float) -> None:
            await asyncio.sleep(seconds)
            seen.append((name, loop.time()))

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(wait("late", 3600))
            tasks.create_task(wait("early", 1.5))
        return seen

    started_s = time.monotonic()
    assert run_in_virtual_time(main()) == [("early", 1.5), ("late", 3600)]
    assert time.monotonic() - started_s < 60


def test_timeouts_are_those_of_virtual_time() -> None:
    async def main() -> float:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(100):
                await asyncio.get_running_loop().create_future()
        return asyncio.get_running_loop().time()

    assert run_in_virtual_time(main()) == pytest.approx(100)


def test_tasks_that_wait_for_each_other_are_an_error() -> None:
    async def main() -> None:
        await asyncio.Event().wait()

    with pytest.raises(RuntimeError, match="nothing can happen any more"):
        run_in_virtual_time(main())

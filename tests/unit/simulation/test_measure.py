"""The measurement of a mesh: which answers count."""

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any, cast

import pytest

import tandem
from tandem_cli.load_test.figures import RunFailed
from tandem_cli.simulation.measure import MeshMeter

MODEL = cast(tandem.Model, SimpleNamespace(name="m", vocab_size=100, max_total_tokens=400))


class SlowPrompts:
    """A client of a mesh in which an answer begins when the one before it has `apart` tokens, or has ended."""

    def __init__(self, apart: int) -> None:
        self.lengths: list[int] = []
        self._apart = apart
        self._may_begin = asyncio.Event()
        self._may_begin.set()

    async def stream(self, *, max_new_tokens: int, **_: Any) -> AsyncIterator[int]:
        self.lengths.append(max_new_tokens)
        before, self._may_begin = self._may_begin, asyncio.Event()
        mine = self._may_begin
        await before.wait()
        for number in range(max_new_tokens):
            if number == self._apart:
                mine.set()
            yield number
            await asyncio.sleep(0)
        mine.set()


async def test_answers_get_longer_until_all_run_at_the_same_time() -> None:
    client = SlowPrompts(apart=150)
    step = await MeshMeter(cast(tandem.AsyncClient, client), MODEL).step(1, 2, 10)
    assert client.lengths == [128, 128, 256, 256]
    assert step.context == 10 + 128
    assert 0 < step.seconds < 1


async def test_answers_that_never_run_at_the_same_time_are_no_measurement() -> None:
    client = SlowPrompts(apart=1000)
    with pytest.raises(RunFailed, match="did not run at the same time"):
        await MeshMeter(cast(tandem.AsyncClient, client), MODEL).step(1, 2, 10)
    assert max(client.lengths) == 390

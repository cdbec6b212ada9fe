"""When a load that has no time limit is given up."""

import asyncio
import sys
import threading

import pytest

from tests.waiting import until
from worker import load_watch
from worker.load_watch import Work, work_done


class Looks(threading.Event):
    """The end of a load after `advances`: at each look CPU time, pages read, and the loaded fraction have grown so, or
    a rank on another machine says that it gets on.
    """

    def __init__(self, progress: load_watch.LoadProgress, *advances: tuple[float, int, float] | None) -> None:
        super().__init__()
        self.work = Work(0.0, 0)
        self._progress = progress
        self._advances = list(advances)

    def wait(self, timeout: float | None = None) -> bool:
        if not self._advances:
            return True
        if (advance := self._advances.pop(0)) is None:
            self._progress.note_rank()
            return False
        cpu_s, pages, fraction = advance
        self.work = Work(self.work.cpu_s + cpu_s, self.work.pages + pages)
        self._progress.fraction += fraction
        return False


IDLE, COMPILING, LOADING = (0.0, 0, 0.0), (2.0, 0, 0.0), (0.0, 0, 0.01)
CRAWLING = (0.02, 5, 0.0)  # its threads are awake, and nothing gets done
READING = (0.02, 25, 0.0)  # 20 KB/s of a large tensor
RANK_LOADS = None
RANK_ENDED = (-100.0, -1000, 0.0)


@pytest.mark.parametrize(
    ("advances", "stalls"),
    [
        ([IDLE] * 48, True),
        ([IDLE] * 47, False),
        ([COMPILING] * 719, False),
        ([COMPILING] * 720, True),
        ([*[COMPILING] * 719, LOADING] * 2, False),
        ([LOADING] * 2000, False),
        ([*[IDLE] * 47, LOADING] * 3, False),
        ([READING] * 2000, False),
        ([CRAWLING] * 47, False),
        ([CRAWLING] * 48, True),
        ([COMPILING, *[IDLE] * 48], True),
        ([*[IDLE] * 47, RANK_LOADS] * 3, False),
        ([RANK_ENDED, *[READING] * 500], False),
    ],
)
def test_a_load_ends_when_it_no_longer_gets_on(
    advances: list[tuple[float, int, float] | None], stalls: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    progress = load_watch.LoadProgress()
    announced: list[str] = []
    monkeypatch.setattr(load_watch, "tell_parent", lambda event, **_: announced.append(event))
    looks = Looks(progress, *advances)
    monkeypatch.setattr(load_watch, "work_done", lambda: looks.work)
    assert load_watch._stalls(progress, looks, load_watch.STALLED_S) is stalls
    assert announced == ["loading"] * len(advances), "the parent process hears that nobody has given up"


async def test_the_work_of_ranks_counts() -> None:
    before = work_done()
    rank = await asyncio.create_subprocess_exec(sys.executable, "-c", "while True: pass")
    try:
        await until(lambda: work_done().cpu_s - before.cpu_s >= 0.5)
    finally:
        rank.kill()
        await rank.wait()


def test_looking_does_not_count() -> None:
    """Nor may what other threads of the test run do, which is little."""
    before, began_s = work_done(), load_watch.time.thread_time()
    while load_watch.time.thread_time() - began_s < 0.5:
        now = work_done()
    assert now.cpu_s - before.cpu_s < 0.4

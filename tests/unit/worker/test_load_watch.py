"""When a load that has no time limit is given up."""

import threading

import pytest

from worker import load_watch


class Looks(threading.Event):
    """The end of a load after `advances`: at each look the CPU time, and the loaded fraction, have grown by so much."""

    def __init__(self, progress: load_watch.LoadProgress, *advances: tuple[float, float]) -> None:
        super().__init__()
        self.cpu_s = 0.0
        self._progress = progress
        self._advances = list(advances)

    def wait(self, timeout: float | None = None) -> bool:
        if not self._advances:
            return True
        cpu_s, fraction = self._advances.pop(0)
        self.cpu_s += cpu_s
        self._progress.fraction += fraction
        return False


IDLE, COMPILING, READING, CRAWLING = (0.0, 0.0), (2.0, 0.0), (0.0, 0.01), (0.02, 0.0)


@pytest.mark.parametrize(
    ("advances", "stalls", "told"),
    [
        ([IDLE] * 48, True, 0),
        ([IDLE] * 47, False, 0),
        ([COMPILING] * 500, False, 500),
        ([READING] * 500, False, 0),
        ([*[IDLE] * 47, READING] * 3, False, 0),
        ([CRAWLING] * 47, False, 0),  # its threads are awake, and nothing gets done
        ([CRAWLING] * 48, True, 0),
        ([COMPILING, *[IDLE] * 48], True, 1),
    ],
)
def test_a_load_ends_when_it_no_longer_gets_on(
    advances: list[tuple[float, float]], stalls: bool, told: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    progress = load_watch.LoadProgress()
    announced: list[str] = []
    monkeypatch.setattr(load_watch, "announce", lambda event, **_: announced.append(event))
    looks = Looks(progress, *advances)
    monkeypatch.setattr(load_watch.time, "process_time", lambda: looks.cpu_s)
    assert load_watch._stalls(progress, looks, load_watch.STALLED_S) is stalls
    assert announced == ["loading"] * told

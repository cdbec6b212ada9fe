"""How often, how soon and where not."""

from pathlib import Path

import pytest

from mesh.domain.errors import NoWorkers, Overloaded, Replayable, TransferFailed, WorkerBusy, WorkerLost
from router.replay import Replay
from router.settings import RouterSettings
from tests.fakes.router_views import decode


@pytest.fixture
def replay(tmp_path: Path) -> Replay:
    return Replay(RouterSettings(model=str(tmp_path), max_attempts=6, max_worker_losses=3))


def fail(replay: Replay, error: Replayable, count: int, num_tokens: int = 0) -> list[float]:
    return [replay.after(error, num_tokens=num_tokens, blamed=None) for _ in range(count)]


@pytest.mark.parametrize(
    ("error", "last", "num_before"),
    [(WorkerBusy("no room"), Overloaded, 5), (TransferFailed("cut"), NoWorkers, 5), (WorkerLost("gone"), NoWorkers, 2)],
)
def test_it_ends(replay: Replay, error: Replayable, last: type[Exception], num_before: int) -> None:
    fail(replay, error, num_before)
    with pytest.raises(last):
        fail(replay, error, 1)


def test_a_token_starts_the_count_anew(replay: Replay) -> None:
    for num_tokens in range(20):
        fail(replay, WorkerLost("gone"), 2, num_tokens)
    assert replay.attempt == 40


def test_backoff(replay: Replay) -> None:
    assert fail(replay, TransferFailed("cut"), 5) == [0.0, 0.05, 0.1, 0.2, 0.4]


def test_no_room_waits_at_once(replay: Replay) -> None:
    assert fail(replay, WorkerBusy("full"), 3) == [0.05, 0.1, 0.2]


def test_who_failed_is_avoided_until_there_is_progress(replay: Replay) -> None:
    replay.after(WorkerLost("gone"), num_tokens=0, blamed=decode("d0").info)
    replay.after(TransferFailed("cut"), num_tokens=0, blamed=decode("d1").info)
    assert replay.avoid == {"d0", "d1"}
    replay.after(TransferFailed("cut"), num_tokens=5, blamed=decode("d2").info)
    assert replay.avoid == {"d2"}


def test_after_some_failures_decode_prefills_by_itself(replay: Replay) -> None:
    fail(replay, TransferFailed("cut"), 2)
    assert not replay.prefill_locally
    fail(replay, TransferFailed("cut"), 1)
    assert replay.prefill_locally

"""How often, how soon and where not; and how many in all."""

import asyncio
from itertools import accumulate
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mesh.domain.errors import AttemptsFailed, Overloaded, Replayable, TransferFailed, WorkerBusy, WorkerLost
from router.dispatch import FailureHistory, ReplayBudget
from router.settings import RouterSettings
from tests.fakes.router_views import decode, prefill


@pytest.fixture
def failures(tmp_path: Path) -> FailureHistory:
    return FailureHistory(RouterSettings(model=str(tmp_path), max_attempts=6, max_worker_losses=3))


def fail(failures: FailureHistory, error: Replayable, count: int, num_tokens: int = 0) -> list[float]:
    return [failures.count(error, num_tokens=num_tokens, has_prefill=False, blamed=None) for _ in range(count)]


@pytest.mark.parametrize(
    ("error", "last", "num_before"),
    [
        (WorkerBusy("no room"), Overloaded, 5),
        (TransferFailed("cut"), AttemptsFailed, 5),
        (WorkerLost("gone"), AttemptsFailed, 2),
    ],
)
def test_it_ends(failures: FailureHistory, error: Replayable, last: type[Exception], num_before: int) -> None:
    fail(failures, error, num_before)
    with pytest.raises(last):
        fail(failures, error, 1)


def test_a_token_starts_the_count_anew(failures: FailureHistory) -> None:
    for num_tokens in range(20):
        fail(failures, WorkerLost("gone"), 2, num_tokens)
    assert failures.attempt == 40


def test_first_tokens_of_prefill_workers_do_not_start_the_count_anew(failures: FailureHistory) -> None:
    """Otherwise a request whose first decode step kills the worker would kill one worker after the other."""
    for num_tokens in (1, 2):
        failures.count(WorkerLost("gone"), num_tokens=num_tokens, has_prefill=True, blamed=None)
    with pytest.raises(AttemptsFailed):
        failures.count(WorkerLost("gone"), num_tokens=3, has_prefill=True, blamed=None)


def test_backoff(failures: FailureHistory) -> None:
    assert fail(failures, TransferFailed("cut"), 5) == [0.0, 0.05, 0.1, 0.2, 0.4]


def test_no_room_waits_at_once(failures: FailureHistory) -> None:
    assert fail(failures, WorkerBusy("full"), 3) == [0.05, 0.1, 0.2]


def test_who_failed_is_avoided_until_there_is_progress(failures: FailureHistory) -> None:
    failures.count(WorkerLost("gone"), num_tokens=0, has_prefill=True, blamed=decode("d0").info)
    failures.count(TransferFailed("cut"), num_tokens=0, has_prefill=True, blamed=decode("d1").info)
    assert failures.avoid == {"d0", "d1"}
    failures.count(TransferFailed("cut"), num_tokens=5, has_prefill=True, blamed=decode("d2").info)
    assert failures.avoid == {"d2"}


def test_a_prefill_worker_whose_kv_did_not_arrive_is_left_out(failures: FailureHistory) -> None:
    """Its own first token is no progress: else the next attempt would wait for another lease, and so on."""
    failures.count(TransferFailed("silent"), num_tokens=1, has_prefill=True, blamed=prefill("p0").info)
    assert failures.cut_off == {"p0"}
    failures.count(TransferFailed("silent"), num_tokens=2, has_prefill=True, blamed=prefill("p1").info)
    assert failures.cut_off == {"p0", "p1"}
    failures.count(WorkerLost("gone"), num_tokens=4, has_prefill=True, blamed=decode("d0").info)
    assert failures.cut_off == set()
    failures.count(WorkerLost("gone"), num_tokens=4, has_prefill=True, blamed=prefill("p0").info)
    assert failures.cut_off == set()


def test_after_some_failures_decode_prefills_by_itself(failures: FailureHistory) -> None:
    fail(failures, TransferFailed("cut"), 2)
    assert not failures.prefill_locally
    fail(failures, TransferFailed("cut"), 1)
    assert failures.prefill_locally


def test_the_first_replay_after_progress_is_free(failures: FailureHistory) -> None:
    for num_tokens in (0, 0, 7, 7, 9):
        failures.count(TransferFailed("cut"), num_tokens=num_tokens, has_prefill=True, blamed=None)
        assert failures.is_free is (failures.attempt in (1, 3, 5))


@given(st.lists(st.floats(0.0, 1.0), max_size=200))
def test_no_storm_passes_the_budget(gaps_s: list[float]) -> None:
    """Whenever tokens are asked for, no stretch of time gets more than its share, and nobody waits without need."""
    now_s = 0.0
    budget = ReplayBudget(lambda: now_s, burst=5, per_s=10.0)
    given_s: list[float] = []
    for gap_s in gaps_s:
        now_s += gap_s
        given_s.append(now_s + budget.take_s())
    assert given_s == sorted(given_s)
    for first, begin_s in enumerate(given_s):
        for last in range(first, len(given_s)):
            assert last - first + 1 <= 5 + 10.0 * (given_s[last] - begin_s) + 1 + 1e-6
    if len(given_s) <= 5:
        assert given_s == list(accumulate(gaps_s))  # `sum` compensates for rounding from Python 3.12 on


async def test_who_leaves_gives_its_token_back() -> None:
    budget = ReplayBudget(lambda: 0.0, burst=1, per_s=0.01)
    await budget.draw()
    waiting = [asyncio.create_task(budget.draw()) for _ in range(10)]
    await asyncio.sleep(0)
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    assert budget.take_s() == pytest.approx(100.0)

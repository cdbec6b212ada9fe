"""The order in which cached blocks give up their memory, by clients' hints."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.kv.block_pool import BlockPool
from engine.kv.eviction import EvictionQueue, Worth, combined, worth_of
from engine.scheduler import Scheduler
from engine.sequence import SequenceState
from engine.settings import SchedulerConfig
from mesh.domain.block_hashes import block_hashes
from mesh.domain.cache_hints import CacheHints, KeepPriority
from tests.fakes.requests import make_request
from tests.unit.engine.test_scheduler import run_step

LOW, NORMAL, HIGH = KeepPriority
BLOCK = 4
NUM_BLOCKS = 12


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def order(queue: EvictionQueue) -> list[int]:
    return [queue.take()[0] for _ in range(len(queue))]


def test_without_hints_the_oldest_goes_first() -> None:
    queue = EvictionQueue(8, Clock())
    for block_id in (3, 1, 2):
        queue.add([block_id], Worth())
    queue.remove(1)
    queue.add([1], Worth())
    assert order(queue) == [3, 2, 1]


def test_low_goes_first_and_high_last_and_only_low_is_worthless() -> None:
    queue = EvictionQueue(8, Clock())
    for block_id, priority in enumerate((HIGH, NORMAL, LOW, HIGH, LOW)):
        queue.add([block_id], Worth(priority=priority))
    assert [queue.take() for _ in range(5)] == [(2, False), (4, False), (1, True), (0, True), (3, True)]


def test_a_block_goes_first_once_its_time_to_live_is_over() -> None:
    clock = Clock()
    queue = EvictionQueue(8, clock)
    queue.add([0], Worth())
    queue.add([1], worth_of("", CacheHints(keep_priority=HIGH, time_to_live_s=60), clock()))
    queue.add([2], worth_of("", CacheHints(time_to_live_s=90), clock()))
    clock.now_s = 59.9
    assert queue.take() == (0, True)
    queue.add([0], Worth())
    clock.now_s = 60.0
    assert queue.take() == (1, False)
    clock.now_s = 90.0
    assert [queue.take(), queue.take()] == [(2, False), (0, True)]


def test_an_end_that_has_moved_is_forgotten() -> None:
    clock = Clock()
    queue = EvictionQueue(4, clock)
    for _ in range(100):  # used again and again before its end
        queue.add([0], worth_of("", CacheHints(time_to_live_s=10), clock()))
        clock.now_s += 5
        queue.remove(0)
    queue.add([0], Worth())
    queue.add([1], Worth())
    clock.now_s += 1000
    assert queue.take() == (0, True)


def test_a_tenant_protects_no_more_than_its_share() -> None:
    queue = EvictionQueue(8, Clock())
    for block_id in range(6):
        queue.add([block_id], Worth("greedy", priority=HIGH))
    queue.add([6], Worth("other"))  # now the share is four blocks
    queue.add([7], Worth("other"))
    assert order(queue) == [1, 0, 6, 7, 2, 3, 4, 5]


_HINTED = st.tuples(st.just("hinted"), st.sampled_from(KeepPriority), st.sampled_from([None, 1.0, 5.0]))
_PLAIN = st.just(("plain", NORMAL, None))


@given(st.lists(_HINTED | _PLAIN, max_size=40), st.integers(0, 3))
def test_of_older_blocks_no_more_than_a_share_outlives_those_of_a_tenant_without_hints(
    blocks: list[tuple[str, KeepPriority, float | None]], num_used: int
) -> None:
    clock, num_blocks = Clock(), len(blocks) + num_used + 1
    queue = EvictionQueue(num_blocks, clock)
    for block_id, (tenant, priority, time_to_live_s) in enumerate(blocks):
        queue.add([block_id], worth_of(tenant, CacheHints("", priority, time_to_live_s), clock()))
        clock.now_s += 0.25
    gone = order(queue)
    assert sorted(gone) == list(range(len(blocks)))
    plain = [block_id for block_id in gone if blocks[block_id][0] == "plain"]
    assert plain == sorted(plain)
    if plain:
        outlived = [block_id for block_id in gone[gone.index(plain[-1]) :] if block_id < plain[-1]]
        assert len(outlived) <= num_blocks // 2


def test_the_stronger_hint_counts_for_shared_blocks_unless_it_is_taken_back() -> None:
    keep = Worth("t", "agent", HIGH, 100.0)
    plain, done = Worth("t"), Worth("t", "agent", LOW, math.inf)
    other = Worth("t", "other", LOW, math.inf)
    assert combined(keep, plain, now_s=50.0) == keep._replace(then=plain)
    assert combined(keep, plain, now_s=100.0) is plain  # it is over
    assert combined(keep, done, now_s=50.0) is done  # the conversation itself
    assert combined(keep, other, now_s=50.0) == keep._replace(then=other)
    assert combined(done, plain, now_s=50.0) is plain
    assert combined(keep, keep._replace(conversation="third", until_s=99.0), now_s=50.0) is keep


def test_what_others_have_said_counts_when_the_strongest_hint_is_over() -> None:
    keep, plain = Worth("t", "agent", HIGH, 100.0), Worth("t")
    for_longer = Worth("t", "other", NORMAL, 200.0)
    both = combined(combined(keep, for_longer, now_s=50.0), plain, now_s=60.0)
    assert both == keep._replace(then=plain), "a prompt without a hint is as good as one for ever"
    low = Worth("t", "third", LOW, math.inf)
    three = combined(combined(keep, for_longer, now_s=50.0), low, now_s=60.0)
    assert three == keep._replace(then=for_longer._replace(then=low))
    assert combined(three, Worth("t", "agent", LOW, math.inf), now_s=70.0) == for_longer._replace(
        then=Worth("t", "agent", LOW, math.inf)
    ), "the conversation takes its own hint back, not that of the other"
    assert combined(three, plain, now_s=150.0) is plain


def test_a_conversation_takes_back_a_hint_that_would_count_later() -> None:
    keep, for_longer = Worth("t", "agent", HIGH, 100.0), Worth("t", "other", NORMAL, 200.0)
    both = combined(keep, for_longer, now_s=50.0)
    assert both == keep._replace(then=for_longer)
    done = Worth("t", "other", LOW, 90.0)
    assert combined(both, done, now_s=60.0) == keep, "nothing of the other counts when the agent's hint is over"
    again = Worth("t", "other", HIGH, 150.0)
    assert combined(both, again, now_s=60.0) == again


def test_a_prefix_that_others_use_outlives_the_hint_of_one() -> None:
    clock = Clock()
    queue = EvictionQueue(8, clock)
    queue.add([1], Worth("t"))
    hint = worth_of("t", CacheHints("agent", HIGH, 60.0), clock())
    clock.now_s += 59
    queue.add([0], combined(hint, Worth("t"), clock()))
    clock.now_s += 2
    assert order(queue) == [1, 0], "it was used after the other, by somebody who gave no hint"


def _scheduler(pool: BlockPool) -> Scheduler:
    return Scheduler(SchedulerConfig(BLOCK, max_batch_tokens=64, max_num_seqs=4, max_model_len=64), pool)


def _run(scheduler: Scheduler, name: str, first: int, hints: CacheHints, num_tokens: int = 9) -> int:
    """Run a request alone to its end; returns the tokens that it found in the cache."""
    request = make_request(name, range(first, first + num_tokens), max_new_tokens=1, cache_hints=hints)
    sequence = SequenceState(request)
    scheduler.add(sequence)
    while scheduler.has_work:
        run_step(scheduler)
    return sequence.num_cached_tokens


def test_a_kept_session_survives_others_and_a_plain_one_does_not() -> None:
    found = {}
    for hints in (CacheHints(), CacheHints("agent", HIGH), CacheHints("agent", HIGH, 3600.0)):
        scheduler = _scheduler(BlockPool(NUM_BLOCKS))
        _run(scheduler, "first", 1, hints)
        for number in range(8):
            _run(scheduler, f"other-{number}", 100 * (number + 1), CacheHints())
        found[hints] = _run(scheduler, "second", 1, hints)
        scheduler.check_integrity()
    assert list(found.values()) == [0, 8, 8]


@pytest.mark.parametrize(
    ("users", "hints", "stays"),
    [
        ([CacheHints()], CacheHints(keep_priority=LOW), True),
        ([CacheHints()], CacheHints(time_to_live_s=0.001), True),
        ([CacheHints("user")], CacheHints("job", LOW), True),
        ([CacheHints("agent"), CacheHints("user")], CacheHints("agent", LOW), True),
        ([CacheHints("agent"), CacheHints("agent")], CacheHints("agent", LOW), False),
        ([CacheHints(keep_priority=LOW)], CacheHints(keep_priority=LOW), False),
        ([], CacheHints("agent", LOW), False),
    ],
)
def test_a_hint_does_not_lower_what_others_have_used_without_one(
    users: list[CacheHints], hints: CacheHints, stays: bool
) -> None:
    clock = Clock()
    scheduler = _scheduler(BlockPool(NUM_BLOCKS, clock=clock))
    _run(scheduler, "older", 300, CacheHints())
    for number, user in enumerate([*users, hints]):
        _run(scheduler, f"user-{number}", 1, user)
    clock.now_s += 1
    _run(scheduler, "other", 100, CacheHints(), num_tokens=37)  # takes the memory of one of the two prefixes
    assert (_run(scheduler, "again", 1, CacheHints()) > 0) == stays
    scheduler.check_integrity()


def test_blocks_that_nobody_wants_are_not_kept_on_disk() -> None:
    kept: list[bytes] = []
    pool = BlockPool(2, on_evict=lambda _, block_hash: kept.append(block_hash))
    hashes = block_hashes(list(range(8)), BLOCK, "")
    blocks = pool.allocate(2) or []
    for block_id, block_hash in zip(blocks, hashes, strict=True):
        pool.publish(block_id, block_hash)
    pool.free(blocks[:1], hints=CacheHints(keep_priority=LOW))
    pool.free(blocks[1:])
    assert pool.allocate(2) is not None
    assert kept == [hashes[1]]
    pool.check_integrity([blocks])

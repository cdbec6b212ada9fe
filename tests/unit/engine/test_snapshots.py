"""Snapshots of recurrent states: every step finds the KV and the state that it needs, after any history; where they are
taken, and when they go.
"""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import rule

from engine.batch import ScheduledBatch
from engine.engine import Engine
from engine.kv.block_pool import BlockPool
from engine.scheduler import Scheduler
from engine.sequence import SequenceState
from engine.settings import SchedulerConfig
from mesh.domain.block_hashes import block_hashes, state_block_hashes
from mesh.domain.cache_hints import CacheHints
from mesh.domain.errors import ConfigurationError
from tests.fakes.requests import make_request
from tests.fakes.runner import FakeKVStore, FakeRunner
from tests.unit.engine.test_scheduler import BLOCK, SchedulerLife, run_step

STATES = 2


class RecurrentLife(SchedulerLife):
    """The same state machine for models with recurrent states, over a memory that holds what a model would write."""

    state_blocks = STATES

    def __init__(self) -> None:
        super().__init__()
        self.memory: dict[tuple[int, int], tuple[int, ...]] = {}  # (block, place) -> the tokens that it depends on
        self.disk: dict[bytes, Any] = {}
        self.scheduler.pool._on_evict = self.evict
        self.scheduler.tables.evicted = Disk(self.restore)

    def evict(self, block: int, block_hash: bytes) -> None:
        self.disk[block_hash] = [self.memory.get((block, place), ()) for place in range(-STATES, BLOCK)]

    def restore(self, block_ids: Sequence[int], payloads: Sequence[Any]) -> None:
        for block, payload in zip(block_ids, payloads, strict=True):
            self.memory |= {(block, place): tokens for place, tokens in enumerate(payload, -STATES)}

    @rule(
        target=SchedulerLife.live,
        common=st.integers(8, 20),
        tail=st.lists(st.integers(1, 2), max_size=8),
        max_new=st.sampled_from([3, 12]),
    )
    def add_alike(self, common: int, tail: list[int], max_new: int):
        """Prompts that begin alike, so that snapshots are found, and answers long enough for drafts."""
        sequence = self.new_sequence([1] * common + tail, max_new=max_new)
        sequence.from_disk.update(from_disk(self.disk, self.scheduler.tables.missing(sequence)))
        self.scheduler.add(sequence)
        return sequence

    @rule(target=SchedulerLife.live, common=st.integers(8, 20))
    def reserve_alike(self, common: int):
        return self.reserve([1] * common, max_new=3, num_forks=0)

    def receive(self, sequence: SequenceState) -> None:
        ready = sequence.num_cached_tokens
        self.check_tokens(sequence, ready)
        self.write(sequence, sequence.token_ids, ready, len(sequence.token_ids), len(sequence.token_ids) - 1)

    def check_planned(self, batch: ScheduledBatch) -> None:
        super().check_planned(batch)
        self.copy(batch.copies)
        for item in batch.items:
            sequence, tokens = item.sequence, item.token_ids()
            self.check_tokens(sequence, item.start)
            for place in range(STATES if item.start else 0):
                assert self.memory[sequence.block_table[place], -1 - place] == tuple(sequence.token_ids[: item.start])
            known = [*sequence.token_ids[: item.start], *tokens]
            self.write(sequence, known, item.start, item.end, item.end - item.num_repeated)
        self.copy(batch.saves)

    def check_tokens(self, sequence: SequenceState, end: int) -> None:
        for position in range(end):
            block, place = sequence.block_table[STATES + position // BLOCK], position % BLOCK
            assert self.memory[block, place] == tuple(sequence.token_ids[: position + 1])

    def write(self, sequence: SequenceState, tokens: list[int], start: int, end: int, end_of_state: int) -> None:
        """KV of tokens [start, end), and the state after `end_of_state`, into blocks that nobody else has."""
        table = sequence.block_table
        for position in range(start, end):
            self.write_own(table[STATES + position // BLOCK], position % BLOCK, tokens[: position + 1])
        for place in range(STATES):
            self.write_own(table[place], -1 - place, tokens[:end_of_state])

    def write_own(self, block: int, place: int, tokens: list[int]) -> None:
        assert self.scheduler.pool._hash_of[block] is None
        assert sum(block in each.block_table for each in self.scheduler._slots.values()) == 1
        self.memory[block, place] = tuple(tokens)

    def copy(self, pairs: tuple[tuple[int, int], ...]) -> None:
        for source, target in pairs:
            for place in range(-STATES, BLOCK):
                self.memory[target, place] = self.memory.get((source, place), ())


class Disk:
    """As an EvictedBlockStore, of which the scheduler calls `restore` only."""

    def __init__(self, restore: Callable[[Sequence[int], Sequence[Any]], None]) -> None:
        self.restore = restore

    def fetch(self, hashes: Sequence[bytes]) -> Any:
        raise NotImplementedError

    def close(self) -> None:
        raise NotImplementedError


def from_disk(disk: dict[bytes, Any], hashes: list[bytes]) -> dict[bytes, Any]:
    """What a disk with these blocks gives to a sequence that lacks those with these hashes."""
    for end in range(len(hashes), 0, -1):
        state = state_block_hashes(hashes[end - 1], STATES)
        if all(name in disk for name in state):
            return {name: disk[name] for name in [*state, *hashes[:end]] if name in disk}
    return {}


RecurrentLife.TestCase.settings = settings(max_examples=150, stateful_step_count=40)
TestRecurrentLife = RecurrentLife.TestCase


def new_scheduler(num_blocks: int = 64, state_blocks: int = STATES) -> Scheduler:
    config = SchedulerConfig(BLOCK, 64, 4, max_model_len=200, state_blocks=state_blocks)
    return Scheduler(config, BlockPool(num_blocks))


def ask(scheduler: Scheduler, tokens: list[int], max_new: int = 1, session: str = "") -> tuple[int, list[int]]:
    """The number of cached tokens, and the ends of the prompt's steps."""
    facts: dict[str, Any] = {"eos_token_ids": frozenset(), "cache_hints": CacheHints(session_id=session)}
    sequence = SequenceState(make_request("a", tokens, max_new_tokens=max_new, **facts))
    scheduler.add(sequence)
    ends = []
    while scheduler.has_work:
        batch, _ = run_step(scheduler)
        ends += [item.end for item in batch.items if item.end <= len(tokens)]
        scheduler.check_integrity()
    assert scheduler.pool.num_free == scheduler.pool.num_blocks
    return sequence.num_cached_tokens, ends


def test_turns_of_a_chat_begin_behind_the_last_one() -> None:
    scheduler, first = new_scheduler(), list(range(30, 60))
    assert ask(scheduler, first) == (0, [20, 30])  # 22 to 29 may be a template's
    assert ask(scheduler, [*first[:22], *range(70, 90)]) == (20, [32, 42])
    second = [*first, *range(90, 100)]
    assert ask(scheduler, second, max_new=30) == (20, [28, 32, 40])  # blocks are cached up to 28
    # The answer, repeated: the last snapshot is behind position 68, and those before it in the answer are gone.
    assert ask(scheduler, [*second, *[1] * 30]) == (68, [70])
    assert ask(scheduler, [*second, *[1] * 11, 2, *range(9)]) == (32, [48, 52, 61])


@pytest.mark.parametrize("session", ["", "first"])
def test_snapshots_of_a_conversations_former_turns_go_first(session: str) -> None:
    scheduler, first, other = new_scheduler(num_blocks=30), list(range(30, 60)), list(range(100, 130))
    ask(scheduler, first, session=session)
    ask(scheduler, other)
    ask(scheduler, [*first, *range(60, 70)], session=session)
    ask(scheduler, list(range(200, 224)))  # takes the memory of one snapshot
    former, others = (block_hashes(tokens, BLOCK, "")[4] for tokens in (first, other))
    assert bool(scheduler.pool.snapshot(former)) == (not session)
    assert bool(scheduler.pool.snapshot(others)) == bool(session)


def test_a_branch_becomes_a_snapshot_when_it_is_seen() -> None:
    scheduler, system = new_scheduler(), list(range(100, 130))
    questions = [list(range(place, place + 30)) for place in (1, 40, 80)]
    assert [ask(scheduler, [*system, *question]) for question in questions] == [
        (0, [52, 60]),
        (0, [28, 52, 60]),
        (28, [52, 60]),
    ]


def test_a_snapshot_must_save_enough() -> None:
    scheduler = new_scheduler(num_blocks=128, state_blocks=48)  # three blocks of tokens, so 12
    assert ask(scheduler, list(range(18))) == (0, [18])
    assert ask(scheduler, list(range(20))) == (0, [12, 20])
    assert ask(scheduler, list(range(31))) == (12, [31])


def test_kv_that_arrives_leaves_the_block_of_the_last_token_alone() -> None:
    """The decode worker computes that token once more."""
    scheduler = new_scheduler()
    ask(scheduler, list(range(16)))
    assert scheduler.reserve(SequenceState(make_request("b", range(16)))) == 12


def test_what_a_failed_transfer_left_is_cleared_but_not_what_is_shared() -> None:
    scheduler, runner = new_scheduler(), FakeRunner(FakeKVStore(64))
    ask(scheduler, list(range(16)))
    waiting = SequenceState(make_request("b", range(18)))
    assert scheduler.reserve(waiting) == 16
    table = list(waiting.block_table)
    Engine(scheduler, runner).abort(waiting)
    cleared = {block for block in table if (runner.store.data[:, :, block] == 0).all()}
    assert cleared == {*table[:STATES], table[-1]}


def test_a_snapshot_goes_with_a_block_that_is_older() -> None:
    scheduler, tokens = new_scheduler(num_blocks=20), list(range(40))
    assert ask(scheduler, tokens) == (0, [32, 40])
    assert ask(scheduler, [*tokens[:22], *range(50, 58)]) == (0, [20, 30])  # a snapshot at the end of a block of before
    place = block_hashes(tokens, BLOCK, "")[4]
    assert len(scheduler.pool.snapshot(place)) == STATES
    ask(scheduler, list(range(100, 140)))
    assert (scheduler.pool.match([place]), scheduler.pool.snapshot(place)) == ([], ())


def test_a_snapshot_goes_with_its_block_and_is_no_burden() -> None:
    scheduler = new_scheduler(num_blocks=16)
    ask(scheduler, list(range(30, 60)))
    announced = set(scheduler.pool.indexed_hashes)
    assert len(announced) == 7 + 1
    assert ask(scheduler, list(range(80, 133)), max_new=3) == (0, [44, 53])  # no room for a snapshot: all 16 are taken
    scheduler.check_integrity()
    assert ask(scheduler, list(range(30, 60)))[0] == 0
    gone = {event.block_hash for event in scheduler.pool.log.take()[1] if event.evicted}
    assert announced <= gone


@pytest.mark.parametrize(("num_blocks", "cached"), [(12, 20), (11, 0)])
def test_where_no_room_is_for_a_snapshot_beside_a_state_the_prompt_is_computed(num_blocks: int, cached: int) -> None:
    scheduler, tokens = new_scheduler(num_blocks), list(range(30))
    ask(scheduler, tokens)
    assert ask(scheduler, tokens)[0] == cached


@pytest.mark.parametrize(("num_blocks", "num_tokens"), [(24, 0), (20, 4)])
def test_an_evicted_snapshot_comes_back_with_the_blocks_before_it(num_blocks: int, num_tokens: int) -> None:
    disk, filled = dict[bytes, Any](), list[int]()
    config = SchedulerConfig(BLOCK, 64, 4, max_model_len=200, state_blocks=STATES)
    pool = BlockPool(num_blocks, lambda block, block_hash: disk.update({block_hash: block}))
    scheduler = Scheduler(config, pool, Disk(lambda blocks, _: filled.extend(blocks)))
    first = list(range(30, 60))
    ask(scheduler, first)
    ask(scheduler, list(range(100, 160)))
    sequence = SequenceState(make_request("again", [*first, *range(200, 210)], eos_token_ids=frozenset()))
    sequence.from_disk.update(from_disk(disk, scheduler.tables.missing(sequence)))
    scheduler.add(sequence)
    run_step(scheduler)
    assert (sequence.num_cached_tokens, len(filled)) == (20, STATES + num_tokens)
    assert not sequence.from_disk
    scheduler.check_integrity()


def test_several_batches_in_flight_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="one batch at a time"):
        SchedulerConfig(BLOCK, 64, 4, max_model_len=200, state_blocks=STATES, max_in_flight=2)

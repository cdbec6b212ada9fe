"""Windows: after any history a step finds all KV that its tokens see, and sequences hold no more blocks than needed."""

from collections.abc import Iterable
from itertools import accumulate

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import rule

from engine.batch import ScheduledBatch
from engine.kv.block_pool import BlockPool
from engine.kv.windows import Windows
from engine.scheduler import Scheduler
from engine.sequence import SequenceState, SequenceStatus
from mesh.domain.block_hashes import BlockHash, block_hashes, group_hash
from mesh.domain.kv_groups import NO_BLOCK, KVGroups
from tests.unit.engine.test_scheduler import BLOCK, EOS, MAX_BATCH_TOKENS, SchedulerLife


def content(tokens: list[int]) -> list[int]:
    """What the KV of each token depends on: it and the tokens before it."""
    return list(accumulate(tokens, lambda before, token: hash((before, token)), initial=0))[1:]


class WindowedLife(SchedulerLife):
    """The same state machine with sliding windows, over a memory that holds what a model would write."""

    windows = (0, 6)

    def __init__(self) -> None:
        super().__init__()
        self.memory: dict[tuple[int, int], tuple[int, int]] = {}  # (block, place) -> (group, content)

    @rule(
        target=SchedulerLife.live,
        common=st.integers(4, 24),
        tail=st.lists(st.integers(1, 2), max_size=8),
        is_sent=st.booleans(),
    )
    def alike(self, common: int, tail: list[int], is_sent: bool):
        """Prompts that begin alike, so that some of their blocks are found."""
        if is_sent:
            return self.reserve([1] * common + tail, max_new=9, num_forks=1)
        return self.add([1] * common + tail, max_new=9, hand_over=False, num_forks=1)

    def receive(self, sequence: SequenceState) -> None:
        """The blocks that the last token sees arrive, but for those that are here."""
        tokens, ready = sequence.token_ids, sequence.num_cached_tokens
        sent = self.groups.visible_entries(len(tokens))
        assert [place for place, block in enumerate(sequence.block_table) if block != NO_BLOCK] == sent
        self.write(sequence, content(tokens), range(ready, len(tokens)))
        self.check_seen(sequence, content(tokens), range(len(tokens) - 1, len(tokens)))

    def check_planned(self, batch: ScheduledBatch) -> None:
        super().check_planned(batch)
        for source, target in batch.copies:
            for place in range(BLOCK):
                self.memory[target, place] = self.memory.get((source, place), (0, 0))
        for item in batch.items:
            known = content([*item.sequence.token_ids[: item.start], *item.token_ids()])
            self.write(item.sequence, known, range(item.start, item.end))
            self.check_seen(item.sequence, known, range(item.start, item.end))

    def check_seen(self, sequence: SequenceState, known: list[int], tokens: range) -> None:
        for group, window in enumerate(self.groups.windows):
            first = max(0, tokens.start - window + 1) if window else 0
            if self.windows_are_chunks and window:
                first = tokens.start // window * window
            for token in range(first, tokens.stop):
                block = sequence.block_table[token // BLOCK * self.groups.count + group]
                assert self.memory[block, token % BLOCK] == (group, known[token])

    def write(self, sequence: SequenceState, known: list[int], tokens: range) -> None:
        for token in tokens:
            for group in range(self.groups.count):
                block = sequence.block_table[token // BLOCK * self.groups.count + group]
                if block == NO_BLOCK and sequence.status is SequenceStatus.WAITING_FOR_KV:
                    continue  # not sent
                assert block != NO_BLOCK
                assert self.scheduler.pool._hash_of[block] is None
                self.memory[block, token % BLOCK] = group, known[token]

    def finish(self, place: int, token_id: int) -> None:
        super().finish(place, token_id)
        for sequence in self.scheduler._slots.values():
            num_held = sum(block != NO_BLOCK for block in sequence.block_table)
            assert num_held <= self.groups.num_blocks_at_once(sequence.num_tokens, MAX_BATCH_TOKENS)
            if sequence.status is SequenceStatus.RUNNING and sequence.is_decoding:
                assert num_held <= self.groups.num_blocks_for(sequence.num_tokens)


WindowedLife.TestCase.settings = settings(max_examples=60, stateful_step_count=40)
TestWindowedLife = WindowedLife.TestCase


class AllWindowsLife(WindowedLife):
    """No layer sees all tokens."""

    windows = (7,)


AllWindowsLife.TestCase.settings = settings(max_examples=40, stateful_step_count=40)
TestAllWindowsLife = AllWindowsLife.TestCase


class ManyWindowsLife(WindowedLife):
    """Several groups of each kind, windows that end in the middle of a block, and several batches in flight."""

    windows = (0, 0, 5, 9)
    max_in_flight = 3


ManyWindowsLife.TestCase.settings = settings(max_examples=40, stateful_step_count=40)
TestManyWindowsLife = ManyWindowsLife.TestCase


class ChunkedLife(WindowedLife):
    """Tokens see those from the beginning of their chunk on."""

    windows = (0, 8)
    windows_are_chunks = True
    max_in_flight = 2


ChunkedLife.TestCase.settings = settings(max_examples=40, stateful_step_count=40)
TestChunkedLife = ChunkedLife.TestCase


class KeptLife(WindowedLife):
    """Evicted blocks are kept, and come back to later prompts: all of them, or some."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: dict[BlockHash, list[tuple[int, int]]] = {}
        self.scheduler = Scheduler(self.scheduler.config, BlockPool(self.num_blocks, self.keep), self)

    def keep(self, block_id: int, block_hash: BlockHash) -> None:
        self.kept[block_hash] = [self.memory.get((block_id, place), (0, 0)) for place in range(BLOCK)]

    def restore(self, block_ids: list[int], payloads: list[list[tuple[int, int]]]) -> None:
        for block_id, payload in zip(block_ids, payloads, strict=True):
            self.memory |= {(block_id, place): each for place, each in enumerate(payload)}

    def new_sequence(self, tokens: list[int], max_new: int, hand_over: bool = False) -> SequenceState:
        sequence = super().new_sequence(tokens, max_new, hand_over)
        names = set(self.scheduler.tables.missing(sequence)) & self.kept.keys()
        lost = {name for name in names if self.count % 2 and name[0] % 4 == 0}
        sequence.from_disk.update({name: self.kept[name] for name in names - lost})  # type: ignore[misc]
        return sequence


KeptLife.TestCase.settings = settings(max_examples=25, stateful_step_count=40)
TestKeptLife = KeptLife.TestCase


def test_a_prefix_is_found_partly_in_memory_and_partly_where_evicted_blocks_are_kept() -> None:
    """What is behind windows is evicted first, then the end of the prompt, and of a position one group's block."""
    life = KeptLife()
    life.add(list(range(1, 26)), max_new=1, hand_over=False, num_forks=0)
    while life.scheduler.has_work:
        life.step(EOS, guess=False, place=0)
    life.scheduler.pool.free(life.scheduler.pool.allocate(life.scheduler.pool.num_free - 6) or [])
    again = life.new_sequence(list(range(1, 26)), 1)
    life.scheduler.add(again)
    life.step(EOS, guess=False, place=0)
    assert again.num_cached_tokens == 24
    assert again.status is SequenceStatus.FINISHED


class CountingPool(BlockPool):
    """A pool that has the blocks of these places (group, position) of a prompt, and counts those that are looked up."""

    def __init__(self, hashes: list[BlockHash], places: Iterable[tuple[int, int]]) -> None:
        super().__init__(1 + len(places := list(places)))
        self.num_found = 0
        for block_id, (group, position) in zip(self.allocate(len(places)) or [], places, strict=True):
            self.publish(block_id, group_hash(hashes[position], group))

    def find(self, block_hash: BlockHash) -> int | None:
        self.num_found += 1
        return super().find(block_hash)


@settings(max_examples=40)
@given(
    gone=st.sets(st.tuples(st.integers(0, 2), st.integers(0, 11)), max_size=9),
    windows=st.tuples(st.just(0), st.integers(1, 20), st.integers(1, 9)),
    token=st.none() | st.just(12 * BLOCK - 1),
)
def test_the_longest_prefix_is_found(gone: set[tuple[int, int]], windows: tuple[int, ...], token: int | None) -> None:
    groups, hashes = KVGroups(BLOCK, windows), block_hashes(list(range(12 * BLOCK)), BLOCK, "")
    there = {(group, position) for group in range(3) for position in range(12)} - gone
    found = Windows(CountingPool(hashes, there), groups, MAX_BATCH_TOKENS).match(hashes, token)

    def is_whole(length: int) -> bool:
        firsts = [groups.first_visible(group, length * BLOCK if token is None else token) for group in range(3)]
        return all((group, each) in there for group, first in enumerate(firsts) for each in range(first, length))

    assert len(found) == 3 * max(filter(is_whole, range(13)))


def test_a_long_prompt_whose_windows_have_gone_is_looked_up_window_by_window() -> None:
    """It is looked up in every step while it waits, and holds up the tokens of others."""
    hashes = block_hashes(list(range(1000 * BLOCK)), BLOCK, "")
    pool = CountingPool(hashes, ((0, position) for position in range(1000)))
    assert Windows(pool, KVGroups(BLOCK, (0, 10 * BLOCK)), MAX_BATCH_TOKENS).match(hashes) == []
    assert pool.num_found <= 1000 // 10 + 10

"""Windows: after any history a step finds all KV that its tokens see, and sequences hold no more blocks than needed."""

from itertools import accumulate

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import rule

from engine.batch import ScheduledBatch
from engine.sequence import SequenceState, SequenceStatus
from mesh.domain.kv_groups import NO_BLOCK
from tests.unit.engine.test_scheduler import BLOCK, MAX_BATCH_TOKENS, SchedulerLife


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

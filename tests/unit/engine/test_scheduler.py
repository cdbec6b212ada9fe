"""Scheduler and block pool under random histories: no block leaks, no budget is exceeded, abort works at any time."""

from dataclasses import replace
from itertools import takewhile

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from engine.batch import ScheduledBatch, ScheduledSequence
from engine.kv.block_pool import BlockPool
from engine.runner import RunnerOutput
from engine.scheduler import Scheduler
from engine.sequence import SequenceState, SequenceStatus
from engine.settings import SchedulerConfig
from engine.speculation.drafters import NgramDrafter
from engine.speculation.speculator import Speculator
from mesh.domain.block_hashes import BlockHash, block_hashes, next_hash
from mesh.domain.errors import InvalidRequest, ModelFailed, WorkerBusy
from mesh.domain.tokens import FinishReason, SampledToken
from tests.defects import Repaired
from tests.fakes.drafters import FakeDrafter, eager_speculator
from tests.fakes.requests import make_request

BLOCK = 4
NUM_BLOCKS = 12
MAX_BATCH_TOKENS = 7
MAX_NUM_SEQS = 5
EOS = 0
SPOILED = 3


def new_scheduler(num_blocks: int = NUM_BLOCKS, **changes: object) -> Scheduler:
    config = {
        "block_size": BLOCK,
        "max_batch_tokens": MAX_BATCH_TOKENS,
        "max_num_seqs": MAX_NUM_SEQS,
        "max_model_len": 40,
    }
    return Scheduler(SchedulerConfig(**(config | changes)), BlockPool(num_blocks))


def run_step(
    scheduler: Scheduler, token_id: int = 1, speculator: Speculator | None = None
) -> tuple[ScheduledBatch, list]:
    """Sample `token_id` for every token of the item."""
    batch = scheduler.schedule()
    if speculator is not None:
        batch = speculator.extend(batch, scheduler)
    outputs = [RunnerOutput(_sampled(item, token_id)) for item in batch.items]
    if speculator is not None:
        speculator.learn(batch, outputs)
    return batch, scheduler.update(batch, outputs)


def _sampled(item: ScheduledSequence, token_id: int) -> tuple[SampledToken, ...]:
    num_right = len(list(takewhile(token_id.__eq__, item.drafts)))
    return (SampledToken(token_id, -0.5),) * (1 + num_right) if item.needs_sampling else ()


class SchedulerLife(RuleBasedStateMachine):
    """Adds, reserves, forks, commits, aborts and steps in any order."""

    live = Bundle("live")
    whole_prompts = False
    max_in_flight = 1
    state_blocks = 0
    windows: tuple[int, ...] = ()
    windows_are_chunks = False

    def __init__(self) -> None:
        super().__init__()
        self.in_flight: list[tuple[ScheduledBatch, list[list[int]]]] = []
        self.num_blocks = NUM_BLOCKS * max(1, len(self.windows))
        self.scheduler = new_scheduler(
            self.num_blocks,
            whole_prompts=self.whole_prompts,
            max_in_flight=self.max_in_flight,
            state_blocks=self.state_blocks,
            windows=self.windows,
            windows_are_chunks=self.windows_are_chunks,
        )
        self.groups = self.scheduler.config.groups
        self.speculator = eager_speculator(NgramDrafter(), 3)
        self.count = 0

    def new_sequence(self, tokens: list[int], max_new: int, hand_over: bool = False) -> SequenceState:
        self.count += 1
        request = make_request(f"r{self.count}", tokens, max_new_tokens=max_new, eos_token_ids=frozenset({EOS}))
        return SequenceState(request, hand_over=hand_over)

    def give_forks(self, sequence: SequenceState, num_forks: int):
        spec = sequence.spec
        sequence.forks = [
            SequenceState(replace(spec, request_id=f"{spec.request_id}-{place}")) for place in range(num_forks)
        ]
        return multiple(sequence, *sequence.forks)

    @rule(
        target=live,
        tokens=st.lists(st.integers(1, 2), min_size=1, max_size=30),
        max_new=st.integers(1, 20),
        hand_over=st.booleans(),
        num_forks=st.integers(0, 3),
    )
    def add(self, tokens: list[int], max_new: int, hand_over: bool, num_forks: int):
        sequence = self.new_sequence(tokens, max_new, hand_over)
        self.scheduler.add(sequence)
        return self.give_forks(sequence, 0 if hand_over else num_forks)

    @rule(
        target=live,
        tokens=st.lists(st.integers(1, 2), min_size=1, max_size=30),
        max_new=st.integers(1, 20),
        num_forks=st.integers(0, 3),
    )
    def reserve(self, tokens: list[int], max_new: int, num_forks: int):
        sequence = self.new_sequence(tokens, max_new)
        before = self.scheduler.pool.num_free
        try:
            ready = self.scheduler.reserve(sequence)
        except WorkerBusy:
            assert self.scheduler.pool.num_free == before
            return multiple()
        assert ready % BLOCK == 0
        assert ready <= len(tokens)
        return self.give_forks(sequence, num_forks)

    @rule(sequence=live)
    def commit(self, sequence: SequenceState) -> None:
        was_waiting, forks = sequence.status is SequenceStatus.WAITING_FOR_KV, sequence.forks
        if was_waiting:
            self.receive(sequence)
        self.scheduler.commit(sequence.key, 1)
        assert not was_waiting or sequence.num_uncomputed_tokens == 1 + (self.state_blocks > 0)
        if was_waiting:
            assert sequence.forks == []
            assert not [fork for fork in forks if fork.status is SequenceStatus.WAITING]

    def receive(self, sequence: SequenceState) -> None:
        """The KV of a reserved sequence arrives."""

    @rule(sequence=consumes(live))
    def abort(self, sequence: SequenceState) -> None:
        self.scheduler.remove(sequence)
        self.scheduler.remove(sequence)
        is_computed = any(item.sequence is sequence for batch, _ in self.in_flight for item in batch.items)
        assert is_computed or sequence.block_table == []

    @rule(token_id=st.sampled_from([EOS, 1, 2, SPOILED]), guess=st.booleans(), place=st.integers(0, 2))
    def step(self, token_id: int, guess: bool, place: int) -> None:
        """Plan a batch; once as many are in flight as may be, any one of them is computed. A token spoils drafts."""
        batch = self.scheduler.schedule()
        if guess and self.max_in_flight == 1:
            batch = self.speculator.extend(batch, self.scheduler)
        self.check_planned(batch)
        if batch.items:
            self.in_flight.append((batch, [list(item.sequence.block_table) for item in batch.items]))
        if len(self.in_flight) >= self.max_in_flight or (self.in_flight and not batch.items):
            self.finish(place % len(self.in_flight), token_id)

    def check_planned(self, batch: ScheduledBatch) -> None:
        assert batch.items or self.in_flight or self.is_waiting_for_others(), "nothing would ever wake the engine"
        computing = {item.sequence.key for other, _ in self.in_flight for item in other.items}
        assert computing.isdisjoint(item.sequence.key for item in batch.items)
        over = batch.num_tokens > MAX_BATCH_TOKENS
        assert not over or (self.whole_prompts and sum(item.num_tokens > 1 for item in batch.items) == 1)
        for item in batch.items if self.whole_prompts else ():
            encoded = item.sequence.num_prompt_tokens - 1
            assert item.start >= encoded or (item.start == 0 and item.end > encoded)
        sizes = [item.num_tokens for item in batch.items]
        assert all(size == 1 for size in sizes[: batch.num_decodes])
        assert all(size > 1 for size in sizes[batch.num_decodes :])

    def is_waiting_for_others(self) -> bool:
        """True if nothing can be computed before a router or another worker does something."""
        slots, held = self.scheduler._slots.values(), self.scheduler._held
        is_running = any(sequence.status is SequenceStatus.RUNNING for sequence in slots)
        return not is_running and (not self.scheduler._waiting or bool(slots) or bool(held))

    def finish(self, place: int, token_id: int) -> None:
        batch, _ = self.in_flight.pop(place)
        tokens = [
            RunnerOutput(() if item.drafts and token_id == SPOILED else _sampled(item, token_id))
            for item in batch.items
        ]
        if any(item.drafts for item in batch.items):
            self.speculator.learn(batch, tokens)
        outputs = self.scheduler.update(batch, tokens)
        most = {item.sequence.key: 1 + len(item.drafts) for item in batch.items}
        for output in outputs:
            assert 1 <= len(output.tokens) <= most[output.request_id, output.attempt]
        for item in batch.items:  # what guesses did not use is given back
            sequence = item.sequence
            assert sequence.num_tokens <= sequence.spec.max_total_tokens
            entries = self.groups.num_positions(sequence.num_tokens) * self.groups.count
            assert len(sequence.block_table) <= self.state_blocks + entries
            assert sequence.is_over or sequence.num_uncomputed_tokens >= 1
            assert sequence.status is not SequenceStatus.FINISHED or sequence.block_table == []
        for sequence in self.scheduler.take_preempted():
            assert sequence.status is SequenceStatus.FINISHED

    @invariant()
    def whole(self) -> None:
        self.scheduler.check_integrity()
        for batch, tables in self.in_flight:  # nobody takes blocks away while they are written
            for item, table in zip(batch.items, tables, strict=True):
                assert item.sequence.block_table[: len(table)] == table
        load = self.scheduler.load()
        assert load.num_running <= MAX_NUM_SEQS

    def teardown(self) -> None:
        """After any history, running to the end frees all blocks."""
        while self.in_flight:
            self.finish(0, EOS)
        for _ in range(500):
            if not self.scheduler.has_work:
                break
            run_step(self.scheduler, EOS)
        for table in (self.scheduler._held, self.scheduler._slots, self.scheduler._waiting):
            for sequence in list(table.values()):
                self.scheduler.remove(sequence)
        self.scheduler.check_integrity()
        assert self.scheduler.pool.num_free == self.num_blocks - (1 if self.windows else 0)


SchedulerLife.TestCase.settings = settings(max_examples=120, stateful_step_count=40)
TestSchedulerLife = SchedulerLife.TestCase


class WholePromptsLife(SchedulerLife):
    """The same state machine for encoder-decoder models (`whole_prompts`)."""

    whole_prompts = True


WholePromptsLife.TestCase.settings = settings(max_examples=60, stateful_step_count=40)
TestWholePromptsLife = WholePromptsLife.TestCase


class PipelinedLife(SchedulerLife):
    """The same state machine with several batches in flight, updated in any order."""

    max_in_flight = 3


PipelinedLife.TestCase.settings = settings(max_examples=120, stateful_step_count=40)
TestPipelinedLife = PipelinedLife.TestCase


@pytest.mark.parametrize("max_in_flight", [1, 2, 4])
def test_tokens_do_not_depend_on_how_many_batches_are_in_flight(max_in_flight: int) -> None:
    scheduler, in_flight = new_scheduler(max_batch_tokens=5, max_num_seqs=4, max_in_flight=max_in_flight), []
    sequences = [SequenceState(make_request(f"r{n}", range(1, 4 + n), max_new_tokens=6)) for n in range(4)]
    for sequence in sequences:
        scheduler.add(sequence)
    while True:
        batch = scheduler.schedule()
        if batch.items:
            in_flight.append(batch)
        if not in_flight:
            break
        if len(in_flight) == max_in_flight or not batch.items:
            done = in_flight.pop(-1)
            assert done.number > 0
            tokens = [_sampled(item, 1 + sum(item.sequence.token_ids) % 97) for item in done.items]
            scheduler.update(done, [RunnerOutput(each) for each in tokens])
    for sequence in sequences:
        expected = list(sequence.spec.token_ids)
        while len(expected) < sequence.num_prompt_tokens + 6:
            expected.append(1 + sum(expected) % 97)
        assert sequence.token_ids == expected
    assert scheduler.pool.num_free == NUM_BLOCKS


def test_an_aborted_sequence_keeps_its_blocks_until_its_batch_is_computed() -> None:
    scheduler = new_scheduler()
    sequence = SequenceState(make_request("a", range(1, 6), max_new_tokens=3))
    scheduler.add(sequence)
    batch = scheduler.schedule()
    scheduler.remove(sequence)
    assert sequence.block_table
    with pytest.raises(InvalidRequest, match="is already on this worker"):
        scheduler.add(sequence)
    assert scheduler.update(batch, [RunnerOutput(_sampled(item, 1)) for item in batch.items]) == []
    assert scheduler.pool.num_free == NUM_BLOCKS
    with pytest.raises(ValueError, match="is not in flight"):
        scheduler.update(batch, [RunnerOutput()])


def test_prompt_is_computed_in_chunks_then_decoded() -> None:
    scheduler = new_scheduler()
    sequence = SequenceState(make_request("a", range(1, 18), max_new_tokens=3))
    scheduler.add(sequence)
    chunks = []
    while scheduler.has_work:
        batch, outputs = run_step(scheduler)
        chunks.append((batch.items[0].start, batch.items[0].num_tokens, len(outputs)))
    assert chunks == [(0, 7, 0), (7, 7, 0), (14, 3, 1), (17, 1, 1), (18, 1, 1)]
    assert outputs[0].finish_reason is FinishReason.LENGTH
    assert scheduler.pool.num_free == NUM_BLOCKS


def test_second_prompt_takes_cached_blocks_but_computes_its_last_token() -> None:
    scheduler = new_scheduler()
    for name in ("a", "b"):
        scheduler.add(SequenceState(make_request(name, range(1, 9), max_new_tokens=1)))
        while scheduler.has_work:
            batch, outputs = run_step(scheduler)
    assert batch.items[0].start == BLOCK
    assert outputs[0].cached_tokens == BLOCK


def test_namespaces_do_not_share_blocks() -> None:
    scheduler = new_scheduler(max_batch_tokens=40)
    for name in ("tenant-a", "tenant-b"):
        scheduler.add(SequenceState(make_request(name, range(1, 9), max_new_tokens=1, cache_namespace=name)))
        while scheduler.has_work:
            batch, _ = run_step(scheduler)
    assert batch.items[0].start == 0


def test_adapters_do_not_share_blocks() -> None:
    """The same prompt under two adapters and the base model: each finds its own KV only."""
    scheduler, cached = new_scheduler(adapters=frozenset({"one", "two"})), []
    for number, adapter in enumerate(("", "one", "two", "one", "", "two")):
        scheduler.add(SequenceState(make_request(str(number), range(1, 9), max_new_tokens=1, adapter=adapter)))
        while scheduler.has_work:
            _, outputs = run_step(scheduler)
        cached.append(outputs[0].cached_tokens)
    assert cached == [0, 0, 0, BLOCK, BLOCK, BLOCK]


def test_a_reservation_finds_no_kv_of_another_adapter() -> None:
    scheduler = new_scheduler(adapters=frozenset({"one"}))
    scheduler.add(SequenceState(make_request("a", range(1, 9), max_new_tokens=1, adapter="one")))
    while scheduler.has_work:
        run_step(scheduler)
    assert scheduler.reserve(SequenceState(make_request("b", range(1, 9), max_new_tokens=4))) == 0


def test_an_adapter_that_is_not_loaded_is_refused() -> None:
    scheduler = new_scheduler(adapters=frozenset({"one"}))
    for accept in (scheduler.add, scheduler.reserve):
        with pytest.raises(InvalidRequest, match="no adapter two"):
            accept(SequenceState(make_request("a", range(1, 9), adapter="two")))


def test_rows_of_one_adapter_are_neighbours() -> None:
    scheduler = new_scheduler(max_num_seqs=8, max_batch_tokens=8, adapters=frozenset({"one", "two"}))
    for number, adapter in enumerate(("two", "", "one", "two", "")):
        scheduler.add(SequenceState(make_request(str(number), [number], adapter=adapter)))
    adapters = [item.sequence.spec.adapter for item in scheduler.schedule().items]
    assert adapters == ["", "", "one", "two", "two"]


def test_reservation_with_everything_cached_needs_no_kv() -> None:
    scheduler = new_scheduler()
    scheduler.add(SequenceState(make_request("a", range(1, 9), max_new_tokens=1)))
    while scheduler.has_work:
        run_step(scheduler)
    assert scheduler.reserve(SequenceState(make_request("b", range(1, 9), max_new_tokens=4))) == 8


def test_youngest_is_preempted_when_blocks_run_out() -> None:
    scheduler = new_scheduler(max_batch_tokens=40)
    old = SequenceState(make_request("old", range(1, 20), max_new_tokens=20))
    young = SequenceState(make_request("young", range(30, 50), max_new_tokens=20))
    scheduler.add(old)
    scheduler.add(young)
    preempted: list[SequenceState] = []
    while not preempted:
        run_step(scheduler)
        preempted = scheduler.take_preempted()
    assert preempted == [young]
    assert old.status is SequenceStatus.RUNNING


def test_too_large_is_refused() -> None:
    scheduler = new_scheduler()
    sequence = SequenceState(make_request("a", range(1, 41), max_new_tokens=1))
    for command in (scheduler.add, scheduler.reserve):
        with pytest.raises(InvalidRequest, match="do not fit"):
            command(sequence)


def test_handed_over_sequence_holds_its_blocks_until_released() -> None:
    scheduler = new_scheduler()
    sequence = SequenceState(make_request("a", range(1, 7), max_new_tokens=5), hand_over=True)
    scheduler.add(sequence)
    run_step(scheduler)
    assert sequence.status is SequenceStatus.HELD
    assert scheduler.pool.num_free == NUM_BLOCKS - 2
    scheduler.remove(sequence)
    assert scheduler.pool.num_free == NUM_BLOCKS


def test_whole_prompts_go_over_the_budget_one_by_one() -> None:
    scheduler = new_scheduler(whole_prompts=True)
    first, second = (SequenceState(make_request(name, range(1, 11), max_new_tokens=3)) for name in "ab")
    third = SequenceState(make_request("c", range(1, 4), max_new_tokens=3))
    for sequence in (first, second, third):
        scheduler.add(sequence)
    steps = []
    for _ in range(3):
        batch, _ = run_step(scheduler)
        steps.append([(item.sequence.key[0], item.start, item.num_tokens) for item in batch.items])
    assert steps[0] == [("a", 0, 10)]
    assert steps[1] == [("a", 10, 1), ("b", 0, 10)]
    assert steps[2] == [("a", 11, 1), ("b", 10, 1), ("c", 0, 3)]


def test_whole_prompts_share_blocks_with_equal_prompts_only() -> None:
    scheduler = new_scheduler(whole_prompts=True, max_batch_tokens=40)
    prompt = list(range(1, 10))  # two blocks are the encoder's, one token is the decoder's first
    for name, ids, start in (("a", prompt, 0), ("same", prompt, 8), ("longer", [*prompt[:8], 99, 9], 0)):
        scheduler.add(SequenceState(make_request(name, ids, max_new_tokens=1)))
        batch, _ = run_step(scheduler)
        assert batch.items[0].start == start
    # A part of an encoder's prompt is of no use here; over there it need not be sent again.
    unaligned = [*prompt, 10]
    scheduler.add(SequenceState(make_request("b", unaligned, max_new_tokens=1)))
    run_step(scheduler)
    scheduler.add(SequenceState(make_request("c", unaligned, max_new_tokens=1)))
    assert scheduler.schedule().items[0].start == 0
    assert scheduler.reserve(SequenceState(make_request("d", unaligned))) == 8


def test_a_replay_after_preemption_need_not_encode_again() -> None:
    scheduler = new_scheduler(whole_prompts=True)
    scheduler.add(first := SequenceState(make_request("a", range(1, 8), max_new_tokens=9)))
    for _ in range(4):
        run_step(scheduler)
    scheduler.remove(first)
    ids = [*range(1, 8), 1, 1, 1, 1]
    scheduler.add(SequenceState(make_request("a", ids, max_new_tokens=9, attempt=1, num_prompt_tokens=7)))
    assert [(item.start, item.num_tokens) for item in scheduler.schedule().items] == [(8, 3)]


def test_cache_log_leaves_a_gap_instead_of_growing() -> None:
    pool = BlockPool(2)
    for i in range(40):
        [block] = pool.allocate(1) or [None]
        pool.publish(block, bytes([i]))
        pool.free([block])
    first, events = pool.log.take()
    assert len(events) <= 8
    assert first + len(events) == pool.log.next_number


def test_reservations_do_not_starve_a_waiting_prompt() -> None:
    scheduler = new_scheduler(max_batch_tokens=40)
    holder = SequenceState(make_request("holder", range(1, 25)))
    scheduler.reserve(holder)  # 6 of 12 blocks
    scheduler.add(SequenceState(make_request("local", range(60, 88))))  # needs 7
    assert scheduler.schedule().items == ()
    with pytest.raises(WorkerBusy):
        scheduler.reserve(SequenceState(make_request("newcomer", range(30, 38))))
    scheduler.remove(holder)
    assert scheduler.schedule().items[0].sequence.key == ("local", 0)


def test_an_attempt_is_accepted_once_and_an_old_abort_does_not_hit_a_new_one() -> None:
    scheduler = new_scheduler()
    first, second = (SequenceState(make_request("a", range(1, 7))) for _ in range(2))
    scheduler.add(first)
    with pytest.raises(InvalidRequest, match="already"):
        scheduler.add(second)
    scheduler.remove(first)
    scheduler.add(second)
    scheduler.remove(first)
    assert scheduler.schedule().items[0].sequence is second


def test_prompt_that_is_handed_over_may_fill_the_pool() -> None:
    scheduler = new_scheduler(max_batch_tokens=60, max_model_len=100)
    prompt = range(1, 1 + NUM_BLOCKS * BLOCK)
    with pytest.raises(InvalidRequest):
        scheduler.add(SequenceState(make_request("stays", prompt)))
    scheduler.add(SequenceState(make_request("goes", prompt), hand_over=True))
    run_step(scheduler)
    assert scheduler.pool.num_free == 0


def test_drafts_end_with_the_sequence_and_leave_capacity_to_others() -> None:
    scheduler = new_scheduler(max_batch_tokens=40)
    drafter = FakeDrafter(lambda _, length: [1] * length)
    speculator = eager_speculator(drafter, 8)
    scheduler.add(SequenceState(make_request("a", range(1, 10), max_new_tokens=4)))
    scheduler.add(SequenceState(make_request("b", range(1, 30), max_new_tokens=20)))
    run_step(scheduler)
    batch, outputs = run_step(scheduler, 1, speculator)
    # a: of 4 tokens one is there, and one is sampled behind the guesses; b: its last block has room for 2
    assert [len(item.drafts) for item in batch.items] == [2, 2]
    assert [(len(output.tokens), output.finish_reason) for output in outputs] == [(3, FinishReason.LENGTH), (3, None)]


def test_tokens_after_the_one_that_ends_a_sequence_are_dropped() -> None:
    scheduler = new_scheduler(max_batch_tokens=40)
    request = make_request("a", range(10, 15), max_new_tokens=20, sampling={"stop_token_ids": (3,)})
    sequence = SequenceState(request)
    scheduler.add(sequence)
    run_step(scheduler)
    batch = scheduler.schedule()
    [item] = batch.items
    assert scheduler.allocate_for_drafts(sequence, 4) == 4
    sampled = tuple(SampledToken(token_id, -0.5) for token_id in (2, 3, 4, 5, 6))
    drafted = replace(item, num_tokens=5, drafts=(2, 3, 4, 5))
    [output] = scheduler.update(replace(batch, items=(drafted,)), [RunnerOutput(sampled)])
    assert ([token.id for token in output.tokens], output.finish_reason) == ([2, 3], FinishReason.STOP_SEQUENCE)
    assert scheduler.pool.num_free == NUM_BLOCKS
    assert scheduler.load().generated_tokens == 3


def test_prompts_that_wait_are_hashed_at_most_once(monkeypatch: pytest.MonkeyPatch) -> None:
    hashed: list[int] = []

    def count(token_ids: list[int], *arguments: object) -> list[BlockHash]:
        hashed.append(len(token_ids))
        return block_hashes(token_ids, *arguments)

    monkeypatch.setattr("engine.kv.block_sharing.block_hashes", count)
    scheduler = new_scheduler(max_batch_tokens=40)
    for place in range(MAX_NUM_SEQS):
        scheduler.add(SequenceState(make_request(f"r{place}", [1], max_new_tokens=30)))
    run_step(scheduler)
    scheduler.add(SequenceState(make_request("waits", range(1, 9))))
    hashed.clear()
    for _ in range(3):
        run_step(scheduler)
    assert hashed == [], "no slot is free"
    scheduler = new_scheduler()
    holder = SequenceState(make_request("holder", [1] * 39))
    scheduler.reserve(holder)
    scheduler.add(SequenceState(make_request("waits", range(1, 9), max_new_tokens=1)))
    hashed.clear()
    for _ in range(3):
        batch, _ = run_step(scheduler)
        assert batch.items == (), "no block is free"
    assert hashed == [8]
    scheduler.remove(holder)
    run_step(scheduler)
    assert hashed == [8]


@pytest.mark.parametrize("is_transferred", [True, False])
def test_a_prompt_that_is_published_is_not_hashed_again(monkeypatch: pytest.MonkeyPatch, is_transferred: bool) -> None:
    """A prompt of 100,000 tokens would hold up the steps of all others."""
    hashed: list[list[int]] = []

    def count(parent: BlockHash, token_ids: list[int]) -> BlockHash:
        hashed.append(token_ids)
        return next_hash(parent, token_ids)

    monkeypatch.setattr("engine.kv.block_sharing.next_hash", count)
    scheduler, prompt = new_scheduler(max_batch_tokens=40), list(range(1, 11))
    sequence = SequenceState(make_request("a", prompt, max_new_tokens=4))
    if is_transferred:
        scheduler.reserve(sequence)
        scheduler.commit(sequence.key, 50)
    else:
        scheduler.add(sequence)
        run_step(scheduler)
    assert hashed == []
    assert sequence.block_hashes == block_hashes(prompt, BLOCK, sequence.spec.kv_scope)
    while scheduler.has_work:
        run_step(scheduler)
    tokens, num_full = sequence.token_ids, (len(sequence.token_ids) - 1) // BLOCK
    assert sequence.block_hashes == block_hashes(tokens[: num_full * BLOCK], BLOCK, sequence.spec.kv_scope)
    assert hashed == [tokens[first : first + BLOCK] for first in range(8, num_full * BLOCK, BLOCK)]


def test_drafts_that_spoil_a_step_are_not_tried_again() -> None:
    """The runner gives back nothing, not even a failure."""
    scheduler = new_scheduler()
    sequence = SequenceState(make_request("a", [2, 2], max_new_tokens=3))
    scheduler.add(sequence)
    speculator = eager_speculator(FakeDrafter(lambda _, most: [7] * most), 3)
    run_step(scheduler, 1, speculator)
    batch = speculator.extend(scheduler.schedule(), scheduler)
    assert len(batch.items[0].drafts) > 0
    speculator.learn(batch, [RunnerOutput()])
    assert scheduler.update(batch, [RunnerOutput()]) == []
    assert (sequence.num_uncomputed_tokens, len(sequence.block_table)) == (1, 1)
    assert scheduler.take_failed() == []
    batch, [output] = run_step(scheduler, 1, speculator)
    assert batch.items[0].drafts == ()
    assert (output.first_index, len(output.tokens)) == (1, 1)
    load = scheduler.load()
    assert load.drafted_tokens > load.accepted_tokens == 0


def test_a_failed_step_accepts_no_drafts() -> None:
    scheduler = new_scheduler()
    scheduler.add(SequenceState(make_request("a", [2, 2], max_new_tokens=9)))
    speculator = eager_speculator(FakeDrafter(lambda _, most: [1] * most), 3)
    run_step(scheduler, 1, speculator)
    run_step(scheduler, 1, speculator)
    before = scheduler.load()
    assert before.accepted_tokens > 0
    batch = speculator.extend(scheduler.schedule(), scheduler)
    outputs = [RunnerOutput(failure=ModelFailed("NaN"))]
    speculator.learn(batch, outputs)
    scheduler.update(batch, outputs)
    assert scheduler.load().accepted_tokens == before.accepted_tokens
    assert scheduler.pool.num_free == NUM_BLOCKS


def forked(
    prompt_length: int, num_forks: int = 2, **changes: object
) -> tuple[Scheduler, SequenceState, list[SequenceState]]:
    """A scheduler right after the step that has computed a prompt, which others have waited for."""
    scheduler = new_scheduler(max_batch_tokens=40, **changes)
    sequence = SequenceState(make_request("a", range(1, 1 + prompt_length), max_new_tokens=9))
    forks = [SequenceState(make_request(f"f{i}", sequence.token_ids, max_new_tokens=9)) for i in range(num_forks)]
    sequence.forks = list(forks)
    scheduler.add(sequence)
    run_step(scheduler)
    return scheduler, sequence, forks


@pytest.mark.parametrize(("length", "num_shared", "copies"), [(1, 0, False), (4, 0, True), (5, 1, False), (7, 1, True)])
def test_forks_hold_the_prompts_full_blocks_and_copy_the_rest(length: int, num_shared: int, copies: bool) -> None:
    scheduler, sequence, forks = forked(length)
    origin = list(sequence.block_table)
    batch = scheduler.schedule()
    assert [item.sequence for item in batch.items] == [sequence, *forks]
    assert [item.num_tokens for item in batch.items] == [1, 1, 1], "each computes the prompt's last token for itself"
    for fork in forks:
        assert fork.block_table[:num_shared] == origin[:num_shared]
        assert fork.block_table[num_shared] not in origin
    copied = [(origin[num_shared], fork.block_table[num_shared]) for fork in forks]
    assert batch.copies == (tuple(copied) if copies else ())
    scheduler.update(batch, [RunnerOutput(_sampled(item, 1)) for item in batch.items])
    again, _ = run_step(scheduler)
    assert again.copies == ()
    for each in (sequence, *forks):
        scheduler.check_integrity()
        scheduler.remove(each)
    assert scheduler.pool.num_free == NUM_BLOCKS


def test_what_is_copied_stays_until_it_is() -> None:
    scheduler, sequence, [fork, _] = forked(7)
    held = sequence.block_table[1]
    scheduler.remove(sequence)
    assert held not in (scheduler.pool.allocate(scheduler.pool.num_free) or [])
    assert (held, fork.block_table[1]) in scheduler.schedule().copies


def test_a_batch_in_flight_copies_to_no_block_that_another_sequence_may_get() -> None:
    """A later stage copies late: whoever had got the block meanwhile, such as KV that arrives, would be overwritten."""
    scheduler, sequence, forks = forked(7, max_in_flight=2)
    first = scheduler.schedule()
    assert [item.sequence for item in first.items] == [sequence, forks[0]]
    for fork in forks:
        scheduler.remove(fork)
    free = scheduler.pool.allocate(scheduler.pool.num_free) or []
    assert {target for _, target in first.copies}.isdisjoint(free)
    assert len(first.copies) == 1


def test_forks_in_two_batches_are_copied_by_their_own() -> None:
    scheduler, sequence, forks = forked(7, max_in_flight=2)
    batches = [scheduler.schedule(), scheduler.schedule()]
    assert [[item.sequence for item in batch.items] for batch in batches] == [[sequence, forks[0]], [forks[1]]]
    assert [batch.copies for batch in batches] == [((sequence.block_table[1], fork.block_table[1]),) for fork in forks]
    for batch in batches:
        scheduler.update(batch, [RunnerOutput(_sampled(item, 1)) for item in batch.items])
        scheduler.check_integrity()
    while scheduler.has_work:
        assert run_step(scheduler)[0].copies == ()
    assert scheduler.pool.num_free == NUM_BLOCKS


def test_a_prompt_is_not_hashed_again_for_each_fork(monkeypatch: pytest.MonkeyPatch) -> None:
    hashed: list[list[int]] = []

    def count(parent: BlockHash, token_ids: list[int]) -> BlockHash:
        hashed.append(token_ids)
        return next_hash(parent, token_ids)

    monkeypatch.setattr("engine.kv.block_sharing.next_hash", count)
    scheduler, sequence, forks = forked(11)
    while scheduler.has_work:
        run_step(scheduler)
    prompt = list(sequence.spec.token_ids)
    assert all(ids not in (prompt[:BLOCK], prompt[BLOCK : 2 * BLOCK]) for ids in hashed)
    for each in (sequence, *forks):
        num_full = (len(each.token_ids) - 1) // BLOCK
        assert each.block_hashes == block_hashes(each.token_ids[: num_full * BLOCK], BLOCK, each.spec.kv_scope)


def test_forks_without_a_slot_are_refused() -> None:
    scheduler, _, forks = forked(5, num_forks=3, max_num_seqs=2)
    refused = scheduler.take_failed()
    assert [(fork, type(error)) for fork, error in refused] == [(fork, WorkerBusy) for fork in forks[1:]]
    assert scheduler.take_preempted() == [], "no blocks were taken from them"
    assert [fork.status for fork in forks] == [SequenceStatus.RUNNING, *[SequenceStatus.FINISHED] * 2]


def test_a_sequence_that_ends_with_its_prompt_leaves_its_forks_running() -> None:
    scheduler = new_scheduler(max_batch_tokens=40)
    sequence = SequenceState(make_request("a", range(1, 8), max_new_tokens=1))
    sequence.forks = [SequenceState(make_request("f", sequence.token_ids, max_new_tokens=1))]
    scheduler.reserve(sequence)
    scheduler.commit(sequence.key, 1)
    assert sequence.status is SequenceStatus.FINISHED
    _, [output] = run_step(scheduler)
    assert (output.request_id, output.finish_reason, output.cached_tokens) == ("f", FinishReason.LENGTH, 6)
    assert scheduler.pool.num_free == NUM_BLOCKS


def _roomy_scheduler(max_batch_tokens: int) -> Scheduler:
    config = SchedulerConfig(block_size=16, max_batch_tokens=max_batch_tokens, max_num_seqs=32, max_model_len=10**6)
    return Scheduler(config, BlockPool(10**5))


def test_short_prompts_do_not_wait_for_a_long_one(repaired: Repaired) -> None:
    """90,000 tokens in passes of 512: short prompts go beside them, and the long one loses no more than they take."""
    scheduler, num_steps, num_short = _roomy_scheduler(512), 0, 0
    scheduler.add(SequenceState(make_request("long", [1] * 90_000, max_new_tokens=1), hand_over=True))
    waited: list[int] = []
    while not waited or scheduler.has_work:
        if num_short < 80 and num_steps % 2:
            scheduler.add(
                SequenceState(
                    make_request(f"short-{num_short}", [2 + num_short] * 100, max_new_tokens=1), hand_over=True
                )
            )
            num_short += 1
            added_at = num_steps
        _, outputs = run_step(scheduler)
        num_steps += 1
        waited += [num_steps - added_at for output in outputs if output.request_id != "long"]
    assert waited == [1] * 80, "each was computed in the pass after it came"
    assert num_steps == -(-(90_000 + 80 * 100) // 512), "and no pass was partly empty"
    repaired(
        "S1", "scheduler: each of 80 short prompts is in the next pass (before: 176 passes); as many passes in all"
    )


@given(
    prompts=st.lists(st.tuples(st.integers(0, 12), st.integers(2, 300)), min_size=1, max_size=12),
    budget=st.integers(4, 64),
)
def test_every_pass_is_full_and_half_of_it_is_the_oldest_prompts(prompts: list[tuple[int, int]], budget: int) -> None:
    scheduler, waiting = _roomy_scheduler(max(budget, 32)), sorted(prompts)
    budget = scheduler.config.max_batch_tokens
    todo: dict[str, int] = {}
    step = 0
    while waiting or todo:
        while waiting and waiting[0][0] <= step:
            name = f"{len(waiting)}"
            todo[name] = waiting.pop(0)[1]
            ids = [int(name) + 1] * todo[name]
            scheduler.add(
                SequenceState(make_request(name, ids, max_new_tokens=1, cache_namespace=name), hand_over=True)
            )
        batch, _ = run_step(scheduler)
        assert batch.num_tokens == min(budget, sum(todo.values()))
        parts = {item.sequence.key[0]: item.num_tokens for item in batch.items}
        if todo:
            oldest = next(iter(todo))
            assert parts[oldest] >= min(todo[oldest], budget // 2), "nobody is starved"
        todo = {name: left - parts.get(name, 0) for name, left in todo.items() if left > parts.get(name, 0)}
        step += 1


def test_another_role_begins_with_its_limits_and_the_cached_blocks() -> None:
    scheduler = new_scheduler(max_batch_tokens=16)
    first = SequenceState(make_request("first", list(range(9)), max_new_tokens=1))
    scheduler.add(first)
    decode = replace(scheduler.config, max_batch_tokens=6, max_num_seqs=2, max_step_stretch=2.0)
    with pytest.raises(ValueError, match="1 sequences are left of the former role"):
        scheduler.begin_role(decode)
    run_step(scheduler)
    assert scheduler.load().computed_tokens == 9
    scheduler.begin_role(decode)
    assert (scheduler.load().computed_tokens, scheduler.load().generated_tokens) == (0, 0)
    again = SequenceState(make_request("again", [*range(9), *range(20, 30)], max_new_tokens=1))
    scheduler.add(again)
    batch, _ = run_step(scheduler)
    assert (again.num_cached_tokens, batch.num_tokens) == (8, 6)
    scheduler.check_integrity()

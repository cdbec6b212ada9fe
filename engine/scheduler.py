"""The scheduler: plans each step and applies its results. Pure: ints and lists, no tensors, no threads; only the
block pool has a clock, for the time to live of cached KV.

A step is built, computed and sampled elsewhere: `schedule()` here -> `StepInputBuilder.build` (step_input.py) ->
`ModelRunner` forward and sample (model_runner.py, sampling/) -> `update()` here. kv/block_tables.py allocates blocks.

Life of a sequence here:

    add      -> WAITING; a later schedule() allocates a slot and blocks, and computes the prompt in chunks: RUNNING
    reserve  -> WAITING_FOR_KV with blocks for the whole prompt; commit -> RUNNING; remove frees the blocks
    RUNNING  -> each step computes uncomputed tokens: one while decoding, a chunk otherwise. A token is sampled when
                the step reaches the last known token.
             -> FINISHED at a stop token, end of sequence or length; its blocks stay in the prefix cache
             -> HELD after the first token if the sequence will be handed over; remove frees its blocks
             -> preempted when blocks run out: freed and reported, and the router replays it
    forks    -> other choices of the same prompt; they wait for its KV, share its blocks, and then are RUNNING

How a step spends its token budget:

1. Sequences that need one token (decodes) come first, so that long prompts never delay them (`_schedule_decodes`).
   Beside them, prompts get no more than `max_prompt_tokens` (prompt_pace.py) where a prefill worker has computed the
   prompt of a decode (`_prompt_budget`).
2. The oldest unfinished prompt gets at least half of the remaining budget (`_unfinished_prompts` finds it).
3. Prompts that fit completely into the other half run beside it, waiting ones included, so that short prompts do not
   wait for a long one (`_schedule_beside`).
4. The remaining budget goes to chunks of unfinished prompts, oldest first, and then to waiting sequences
   (`_schedule_in_order`).

With pipeline stages several batches are in flight, which have no sequence in common. Sequences are spread evenly over
batches, so that stages have equal work.

Prompts that an encoder reads (`whole_prompts`) are never cut: such a prompt may exceed the budget if it comes first.
"""

from dataclasses import asdict, dataclass

from engine.batch import BatchesInFlight, ScheduledBatch, ScheduledSequence, batch_order
from engine.kv.block_pool import BlockPool
from engine.kv.block_tables import BlockTables, EvictedBlockStore
from engine.runner import RunnerOutput
from engine.sequence import SequenceState, SequenceStatus
from engine.settings import SchedulerConfig
from mesh.domain.errors import InvalidRequest, MeshError, TooLarge, WorkerBusy
from mesh.domain.tokens import FinishReason, SampledToken, SequenceKey, SequenceOutput
from mesh.domain.worker import WorkerLoad


@dataclass(slots=True)
class _Counters:
    """Totals, as in WorkerLoad."""

    generated_tokens: int = 0
    computed_tokens: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0


class Scheduler:
    """Plans batches over a BlockPool. Owned by one thread.

    A running sequence occupies one of `max_num_seqs` slots, and so does one that waits for its KV. `evicted` keeps the
    blocks that the pool evicts, if anything does.

    All blocks of a sequence are freed in `_free`: by `_end`, after its last token, unless it is handed over; by
    `_preempt`; and by `remove`, which ends it in any state, or by the `update` of the batch in flight that it is in.
    Some blocks go earlier, see `BlockTables.trim` and `CopyOnWrite.end_step`.
    """

    def __init__(self, config: SchedulerConfig, pool: BlockPool, evicted: EvictedBlockStore | None = None) -> None:
        self.config = config
        self.pool = pool
        self.tables = BlockTables(config, pool, evicted)
        self._waiting: dict[SequenceKey, SequenceState] = {}
        self._slots: dict[SequenceKey, SequenceState] = {}  # RUNNING and WAITING_FOR_KV, oldest first
        self._held: dict[SequenceKey, SequenceState] = {}
        self._in_flight = BatchesInFlight()
        self._counters = _Counters()
        # Sequences that left the scheduler and are still to be reported.
        self._preempted: list[SequenceState] = []
        self._failed: list[tuple[SequenceState, MeshError]] = []

    def begin_role(self, config: SchedulerConfig) -> None:
        """Plan by other limits from now on; counters begin at zero, cached blocks stay. Raises ValueError while
        sequences are here."""
        if num_left := len(self._waiting) + len(self._slots) + len(self._held):
            raise ValueError(f"{num_left} sequences are left of the former role")
        self.config = config
        self.tables.windows.step_tokens = config.max_batch_tokens
        self._counters = _Counters()

    # -- commands ---------------------------------------------------------------------------------------------------

    def add(self, sequence: SequenceState) -> None:
        """Queue a sequence whose KV is computed here. Raises TooLarge if it can never fit, InvalidRequest if it
        cannot run here for another reason."""
        self._require_new(sequence)
        self._require_fits(sequence)
        sequence.status = SequenceStatus.WAITING
        self._waiting[sequence.key] = sequence

    def reserve(self, sequence: SequenceState) -> int:
        """Allocate blocks for the whole prompt of a sequence whose KV another worker will send.

        Returns for how many leading tokens the KV is here already. Raises WorkerBusy if slots or blocks are short now,
        TooLarge if the sequence can never fit, InvalidRequest if it cannot run here for another reason.
        """
        self._require_new(sequence)
        self._require_fits(sequence)
        oldest = self._oldest_beside(sequence)
        if not (self._has_slot_for(sequence) and self.tables.reserve(sequence, self._slots.values(), oldest)):
            raise WorkerBusy(f"no capacity for {sequence.num_tokens} tokens now")
        self._slots[sequence.key] = sequence
        sequence.status = SequenceStatus.WAITING_FOR_KV
        return sequence.num_cached_tokens

    def commit(self, key: SequenceKey, first_token_id: int) -> None:
        """Start a reserved sequence, and its forks, once its KV is complete. Unknown keys are ignored.

        If the first token already ends the sequence, only the forks run.
        """
        sequence = self._slots.get(key)
        if sequence is None or sequence.status is not SequenceStatus.WAITING_FOR_KV:
            return
        sequence.num_computed_tokens = sequence.num_tokens - (self.config.state_blocks > 0)  # see _repeats_last
        self.tables.publish(sequence, sequence.num_computed_tokens)
        sequence.token_ids.append(first_token_id)
        sequence.status = SequenceStatus.RUNNING
        sequence.is_transferred = True
        self._start_forks(sequence)
        if sequence.finish_reason(first_token_id, self.config.max_model_len) is not None:
            self._end(sequence)
        else:
            self.tables.trim(sequence)

    def remove(self, sequence: SequenceState) -> None:
        """End a sequence in any state and free its blocks. Idempotent; unknown sequences are ignored.

        Called by `Engine.abort`, which also clears blocks that a failed transfer may have left half written and drops
        the runner's state; services call that. Blocks of a sequence in a batch in flight are freed when that batch is
        updated.
        """
        for table in (self._waiting, self._slots, self._held):
            if table.get(sequence.key) is sequence:
                del table[sequence.key]
                if self._in_flight.has(sequence):
                    self._in_flight.abort(sequence)
                else:
                    self._free(sequence)
        sequence.status = SequenceStatus.FINISHED  # a fork that has not started is in no table

    def take_preempted(self) -> list[SequenceState]:
        """Sequences preempted since the last call."""
        preempted, self._preempted = self._preempted, []
        return preempted

    def take_failed(self) -> list[tuple[SequenceState, MeshError]]:
        """Sequences that ended with an error since the last call: the runner's, or WorkerBusy for a fork that found no
        slot or block."""
        failed, self._failed = self._failed, []
        return failed

    # -- state ------------------------------------------------------------------------------------------------------

    def is_computing(self, sequence: SequenceState) -> bool:
        """True if a batch in flight contains the sequence."""
        return self._in_flight.has(sequence)

    @property
    def has_work(self) -> bool:
        """True if schedule() may return a batch that is not empty."""
        if self._waiting:
            return True
        return any(self._may_run(sequence) for sequence in self._slots.values())

    def load(self) -> WorkerLoad:
        """Free blocks, queue lengths and token counters of this engine."""
        in_slots = self._slots.values()
        running = [sequence for sequence in in_slots if sequence.status is SequenceStatus.RUNNING]
        pending = sum(s.num_uncomputed_tokens for s in self._waiting.values())
        return WorkerLoad(
            free_blocks=self.pool.num_free,
            num_running=len(running),
            num_waiting=len(self._waiting) + len(in_slots) - len(running),
            pending_tokens=pending + sum(s.num_uncomputed_tokens for s in running if not s.is_decoding),
            **asdict(self._counters),
        )

    def check_integrity(self) -> None:
        """Raise ValueError unless the known sequences account for every held block. For tests and idle checks."""
        self.tables.check_integrity([*self._slots.values(), *self._held.values(), *self._in_flight.aborted])

    # -- planning ---------------------------------------------------------------------------------------------------

    def schedule(self, max_prompt_tokens: int | None = None) -> ScheduledBatch:
        """Plan one step. The batch is in flight until `update`. It is empty if there is nothing to compute, or if
        `max_in_flight` batches are in flight.

        `max_prompt_tokens` limits the tokens of prompts in a step that also decodes sequences whose prompts were
        computed by another worker; other steps have no such limit. Sequences of batches in flight are not scheduled
        again.
        """
        if len(self._in_flight) >= self.config.max_in_flight:
            return ScheduledBatch(())
        max_seqs = self._max_seqs_of_batch()
        running = [s for s in self._slots.values() if self._may_run(s)]
        decodes = self._schedule_decodes(running, max_seqs)
        max_prompts = max_seqs - len(decodes)
        budget = self._prompt_budget(decodes, max_prompt_tokens) if max_prompts else 0
        unfinished = self._unfinished_prompts(running, budget, max_prompts)
        chunks = self._schedule_beside(unfinished, budget, max_prompts - 1)
        self._schedule_in_order(unfinished, chunks, budget, max_prompts)
        items = sorted((*decodes, *chunks), key=batch_order)
        if not items:
            return self.schedule(max_prompt_tokens) if self._give_up_youngest() else ScheduledBatch(())
        sequences = [item.sequence for item in items]
        number = self._in_flight.begin(sequences)
        copies = self.tables.copies.begin_step(number, sequences)
        return ScheduledBatch(tuple(items), copies, number, self.tables.snapshots.take(items))

    def _max_seqs_of_batch(self) -> int:
        """Limit on the sequences of a batch that spreads them evenly over `max_in_flight` batches."""
        num_running = sum(sequence.status is SequenceStatus.RUNNING for sequence in self._slots.values())
        total = min(num_running + len(self._waiting), self.config.max_num_seqs)
        return -(-total // self.config.max_in_flight)

    def _may_run(self, sequence: SequenceState) -> bool:
        return sequence.status is SequenceStatus.RUNNING and not self._in_flight.has(sequence)

    def _schedule_decodes(self, running: list[SequenceState], max_seqs: int) -> list[ScheduledSequence]:
        items: list[ScheduledSequence] = []
        for sequence in [s for s in running if s.is_decoding][:max_seqs]:
            if sequence.status is SequenceStatus.RUNNING and self._grow(sequence):
                items.append(self._chunk(sequence, sequence.num_uncomputed_tokens))
        # Growing a later sequence never preempts an earlier one, so everything planned so far still runs.
        return items

    def _prompt_budget(self, decodes: list[ScheduledSequence], max_prompt_tokens: int | None) -> int:
        budget = max(0, self.config.max_batch_tokens - sum(item.num_tokens for item in decodes))
        is_limited = max_prompt_tokens is not None and any(item.sequence.is_transferred for item in decodes)
        return min(budget, max_prompt_tokens or 0) if is_limited else budget

    def _unfinished_prompts(self, running: list[SequenceState], budget: int, max_prompts: int) -> list[SequenceState]:
        """Up to `max_prompts` running prompts that are not complete, oldest first. If there are none, admit the oldest
        waiting one."""
        unfinished = [s for s in running if s.status is SequenceStatus.RUNNING and not s.is_decoding]
        if unfinished or budget <= 0:
            return unfinished[:max_prompts]
        oldest = self._admit_oldest(budget, is_first=True)
        return [] if oldest is None else [oldest]

    def _schedule_beside(
        self, unfinished: list[SequenceState], budget: int, max_prompts: int
    ) -> list[ScheduledSequence]:
        """Up to `max_prompts` prompts, in order, that fit completely beside `unfinished[0]`, the oldest, for which half
        of the budget is left."""
        chunks: list[ScheduledSequence] = []
        if not unfinished or self.config.whole_prompts:
            return chunks
        remaining = budget - min(unfinished[0].num_uncomputed_tokens, budget - budget // 2)
        for sequence in (*unfinished[1:], *self._waiting.values()):
            is_running = sequence.status is SequenceStatus.RUNNING
            if remaining == 0 or len(chunks) >= max_prompts or not (is_running or self._has_slot_for(sequence)):
                break  # younger ones get no slot either
            if sequence.num_uncomputed_tokens <= remaining and (is_running or self._admit(sequence)):
                remaining -= self._add_chunk(chunks, sequence, remaining)
        return chunks

    def _schedule_in_order(
        self, unfinished: list[SequenceState], chunks: list[ScheduledSequence], budget: int, max_prompts: int
    ) -> None:
        """Fill `chunks` up to `max_prompts`: the rest of the budget goes to the others of `unfinished`, in order, and
        then to waiting sequences."""
        budget -= sum(chunk.num_tokens for chunk in chunks)
        for sequence in unfinished:
            if budget > 0 and len(chunks) < max_prompts and all(chunk.sequence is not sequence for chunk in chunks):
                budget -= self._add_chunk(chunks, sequence, budget)
        while budget > 0 and len(chunks) < max_prompts:
            admitted = self._admit_oldest(budget, is_first=not chunks)
            if admitted is None:
                break
            budget -= self._add_chunk(chunks, admitted, budget)

    def _add_chunk(self, chunks: list[ScheduledSequence], sequence: SequenceState, budget: int) -> int:
        """Add a chunk of a prompt to `chunks`, unless no blocks are free for it now; returns its number of tokens."""
        chunk = self._chunk(sequence, budget)
        num_tokens = self.tables.windows.fill(sequence, chunk.num_tokens)
        if num_tokens:
            chunks.append(chunk if num_tokens == chunk.num_tokens else self._chunk(sequence, num_tokens))
        return num_tokens

    def _give_up_youngest(self) -> bool:
        """Preempt the youngest sequence if all are prompts that wait for blocks of groups with windows, and no block is
        going to be freed: sequences that share blocks keep them until the last one has passed. True if it did.
        """
        running = list(self._slots.values())
        is_stuck = bool(running) and all(self._may_run(sequence) for sequence in running)
        if not (self.config.groups.have_windows and is_stuck) or self._held:
            return False
        self._preempt(running[-1])
        return True

    def _grow(self, sequence: SequenceState) -> bool:
        """Allocate blocks for the next token if needed; preempt the youngest sequences while no block is free.

        Returns False if the sequence itself was preempted, or must wait for a younger one that is in flight.
        """
        while not self.tables.grow(sequence):
            younger = [s for s in self._slots.values() if s.status is SequenceStatus.RUNNING]
            younger = younger[younger.index(sequence) :]
            victim = next(s for s in reversed(younger) if self._may_run(s))
            if victim is sequence and len(younger) > 1:
                return False
            self._preempt(victim)
            if victim is sequence:
                return False
        return True

    def allocate_for_drafts(self, sequence: SequenceState, num_drafts: int) -> int:
        """Allocate blocks for up to `num_drafts` draft tokens of a running sequence; returns how many drafts fit.

        Drafts never preempt a sequence, nor do they use the headroom. `update` frees the blocks of wrong drafts.
        """
        return self.tables.grow_for_drafts(sequence, num_drafts, self._slots.values())

    def _preempt(self, victim: SequenceState) -> None:
        del self._slots[victim.key]
        self._free(victim)
        self._preempted.append(victim)

    def _chunk(self, sequence: SequenceState, budget: int) -> ScheduledSequence:
        start = sequence.num_computed_tokens
        num_tokens = self.tables.snapshots.tokens_until(sequence, min(sequence.num_uncomputed_tokens, budget))
        if self.config.whole_prompts:
            num_tokens = max(num_tokens, sequence.num_prompt_tokens - start)
        is_repeated = start + num_tokens == sequence.num_tokens and self._repeats_last(sequence)
        return ScheduledSequence(sequence, start, num_tokens, num_repeated=int(is_repeated))

    def _repeats_last(self, sequence: SequenceState) -> bool:
        """True if the last token of a prompt is computed once more: by the worker that continues the sequence, and by
        forks, which need its logits. The recurrent state after that token does not give them; the one before it does.
        """
        return bool(self.config.state_blocks and (sequence.hand_over or sequence.forks))

    # -- admission --------------------------------------------------------------------------------------------------

    def _admit_oldest(self, budget: int, *, is_first: bool) -> SequenceState | None:
        """Admit the oldest waiting sequence. None if none waits or it does not fit now: later ones do not overtake."""
        sequence = next(iter(self._waiting.values()), None)
        if sequence is None:
            return None
        if self.config.whole_prompts and not is_first and sequence.num_prompt_tokens > budget:
            return None
        return sequence if self._admit(sequence) else None

    def _admit(self, sequence: SequenceState) -> bool:
        """Admit a waiting sequence if there are a slot and blocks for it, and enough of both remain for the oldest
        waiting one.
        """
        oldest = self._oldest_beside(sequence)
        if not (self._has_slot_for(sequence) and self.tables.admit(sequence, self._slots.values(), oldest)):
            return False
        del self._waiting[sequence.key]
        self._slots[sequence.key] = sequence
        sequence.status = SequenceStatus.RUNNING
        return True

    def _oldest_beside(self, sequence: SequenceState) -> SequenceState | None:
        """The oldest waiting sequence, which newcomers could starve; None if it is this one, or none waits."""
        oldest = next(iter(self._waiting.values()), sequence)
        return None if oldest is sequence else oldest

    def _has_slot_for(self, sequence: SequenceState) -> bool:
        """True if a slot is free, and another one for the oldest waiting sequence."""
        num_kept = 0 if self._oldest_beside(sequence) is None else 1
        return len(self._slots) + num_kept < self.config.max_num_seqs

    def _start_forks(self, sequence: SequenceState) -> None:
        """Start the forks of a sequence whose prompt is computed and published, and whose blocks are still held."""
        forks, sequence.forks = sequence.forks, []
        for fork in forks:
            if fork.status is not SequenceStatus.WAITING:
                continue  # removed while waiting
            if len(self._slots) < self.config.max_num_seqs and self.tables.share(fork, sequence):
                fork.status = SequenceStatus.RUNNING
                self._slots[fork.key] = fork
            else:
                fork.status = SequenceStatus.FINISHED
                self._failed.append((fork, WorkerBusy("no slot or block is free for a fork")))

    def _require_new(self, sequence: SequenceState) -> None:
        tables = (self._waiting, self._slots, self._held)
        if any(sequence.key in table for table in tables) or self._in_flight.has(sequence):
            raise InvalidRequest(f"attempt {sequence.key[1]} of request {sequence.key[0]} is already on this worker")

    def _require_fits(self, sequence: SequenceState) -> None:
        max_tokens = self.tables.max_tokens(self.config.max_model_len)
        # A sequence that is handed over needs no block for the token sampled here.
        needed = sequence.num_tokens + (not sequence.hand_over)
        if needed > max_tokens:
            raise TooLarge(
                f"{sequence.num_tokens} tokens do not fit: {needed} are needed, and this worker has {max_tokens}"
            )
        adapter = sequence.spec.adapter
        if adapter and adapter not in self.config.adapters:
            raise InvalidRequest(f"this worker has no adapter {adapter}")
        if self.config.whole_prompts and sequence.spec.prompt_logprobs:
            raise InvalidRequest("prompt log-probs are not available for encoder-decoder models")

    # -- results ----------------------------------------------------------------------------------------------------

    def update(self, batch: ScheduledBatch, outputs: list[RunnerOutput]) -> list[SequenceOutput]:
        """Apply the outputs of a step, one per item; returns a SequenceOutput for each sequence that got tokens.

        Batches may be updated in any order. Raises ValueError if this batch is not in flight.
        """
        results: list[SequenceOutput] = []
        if not batch.items:
            return results
        aborted = self._in_flight.end(batch.number)
        self.tables.copies.end_step(batch.number)
        for sequence in aborted:
            self._free(sequence)
        for item, output in zip(batch.items, outputs, strict=True):
            sequence = item.sequence
            self._count(item, output)
            if sequence in aborted:
                continue
            sequence.prompt_logprobs.extend(output.prompt_logprobs)
            if output.failure:
                self._failed.append((sequence, output.failure))
                self._end(sequence)
            elif output.tokens:
                results.append(self._append(item, output.tokens))
            else:
                # Drafts that have spoiled the step: the token before them is computed again, without drafts.
                sequence.num_computed_tokens = item.last_known if item.needs_sampling else item.end
                self.tables.publish(sequence, sequence.num_computed_tokens)
                self.tables.trim(sequence)
        return results

    def _count(self, item: ScheduledSequence, output: RunnerOutput) -> None:
        num_known, counters = item.num_tokens - len(item.drafts), self._counters
        is_prompt = num_known > 1 and item.start < len(item.sequence.spec.token_ids) - 1
        counters.computed_tokens += num_known if is_prompt else 0
        counters.drafted_tokens += len(item.drafts)
        counters.accepted_tokens += len(output.tokens) - 1 if item.drafts and output.tokens else 0

    def _append(self, item: ScheduledSequence, sampled: tuple[SampledToken, ...]) -> SequenceOutput:
        sequence = item.sequence
        index = sequence.num_generated
        is_first = index == sequence.spec.num_generated
        tokens, reason = self._extend(sequence, sampled)
        sequence.num_computed_tokens = item.end - item.num_repeated if item.num_repeated else sequence.num_tokens - 1
        self.tables.publish(sequence, sequence.num_computed_tokens)
        self._start_forks(sequence)
        result = SequenceOutput(
            *sequence.key,
            first_index=index,
            tokens=tokens,
            finish_reason=reason,
            prompt_logprobs=sequence.scored_prompt() if is_first else (),
            cached_tokens=sequence.num_cached_tokens if is_first else 0,
        )
        if sequence.hand_over or reason is not None:
            self._end(sequence)
        else:
            self.tables.trim(sequence)
        return result

    def _end(self, sequence: SequenceState) -> None:
        """Release the slot. A sequence that is handed over keeps its blocks, which the KV transfer may still read."""
        del self._slots[sequence.key]
        if sequence.hand_over:
            sequence.status = SequenceStatus.HELD
            self._held[sequence.key] = sequence
        else:
            self._free(sequence)

    def _extend(
        self, sequence: SequenceState, sampled: tuple[SampledToken, ...]
    ) -> tuple[tuple[SampledToken, ...], FinishReason | None]:
        """Append sampled tokens, up to the first one that ends the sequence; returns these and the reason."""
        reason, count = None, 0
        while reason is None and count < len(sampled):
            sequence.token_ids.append(sampled[count].id)
            reason = sequence.finish_reason(sampled[count].id, self.config.max_model_len)
            count += 1
        self._counters.generated_tokens += count
        return sampled[:count], reason

    def _free(self, sequence: SequenceState) -> None:
        sequence.status = SequenceStatus.FINISHED
        self.tables.free(sequence)

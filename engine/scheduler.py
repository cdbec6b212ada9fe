"""What to compute next, and what follows from it. Pure: ints and lists, no tensors, no clock, no threads.

Life of a sequence here:

    add      -> WAITING; a later schedule() finds it a seat and blocks, and computes it in chunks: RUNNING
    reserve  -> WAITING_FOR_KV with blocks for its whole prompt; commit -> RUNNING; abort frees them
    RUNNING  -> each step computes its uncomputed tokens (one while decoding, a chunk otherwise) and, at its end,
    samples
             -> FINISHED at a stop token, end of sequence or length; its blocks stay findable as prefix cache
             -> HELD after the first token if the sequence is to be handed over; abort frees its blocks
             -> preempted when blocks run out: freed and reported, and the router replays it
    forks    -> other choices of its prompt; they wait with it, share its blocks, and are RUNNING once it is computed

A step first serves sequences that need one token (decodes), so that chunks of long prompts never hold them up; what is
left of the token budget goes to chunks, oldest first, then to waiting sequences. Where an encoder reads prompts
(`whole_prompts`) they are not cut: one may go over the budget if it is its step's first.
"""

from dataclasses import dataclass, field

from engine.batch import RunnerOutput, ScheduledBatch, ScheduledSequence
from engine.block_pool import BlockPool
from engine.forks import Forks
from engine.prefix_cache import PrefixCache
from engine.sequence import Sequence, SequenceKey, SequenceStatus
from mesh.domain.errors import ConfigurationError, InvalidRequest, WorkerBusy
from mesh.domain.prefix import BlockHash
from mesh.domain.tokens import FinishReason, PromptLogprob, SampledToken, StepOutput
from mesh.domain.worker import WorkerLoad


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Limits of one engine. `max_batch_tokens` bounds the tokens of a step, `max_num_seqs` the sequences with a
    seat. With `whole_prompts` a prompt's tokens see each other: it is computed in one step, and shares KV with equal
    prompts only.
    """

    block_size: int
    max_batch_tokens: int
    max_num_seqs: int
    max_model_len: int
    prefix_caching: bool = True
    whole_prompts: bool = False

    def __post_init__(self) -> None:
        for name in ("block_size", "max_batch_tokens", "max_num_seqs", "max_model_len"):
            if getattr(self, name) < 1:
                raise ConfigurationError(f"{name} must be >= 1, got {getattr(self, name)}")
        if self.max_batch_tokens < self.max_num_seqs:
            raise ConfigurationError(
                f"max_batch_tokens ({self.max_batch_tokens}) must be >= max_num_seqs ({self.max_num_seqs}): "
                "every running sequence needs one token a step"
            )


@dataclass(slots=True)
class _Counters:
    generated_tokens: int = 0
    computed_tokens: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    preempted: list[Sequence] = field(default_factory=list)
    refused: list[tuple[Sequence, str]] = field(default_factory=list)


class Scheduler:
    """Plans batches over a BlockPool. Owned by one thread."""

    def __init__(self, config: SchedulerConfig, pool: BlockPool) -> None:
        self.config = config
        self.pool = pool
        self._waiting: dict[SequenceKey, Sequence] = {}
        self._seated: dict[SequenceKey, Sequence] = {}  # RUNNING and WAITING_FOR_KV, oldest first
        self._held: dict[SequenceKey, Sequence] = {}
        self._forks = Forks(pool, config.block_size)
        self._prefixes = PrefixCache(pool, config.block_size, config.prefix_caching, config.whole_prompts)
        self._counters = _Counters()

    # -- commands ---------------------------------------------------------------------------------------------------

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence whose KV is computed here. Raises InvalidRequest if it can never fit."""
        self._require_new(sequence)
        self._require_fits(sequence)
        sequence.status = SequenceStatus.WAITING
        self._waiting[sequence.key] = sequence

    def reserve(self, sequence: Sequence) -> int:
        """Hold blocks for the whole prompt of a sequence whose KV comes from elsewhere; returns how many leading
        tokens are cached here already. Raises WorkerBusy if there is no room now, InvalidRequest if there never is.
        """
        self._require_new(sequence)
        self._require_fits(sequence)
        # Prompts that wait for room here come first, or a stream of reservations would starve them.
        oldest = next(iter(self._waiting.values()), None)
        spare = 0 if oldest is None else self._num_blocks_for(oldest)
        num_seats = self.config.max_num_seqs - (oldest is not None)
        hashes = self._prefixes.hashes(sequence)
        if len(self._seated) >= num_seats or not self._seat(sequence, hashes, spare=spare):
            raise WorkerBusy(f"no room for {sequence.num_tokens} tokens now")
        sequence.status = SequenceStatus.WAITING_FOR_KV
        return sequence.num_cached_tokens

    def commit(self, key: SequenceKey, first_token: SampledToken) -> None:
        """The KV of a reserved sequence is complete: it runs from now on, and its forks do. A first token that is its
        last one comes for the forks' sake only. Unknown keys are ignored.
        """
        sequence = self._seated.get(key)
        if sequence is None or sequence.status is not SequenceStatus.WAITING_FOR_KV:
            return
        sequence.num_computed_tokens = sequence.num_tokens
        self._prefixes.publish(sequence)
        sequence.token_ids.append(first_token.id)
        sequence.status = SequenceStatus.RUNNING
        self._start_forks(sequence)
        if self._finish_reason(sequence, first_token.id) is not None:
            self._end(sequence)

    def abort(self, sequence: Sequence) -> None:
        """End a sequence in whatever state and free its blocks. Idempotent; unknown ones are ignored."""
        for table in (self._waiting, self._seated, self._held):
            if table.get(sequence.key) is sequence:
                del table[sequence.key]
                self._free(sequence)
        sequence.status = SequenceStatus.FINISHED  # a fork that has not begun is in no table

    def take_preempted(self) -> list[Sequence]:
        """Sequences preempted since the last call."""
        preempted, self._counters.preempted = self._counters.preempted, []
        return preempted

    def take_refused(self) -> list[tuple[Sequence, str]]:
        """Sequences that the runner could not go on with since the last call, and why."""
        refused, self._counters.refused = self._counters.refused, []
        return refused

    # -- state ------------------------------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        """True if schedule() may return something."""
        if self._waiting:
            return True
        return any(sequence.status is SequenceStatus.RUNNING for sequence in self._seated.values())

    def load(self) -> WorkerLoad:
        """How busy this engine is."""
        seated = self._seated.values()
        running = [sequence for sequence in seated if sequence.status is SequenceStatus.RUNNING]
        pending = sum(s.num_uncomputed_tokens for s in self._waiting.values())
        return WorkerLoad(
            free_blocks=self.pool.num_free,
            num_running=len(running),
            num_waiting=len(self._waiting) + len(seated) - len(running),
            pending_tokens=pending + sum(s.num_uncomputed_tokens for s in running if s.num_uncomputed_tokens > 1),
            generated_tokens=self._counters.generated_tokens,
            computed_tokens=self._counters.computed_tokens,
            drafted_tokens=self._counters.drafted_tokens,
            accepted_tokens=self._counters.accepted_tokens,
        )

    def check_integrity(self) -> None:
        """Raise ValueError unless every block is explained by a sequence. For tests and idle checks."""
        self.pool.check_integrity([s.held_blocks for s in (*self._seated.values(), *self._held.values())])

    # -- planning ---------------------------------------------------------------------------------------------------

    def schedule(self) -> ScheduledBatch:
        """Plan one step. Empty if there is nothing to compute."""
        running = [s for s in self._seated.values() if s.status is SequenceStatus.RUNNING]
        decodes = self._schedule_decodes([s for s in running if s.num_uncomputed_tokens == 1])
        budget = self.config.max_batch_tokens - len(decodes)
        chunks: list[ScheduledSequence] = []
        for sequence in running:
            if sequence.status is SequenceStatus.RUNNING and sequence.num_uncomputed_tokens > 1 and budget > 0:
                chunks.append(self._chunk(sequence, budget))
                budget -= chunks[-1].num_tokens
        while budget > 0 and (admitted := self._admit(budget, is_first=not chunks)) is not None:
            chunks.append(self._chunk(admitted, budget))
            budget -= chunks[-1].num_tokens
        # A one-token chunk (a prompt's last token) belongs with the decodes: attention treats it alike.
        chunks.sort(key=lambda item: item.num_tokens > 1)
        return ScheduledBatch((*decodes, *chunks), self._forks.copies())

    def _schedule_decodes(self, decodes: list[Sequence]) -> list[ScheduledSequence]:
        items: list[ScheduledSequence] = []
        for sequence in decodes:
            if sequence.status is SequenceStatus.RUNNING and self._grow(sequence):
                items.append(ScheduledSequence(sequence, sequence.num_computed_tokens, 1))
        # Growing a later sequence never preempts an earlier one, so everything planned so far still runs.
        return items

    def _grow(self, sequence: Sequence) -> bool:
        """Give the sequence a block for its next token if it needs one, preempting the youngest if none is free."""
        while len(sequence.block_table) * self.config.block_size < sequence.num_tokens:
            block = self.pool.allocate(1)
            if block is not None:
                sequence.block_table += block
                continue
            victim = next(s for s in reversed(self._seated.values()) if s.status is SequenceStatus.RUNNING)
            self._preempt(victim)
            if victim is sequence:
                return False
        return True

    def make_room(self, sequence: Sequence, num_drafts: int) -> int:
        """Blocks for as many drafts behind a running sequence's tokens as fit into free memory; returns how many. What
        is not used, `update` takes back. Drafts are worth nobody's seat, nor the blocks others grow into.
        """
        size = self.config.block_size
        missing = -(-(sequence.num_tokens + num_drafts) // size) - len(sequence.block_table)
        most = max(0, min(missing, self.pool.num_free - self._headroom()))
        if most > 0:
            sequence.block_table += self.pool.allocate(most) or []
        return min(num_drafts, len(sequence.block_table) * size - sequence.num_tokens)

    def _preempt(self, victim: Sequence) -> None:
        del self._seated[victim.key]
        self._free(victim)
        self._counters.preempted.append(victim)

    def _chunk(self, sequence: Sequence, budget: int) -> ScheduledSequence:
        start = sequence.num_computed_tokens
        num_tokens = min(sequence.num_uncomputed_tokens, budget)
        if self.config.whole_prompts:
            num_tokens = max(num_tokens, sequence.num_prompt_tokens - start)
        return ScheduledSequence(sequence, start, num_tokens)

    def _admit(self, budget: int, *, is_first: bool) -> Sequence | None:
        """Seat the oldest waiting sequence, or None if there is none or no room: later ones do not overtake it."""
        sequence = next(iter(self._waiting.values()), None)
        if sequence is None or len(self._seated) >= self.config.max_num_seqs:
            return None
        if self.config.whole_prompts and not is_first and sequence.num_prompt_tokens > budget:
            return None
        if not self._seat(sequence, self._prefixes.reusable(sequence)):
            return None
        del self._waiting[sequence.key]
        sequence.status = SequenceStatus.RUNNING
        return sequence

    def _seat(self, sequence: Sequence, hashes: list[BlockHash], *, spare: int = 0) -> bool:
        """Hold blocks for all tokens of the sequence, cached ones where `hashes` match. False, and no change, if
        short.
        """
        matched = self.pool.match(hashes)
        missing = self._num_blocks_for(sequence) - len(matched)
        if missing > self.pool.num_allocatable_beside(matched) - self._headroom() - spare:
            return False
        self.pool.hold(matched)
        sequence.block_table += matched + (self.pool.allocate(missing) or [])
        sequence.block_hashes = hashes[: len(matched)]
        sequence.num_cached_tokens = sequence.num_computed_tokens = len(matched) * self.config.block_size
        self._seated[sequence.key] = sequence
        return True

    def _start_forks(self, sequence: Sequence) -> None:
        """The sequence's prompt is computed, and its blocks are still held."""
        forks, sequence.forks = sequence.forks, []
        for fork in forks:
            if fork.status is not SequenceStatus.WAITING:
                continue  # aborted meanwhile
            if len(self._seated) < self.config.max_num_seqs and self._forks.share(fork, sequence):
                fork.status = SequenceStatus.RUNNING
                self._seated[fork.key] = fork
            else:
                fork.status = SequenceStatus.FINISHED
                self._counters.preempted.append(fork)

    def _headroom(self) -> int:
        """Blocks kept for sequences with a seat to grow into, so that a newcomer is not preempted in its first
        steps.
        """
        return len(self._seated)

    def _num_blocks_for(self, sequence: Sequence) -> int:
        return -(-sequence.num_tokens // self.config.block_size)

    def _require_new(self, sequence: Sequence) -> None:
        if any(sequence.key in table for table in (self._waiting, self._seated, self._held)):
            raise InvalidRequest(f"attempt {sequence.key[1]} of request {sequence.key[0]} is here already")

    def _require_fits(self, sequence: Sequence) -> None:
        most = min(self.config.max_model_len, self.pool.num_blocks * self.config.block_size)
        # A sequence that is handed over needs no room for the KV of its first token.
        needed = sequence.num_tokens + (not sequence.hand_over)
        if needed > most:
            raise InvalidRequest(f"{sequence.num_tokens} tokens and one more do not fit into {most}")
        if self.config.whole_prompts and sequence.request.prompt_logprobs:
            raise InvalidRequest("an encoder gives its prompt no log-probs")

    # -- consequences -----------------------------------------------------------------------------------------------

    def update(self, batch: ScheduledBatch, outputs: list[RunnerOutput]) -> list[StepOutput]:
        """Apply what a step computed; one StepOutput for each sequence that got tokens."""
        results: list[StepOutput] = []
        self._forks.copied()
        for item, output in zip(batch.items, outputs, strict=True):
            sequence = item.sequence
            self._count(item, output)
            sequence.prompt_logprobs.extend(output.prompt_logprobs)
            if output.failure:
                self._counters.refused.append((sequence, output.failure))
                self._end(sequence)
            elif output.tokens:
                self._start_forks(sequence)
                results.append(self._append(sequence, output.tokens))
            else:
                sequence.num_computed_tokens = item.end
                self._prefixes.publish(sequence)
        return results

    def _count(self, item: ScheduledSequence, output: RunnerOutput) -> None:
        num_known, counters = item.num_tokens - len(item.drafts), self._counters
        counters.computed_tokens += num_known if num_known > 1 else 0
        counters.drafted_tokens += len(item.drafts)
        counters.accepted_tokens += len(output.tokens) - 1 if item.drafts else 0

    def _append(self, sequence: Sequence, sampled: tuple[SampledToken, ...]) -> StepOutput:
        index = sequence.num_generated
        is_first = index == sequence.request.num_generated
        tokens, reason = self._extend(sequence, sampled)
        sequence.num_computed_tokens = sequence.num_tokens - 1
        self._prefixes.publish(sequence)
        result = StepOutput(
            *sequence.key,
            first_index=index,
            tokens=tokens,
            finish_reason=reason,
            prompt_logprobs=_prompt_logprobs(sequence) if is_first else (),
            cached_tokens=sequence.num_cached_tokens if is_first else 0,
        )
        if sequence.hand_over or reason is not None:
            self._end(sequence)
        else:
            self._give_back_room(sequence)
        return result

    def _end(self, sequence: Sequence) -> None:
        """Nothing more is computed for it. What is to be handed over keeps its blocks: they may still be read."""
        del self._seated[sequence.key]
        if sequence.hand_over:
            sequence.status = SequenceStatus.HELD
            self._held[sequence.key] = sequence
        else:
            self._free(sequence)

    def _extend(
        self, sequence: Sequence, sampled: tuple[SampledToken, ...]
    ) -> tuple[tuple[SampledToken, ...], FinishReason | None]:
        """Append tokens up to the one that ends the sequence, if one does."""
        reason, count = None, 0
        while reason is None and count < len(sampled):
            sequence.token_ids.append(sampled[count].id)
            reason = self._finish_reason(sequence, sampled[count].id)
            count += 1
        self._counters.generated_tokens += count
        return sampled[:count], reason

    def _give_back_room(self, sequence: Sequence) -> None:
        """Free the blocks that `make_room` gave to drafts that were wrong."""
        needed = self._num_blocks_for(sequence)
        if len(sequence.block_table) > needed:
            self.pool.free(sequence.block_table[needed:])
            del sequence.block_table[needed:]

    def _finish_reason(self, sequence: Sequence, token_id: int) -> FinishReason | None:
        request = sequence.request
        if token_id in request.eos_token_ids and not request.sampling.ignore_eos:
            return FinishReason.EOS_TOKEN
        if token_id in request.sampling.stop_token_ids:
            return FinishReason.STOP_SEQUENCE
        if sequence.num_tokens >= min(request.max_total_tokens, self.config.max_model_len):
            return FinishReason.LENGTH
        return None

    def _free(self, sequence: Sequence) -> None:
        sequence.status = SequenceStatus.FINISHED
        self._forks.drop(sequence)
        self.pool.free(sequence.block_table)
        sequence.block_table.clear()


def _prompt_logprobs(sequence: Sequence) -> tuple[PromptLogprob, ...]:
    """One entry for each prompt token, if asked for; nothing comes before the first token, so its entry is empty."""
    if not sequence.request.prompt_logprobs:
        return ()
    return (PromptLogprob(None), *sequence.prompt_logprobs)

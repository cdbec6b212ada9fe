"""PrefixCache: finds cached blocks with a sequence's leading tokens, and publishes the sequence's own full blocks."""

from dataclasses import dataclass

from engine.block_pool import BlockPool
from engine.sequence import SequenceState
from mesh.domain.kv import BlockHash, block_hashes, next_hash, root_hash


@dataclass(frozen=True, slots=True)
class PrefixCache:
    """The prefix cache of one scheduler. If it is not `enabled`, it finds and publishes nothing.

    `whole_prompts`: see SchedulerConfig.
    """

    pool: BlockPool
    block_size: int
    enabled: bool
    whole_prompts: bool

    def hashes(self, sequence: SequenceState) -> list[BlockHash]:
        """Hashes of all full blocks of the sequence."""
        if not self.enabled:
            return []
        return block_hashes(sequence.token_ids, self.block_size, *self._scope(sequence))

    def reusable(self, sequence: SequenceState) -> list[BlockHash]:
        """Hashes of the leading blocks that the sequence may reuse if they are cached. They exclude the last token."""
        if sequence.request.prompt_logprobs:
            return []
        # The last token is always computed: the first sample is drawn from its logits.
        hashes = self.hashes(sequence)[: (sequence.num_tokens - 1) // self.block_size]
        if self.whole_prompts:
            num_cached_tokens = len(self.pool.match(hashes)) * self.block_size
            return hashes if num_cached_tokens >= sequence.num_prompt_tokens - 1 else []
        return hashes

    def publish(self, sequence: SequenceState) -> None:
        """Add blocks of the sequence that have become full to the index."""
        if not self.enabled:
            return
        size, hashes = self.block_size, sequence.block_hashes
        while (len(hashes) + 1) * size <= sequence.num_computed_tokens:
            first = len(hashes) * size
            parent = hashes[-1] if hashes else root_hash(*self._scope(sequence))
            hashes.append(next_hash(parent, sequence.token_ids[first : first + size]))
            self.pool.publish(sequence.block_table[len(hashes) - 1], hashes[-1])

    def _scope(self, sequence: SequenceState) -> tuple[str, list[int]]:
        """Namespace and, for encoders, prompt that the hashes cover besides the preceding tokens: see `root_hash`."""
        whole_prompt = sequence.token_ids[: sequence.num_prompt_tokens] if self.whole_prompts else []
        return sequence.request.cache_namespace, whole_prompt

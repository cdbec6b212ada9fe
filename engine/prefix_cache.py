"""Which blocks of a sequence others have computed before, and which of its own others may find."""

from dataclasses import dataclass

from engine.block_pool import BlockPool
from engine.sequence import Sequence
from mesh.domain.prefix import BlockHash, block_hashes, next_hash, root_hash


@dataclass(frozen=True, slots=True)
class PrefixCache:
    """Prefixes of one scheduler. If not `enabled`, it finds and publishes nothing; `whole_prompts`: see
    SchedulerConfig.
    """

    pool: BlockPool
    block_size: int
    enabled: bool
    whole_prompts: bool

    def hashes(self, sequence: Sequence) -> list[BlockHash]:
        """Of all full blocks of the sequence."""
        if not self.enabled:
            return []
        return block_hashes(sequence.token_ids, self.block_size, *self._scope(sequence))

    def reusable(self, sequence: Sequence) -> list[BlockHash]:
        """Of the blocks that need not be computed where they are cached."""
        if sequence.request.prompt_logprobs:
            return []
        # The last token is always computed: its logits are what the first sample is drawn from.
        hashes = self.hashes(sequence)[: (sequence.num_tokens - 1) // self.block_size]
        if self.whole_prompts:
            num_found = len(self.pool.match(hashes)) * self.block_size
            return hashes if num_found >= sequence.num_prompt_tokens - 1 else []
        return hashes

    def publish(self, sequence: Sequence) -> None:
        """Make the sequence's newly full blocks findable."""
        if not self.enabled:
            return
        size, hashes = self.block_size, sequence.block_hashes
        while (len(hashes) + 1) * size <= sequence.num_computed_tokens:
            first = len(hashes) * size
            parent = hashes[-1] if hashes else root_hash(*self._scope(sequence))
            hashes.append(next_hash(parent, sequence.token_ids[first : first + size]))
            self.pool.publish(sequence.block_table[len(hashes) - 1], hashes[-1])

    def _scope(self, sequence: Sequence) -> tuple[str, list[int]]:
        """What the hashes cover beside the tokens before: see `root_hash`."""
        whole_prompt = sequence.token_ids[: sequence.num_prompt_tokens] if self.whole_prompts else []
        return sequence.request.cache_namespace, whole_prompt

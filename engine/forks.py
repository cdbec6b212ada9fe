"""Forks: several choices of one prompt share its KV blocks (copy on write). Pure, like the scheduler.

A fork shares the full blocks of the prompt with its origin. Both will write to the last, partly filled block, so the
fork gets a copy of it. The copy is made before the fork's first step; until then the fork also holds the original.
"""

from engine.block_pool import BlockPool
from engine.sequence import SequenceState


class Forks:
    """The forks of one scheduler whose copies are not made yet."""

    def __init__(self, pool: BlockPool, block_size: int) -> None:
        self._pool = pool
        self._block_size = block_size
        self._due: list[SequenceState] = []
        self._copying: dict[int, list[SequenceState]] = {}  # by the number of the batch that copies

    def share(self, fork: SequenceState, origin: SequenceState) -> bool:
        """Give a fork the blocks of its origin, whose prompt is computed. False, and no change, if no block is free.

        The fork computes the prompt's last token again: its first sample is drawn from that token's logits.
        """
        last_block = self._pool.allocate(1)
        if last_block is None:
            return False
        fork.num_cached_tokens = fork.num_computed_tokens = fork.num_tokens - 1
        num_shared, num_copied_tokens = divmod(fork.num_computed_tokens, self._block_size)
        shared = origin.block_table[:num_shared]
        self._pool.hold(shared)
        fork.block_table += shared + last_block
        fork.block_hashes = origin.block_hashes[:num_shared]
        if num_copied_tokens:
            fork.copy_from = origin.block_table[num_shared]
            self._pool.hold([fork.copy_from])
            self._due.append(fork)
        return True

    def copies(self, number: int) -> tuple[tuple[int, int], ...]:
        """Pairs of blocks (source, target) for the batch with this number to copy: those of every fork that runs."""
        due, self._due = self._due, []
        if due:
            self._copying[number] = due
        return tuple(
            (fork.copy_from, fork.block_table[fork.num_computed_tokens // self._block_size])
            for fork in due
            if fork.copy_from is not None
        )

    def copied(self, number: int) -> None:
        """Release the originals once the batch with this number has copied them."""
        for fork in self._copying.pop(number, ()):
            self.drop(fork)

    def drop(self, sequence: SequenceState) -> None:
        """Release the original block of this sequence, if it holds one."""
        if sequence.copy_from is not None:
            self._pool.free([sequence.copy_from])
            sequence.copy_from = None

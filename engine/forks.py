"""Choices of one prompt: what they hold of its blocks, and what has to be copied for them. Pure, as the scheduler.

A fork holds the prompt's full blocks together with the sequence it comes from. Of the last block, which both will write
to, it gets a copy of what is filled. Until that is made, before the fork's first step, it holds the original, too.
"""

from engine.block_pool import BlockPool
from engine.sequence import Sequence


class Forks:
    """Those of one scheduler whose copies are due."""

    def __init__(self, pool: BlockPool, block_size: int) -> None:
        self._pool = pool
        self._block_size = block_size
        self._due: list[Sequence] = []

    def share(self, fork: Sequence, origin: Sequence) -> bool:
        """Give a fork its blocks; the origin's prompt is computed. False, and no change, if there is none for it.

        The prompt's last token is left to compute again: its logits are what the fork's first sample is drawn from.
        """
        own = self._pool.allocate(1)
        if own is None:
            return False
        fork.num_cached_tokens = fork.num_computed_tokens = fork.num_tokens - 1
        num_shared, num_copied_tokens = divmod(fork.num_computed_tokens, self._block_size)
        shared = origin.block_table[:num_shared]
        self._pool.hold(shared)
        fork.block_table += shared + own
        fork.block_hashes = origin.block_hashes[:num_shared]
        if num_copied_tokens:
            fork.copy_from = origin.block_table[num_shared]
            self._pool.hold([fork.copy_from])
            self._due.append(fork)
        return True

    def copies(self) -> tuple[tuple[int, int], ...]:
        """Blocks to copy in the next step, from and to: every fork that still runs takes part in it."""
        return tuple(
            (fork.copy_from, fork.block_table[fork.num_computed_tokens // self._block_size])
            for fork in self._due
            if fork.copy_from is not None
        )

    def copied(self) -> None:
        """The step is done."""
        while self._due:
            self.drop(self._due.pop())

    def drop(self, sequence: Sequence) -> None:
        """Hold no original for this sequence any more."""
        if sequence.copy_from is not None:
            self._pool.free([sequence.copy_from])
            sequence.copy_from = None

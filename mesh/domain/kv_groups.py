"""Groups of layers whose blocks share one pool, and which blocks a sequence needs of each.

A layer with a sliding window sees the last tokens only, so KV behind the window is freed. A block therefore holds the
KV of some layers, which all see as much: a group of them. All groups have equally many layers, so that any block serves
any group, and a sequence has a block of each group for every `block_size` tokens. (The hybrid KV cache manager of vLLM,
2025, has groups, too.)

A position is the place of a block's tokens in the sequence: 0 for the first `block_size` tokens. The block table of a
sequence has an entry for each position and group, position by position.
"""

from bisect import bisect_right
from dataclasses import dataclass

NO_BLOCK = 0
"""The entry of a position that a sequence holds no block for: it is behind the window, or not computed yet. Where there
are windows, nobody gets the block with this id, which stays zeros and may be read."""


@dataclass(frozen=True, slots=True)
class KVGroups:
    """`windows`: the tokens that a query of each group sees, its own included; 0: all. Groups with 0 come first.
    If they `are_chunks`, a query sees the tokens from the beginning of its chunk on; blocks divide chunks.
    """

    block_size: int
    windows: tuple[int, ...]
    are_chunks: bool = False

    @property
    def count(self) -> int:
        return len(self.windows)

    @property
    def have_windows(self) -> bool:
        return any(self.windows)

    @property
    def num_full(self) -> int:
        """Groups that see all tokens."""
        return self.windows.count(0)

    def num_positions(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def first_visible(self, group: int, token: int) -> int:
        """The first position that this token sees in the group."""
        window = self.windows[group]
        if not window:
            return 0
        first = token // window * window if self.are_chunks else max(0, token - window + 1)
        return first // self.block_size

    def most_visible(self, group: int) -> int:
        """The most positions that one token sees in a group with a window."""
        window = self.windows[group]
        return window // self.block_size if self.are_chunks else (window - 2) // self.block_size + 2

    def num_blocks_for(self, num_tokens: int) -> int:
        """The most blocks of a sequence with up to so many tokens, while tokens are computed one by one."""
        positions = self.num_positions(num_tokens)
        return sum(
            min(positions, self.most_visible(group)) if window else positions
            for group, window in enumerate(self.windows)
        )

    def num_passing(self, group: int, num_tokens: int, num_computed: int, step_tokens: int) -> int:
        """Blocks that a prompt of `num_tokens` tokens may need in addition while it is computed, in chunks of up to
        `step_tokens`: of positions that its last token does not see. `num_computed` of its tokens have theirs.
        """
        done = self.num_positions(num_computed)
        to_come = self.first_visible(group, num_tokens - 1) - done
        held = done - self.first_visible(group, num_computed)
        step_positions = self.num_positions(min(step_tokens, num_tokens)) + 1
        return max(0, min(to_come, self.most_visible(group) + step_positions - held)) if self.windows[group] else 0

    def num_blocks_at_once(self, num_tokens: int, step_tokens: int) -> int:
        """The most blocks of a sequence with so many tokens that is computed in chunks of up to `step_tokens`."""
        passing = (self.num_passing(group, num_tokens, 0, step_tokens) for group in range(self.count))
        return self.num_blocks_for(num_tokens) + sum(passing)

    def max_tokens_in(self, num_blocks: int, step_tokens: int, max_tokens: int) -> int:
        """The length of the longest sequence, of at most `max_tokens`, that so many blocks hold at any time."""
        if not self.have_windows:
            return min(max_tokens, max(0, num_blocks) // self.count * self.block_size)
        lengths = range(1, max_tokens + 1)
        return bisect_right(lengths, num_blocks - 1, key=lambda length: self.num_blocks_at_once(length, step_tokens))

    def visible_entries(self, num_tokens: int) -> list[int]:
        """The entries of a block table that the last of so many tokens sees, in order."""
        firsts = [self.first_visible(group, num_tokens - 1) for group in range(self.count)]
        return [
            position * self.count + group
            for position in range(self.num_positions(num_tokens))
            for group, first in enumerate(firsts)
            if position >= first
        ]

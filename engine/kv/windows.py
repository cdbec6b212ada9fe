"""Windows: the blocks that a sequence holds where layers see a window of its tokens (mesh/domain/kv_groups.py).

    admitted      in groups that see all tokens, blocks for the whole prompt; in groups with a window, those that the
                  last token of the prompt sees: decoding needs them, and a prefill worker sends them
    a chunk       needs blocks for its own tokens, too, as far as they are free: `fill`
    computed      blocks that the next token does not see are freed: `free_behind`. They stay findable, as all are

Table entries without a block are NO_BLOCK, which this class holds for ever, so that a table can be held and freed as a
whole. Admission leaves free what prompts will still need for their chunks (`num_promised`). Without windows a sequence
holds all of its blocks, and these methods do nothing.
"""

from collections.abc import Collection, Iterable, Sequence

from engine.kv.block_pool import BlockPool
from engine.sequence import SequenceState, SequenceStatus
from mesh.domain.block_hashes import BlockHash, group_hash
from mesh.domain.kv_groups import NO_BLOCK, KVGroups


class Windows:
    """The blocks of groups with a window, of one scheduler. `step_tokens`: the most tokens of a chunk."""

    def __init__(self, pool: BlockPool, groups: KVGroups, step_tokens: int) -> None:
        self.null_blocks = (pool.allocate(1) or []) if groups.have_windows else []
        """NO_BLOCK, which is held for ever, if a group has a window."""
        self._pool = pool
        self._groups = groups
        self.step_tokens = step_tokens
        self._windowed_groups = [group for group, window in enumerate(groups.windows) if window]

    def match(
        self, hashes: Sequence[BlockHash], token: int | None = None, on_disk: Collection[BlockHash] = ()
    ) -> list[int | None]:
        """Entries of a table for the longest prefix of `hashes` whose blocks are indexed or `on_disk`, as far as this
        token sees them; `token` None: the one after the prefix. Indexed blocks are not held yet, see BlockPool.match;
        those on disk are None.
        """
        groups, length = self._groups, len(hashes)
        if not (self._windowed_groups or on_disk):
            return [*self._pool.match(hashes)]
        for group in range(groups.num_full):
            names = [group_hash(block_hash, group) for block_hash in hashes[:length]]
            length = len(self._pool.match(names))
            while on_disk and length < len(names) and self._has(names[length], on_disk):
                length += 1
        length = self._longest(hashes, length, token, on_disk)
        entries: list[int | None] = [NO_BLOCK] * (length * groups.count)
        for group, first in enumerate(self._first_visible(length, token)):
            seen = hashes[min(first, length) : length]
            found = [self._pool.find(group_hash(block_hash, group)) for block_hash in seen]
            entries[(length - len(seen)) * groups.count + group :: groups.count] = found
        return entries

    def _has(self, name: BlockHash, on_disk: Collection[BlockHash]) -> bool:
        return self._pool.find(name) is not None or name in on_disk

    def _longest(
        self, hashes: Sequence[BlockHash], length: int, token: int | None, on_disk: Collection[BlockHash]
    ) -> int:
        """The most leading positions, up to `length`, at which all blocks that the token sees are there."""
        present: set[BlockHash] = set()
        while (missing := self._first_missing(hashes, length, token, on_disk, present)) is not None:
            length = missing  # whatever is longer sees this position, too
        return length

    def _first_missing(
        self,
        hashes: Sequence[BlockHash],
        length: int,
        token: int | None,
        on_disk: Collection[BlockHash],
        present: set[BlockHash],
    ) -> int | None:
        """A position before `length` at which a group with a window lacks a block that the token sees: the first in
        its group. `present`: names that need not be looked up again.
        """
        firsts = self._first_visible(length, token)
        for group in self._windowed_groups:
            for position in range(firsts[group], length):
                name = group_hash(hashes[position], group)
                if name not in present and not self._has(name, on_disk):
                    return position
                present.add(name)
        return None

    def _first_visible(self, num_positions: int, token: int | None) -> list[int]:
        """The first position in each group that the token sees. None: the token after `num_positions` positions."""
        groups = self._groups
        token = num_positions * groups.block_size if token is None else token
        return [groups.first_visible(group, token) for group in range(groups.count)]

    def needs_block(self, num_tokens: int, num_reused: int, token: int | None) -> list[bool]:
        """For each entry of a prompt's table: True if it needs a block at admission, because the last token sees it, or
        the token that is computed next, after `num_reused` positions (`token`: see `match`).
        """
        groups, num_positions = self._groups, self._groups.num_positions(num_tokens)
        if not self._windowed_groups:
            return [True] * num_positions
        needed = [False] * (num_positions * groups.count)
        for group, next_first in enumerate(self._first_visible(num_reused, token)):
            last_first = groups.first_visible(group, num_tokens - 1)
            for first, end in ((next_first, num_reused), (last_first, num_positions)):
                seen = slice(first * groups.count + group, end * groups.count, groups.count)
                needed[seen] = [True] * max(0, end - first)
        return needed

    def num_passing(self, num_tokens: int, num_computed: int) -> int:
        """Additional blocks that a prompt may need for its chunks, until it is computed."""
        return sum(
            self._groups.num_passing(group, num_tokens, num_computed, self.step_tokens)
            for group in self._windowed_groups
        )

    def num_promised(self, sequences: Iterable[SequenceState]) -> int:
        """Additional blocks that the prompts among `sequences` may need for their chunks."""
        if not self._windowed_groups:
            return 0
        prompts = (s for s in sequences if s.status is SequenceStatus.RUNNING and not s.is_decoding)
        return sum(self.num_passing(prompt.num_tokens, prompt.num_computed_tokens) for prompt in prompts)

    def fill(self, sequence: SequenceState, num_tokens: int) -> int:
        """Allocate blocks for the next `num_tokens` tokens of a prompt. Returns how many tokens have blocks."""
        if not self._windowed_groups:
            return num_tokens
        groups, start, table = self._groups, sequence.num_computed_tokens, sequence.block_table
        for position in range(start // groups.block_size, groups.num_positions(start + num_tokens)):
            entries = [position * groups.count + group for group in self._windowed_groups]
            missing = [entry for entry in entries if table[entry] == NO_BLOCK]
            own = self._pool.allocate(len(missing))
            if own is None:
                return max(0, position * groups.block_size - start)
            self._pool.free([NO_BLOCK] * len(missing))
            for entry, block_id in zip(missing, own, strict=True):
                table[entry] = block_id
        return num_tokens

    def free_behind(self, sequence: SequenceState) -> None:
        """Free the blocks that neither the next token nor a later one sees."""
        table, count, left = sequence.block_table, self._groups.count, []
        for group in self._windowed_groups:
            entry = (self._groups.first_visible(group, sequence.num_computed_tokens) - 1) * count + group
            while entry >= 0 and table[entry] != NO_BLOCK:
                left.append(entry)
                entry -= count
        if left:
            spec = sequence.spec
            left.sort()
            self._pool.free([table[entry] for entry in left], spec.cache_namespace, spec.cache_hints)
            self._pool.hold([NO_BLOCK] * len(left))
            for entry in left:
                table[entry] = NO_BLOCK

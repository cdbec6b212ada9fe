"""The order in which cached blocks give up their memory, by what clients have said about their KV.

    expendable   of low priority, or with a time to live that is over: go first
    ordinary     everything without a hint: the block that has been free for the longest time goes first
    protected    of high priority: go last, those of the tenant with most of them first

A tenant's hints never push out the share of another: at most `num_blocks / tenants` of its blocks are protected, where
tenants are those that have cached blocks here which are not expendable. The oldest ones beyond that become ordinary.
"""

import heapq
import math
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from mesh.domain.cache_hints import CacheHints, KeepPriority

_Blocks = OrderedDict[int, None]


class Worth(NamedTuple):
    """The worth of a block to the tenant and conversation whose hint counts for it. The priority holds until `until_s`;
    after that the block has the worth `then`, from a hint of others, or none.
    """

    tenant: str = ""
    conversation: str = ""
    priority: KeepPriority = KeepPriority.NORMAL
    until_s: float = math.inf
    then: "Worth | None" = None

    @property
    def is_hinted(self) -> bool:
        """False if nothing was said about the block."""
        return self.priority is not KeepPriority.NORMAL or self.until_s < math.inf


def worth_of(tenant: str, hints: CacheHints, now_s: float) -> Worth:
    """The worth of blocks that a sequence with these hints leaves now."""
    time_to_live_s = math.inf if hints.time_to_live_s is None else hints.time_to_live_s
    return Worth(tenant, hints.session_id, hints.keep_priority, now_s + time_to_live_s)


def combined(old: Worth, new: Worth, now_s: float) -> Worth:
    """The worth of a block with worth `old` that another sequence has used since.

    A conversation may take its own hints back. Hints of other conversations, which share the beginning of the prompt,
    count as long as they are stronger; a weaker hint counts after them if it holds for longer.
    """
    if old.until_s <= now_s or _is_of(new.conversation, old):
        return new if old.then is None else combined(old.then, new, now_s)
    if old.then is not None:
        old = old._replace(then=_without(new.conversation, old.then))
    is_stronger = (old.priority, old.until_s) > (new.priority, new.until_s)
    strong, weak = (old, new) if is_stronger else (new, old)
    if weak.until_s <= strong.until_s:
        return strong
    return strong._replace(then=weak if strong.then is None else combined(strong.then, weak, strong.until_s))


def _is_of(conversation: str, worth: Worth) -> bool:
    return conversation != "" and worth.conversation == conversation


def _without(conversation: str, worth: Worth) -> Worth | None:
    """The hints that count in turn, without those of this conversation."""
    then = None if worth.then is None else _without(conversation, worth.then)
    return then if _is_of(conversation, worth) else worth._replace(then=then)


class EvictionQueue:
    """Cached blocks without a holder. `num_blocks`: the size of the whole pool, which tenants share."""

    def __init__(self, num_blocks: int, clock: Callable[[], float]) -> None:
        self._num_blocks = num_blocks
        self._clock = clock
        self._worth: dict[int, Worth] = {}
        self._expendable: _Blocks = OrderedDict()
        self._ordinary: _Blocks = OrderedDict()
        self._protected: defaultdict[str, _Blocks] = defaultdict(OrderedDict)
        self._num_of: dict[str, int] = {}  # by tenant, the blocks that are not expendable
        self._ends: list[tuple[float, int]] = []  # a heap; entries of blocks that have left or changed are ignored

    def __len__(self) -> int:
        return len(self._worth)

    def __iter__(self) -> Iterator[int]:
        return iter(self._worth)

    def add(self, block_ids: Sequence[int], worth: Worth) -> None:
        """Append blocks, at least one."""
        added = dict.fromkeys(block_ids)
        self._worth.update(dict.fromkeys(block_ids, worth))
        if worth.priority is KeepPriority.LOW:
            self._expendable.update(added)
            return
        if worth.until_s < math.inf:
            self._note_ends(worth.until_s, block_ids)
        is_protected = worth.priority is KeepPriority.HIGH
        (self._protected[worth.tenant] if is_protected else self._ordinary).update(added)
        is_new = worth.tenant not in self._num_of
        self._num_of[worth.tenant] = self._num_of.get(worth.tenant, 0) + len(block_ids)
        if is_new:  # everyone's share is smaller now
            for tenant in self._protected:
                self._limit(tenant)
        elif is_protected:
            self._limit(worth.tenant)

    def remove(self, block_id: int) -> None:
        """Take out a block that is used again."""
        worth = self._worth.pop(block_id)
        if worth.priority is KeepPriority.LOW:
            del self._expendable[block_id]
            return
        if block_id in self._ordinary:
            del self._ordinary[block_id]
        else:
            del self._protected[worth.tenant][block_id]
            if not self._protected[worth.tenant]:
                del self._protected[worth.tenant]
        self._num_of[worth.tenant] -= 1
        if not self._num_of[worth.tenant]:
            del self._num_of[worth.tenant]

    def take(self) -> tuple[int, bool]:
        """Remove the block that goes first. Returns it, and False if its content is worth nothing to anybody."""
        if self._ends:
            self._expire()
        is_worth_keeping = not self._expendable
        block_id = next(iter(self._first()))
        self.remove(block_id)
        return block_id, is_worth_keeping

    def _first(self) -> _Blocks:
        """The blocks to take from; there is at least one."""
        return self._expendable or self._ordinary or max(self._protected.values(), key=len)

    def _limit(self, tenant: str) -> None:
        """Make the oldest protected blocks of a tenant ordinary, and the next to go, where it has too many."""
        share = self._num_blocks // len(self._num_of)
        protected = self._protected[tenant]
        while len(protected) > share:
            block_id, _ = protected.popitem(last=False)
            self._ordinary[block_id] = None
            self._ordinary.move_to_end(block_id, last=False)

    def _note_ends(self, until_s: float, block_ids: Sequence[int]) -> None:
        for block_id in block_ids:
            heapq.heappush(self._ends, (until_s, block_id))
        if len(self._ends) > 2 * self._num_blocks:  # most are of blocks that were used again
            self._ends = [(worth.until_s, block) for block, worth in self._worth.items() if worth.until_s < math.inf]
            heapq.heapify(self._ends)

    def _expire(self) -> None:
        """Give blocks whose time to live is over the worth that comes then, or make them expendable."""
        now_s = self._clock()
        while self._ends and self._ends[0][0] <= now_s:
            until_s, block_id = heapq.heappop(self._ends)
            worth = self._worth.get(block_id)
            if worth is not None and worth.until_s == until_s:
                self.remove(block_id)
                self.add([block_id], worth.then or Worth(worth.tenant, worth.conversation, KeepPriority.LOW))

"""A fair queue: replays first, then higher priorities; within a priority, tenants round robin; within a tenant, FIFO.

A tenant with a thousand waiting requests delays another tenant's first request by one request, not by a thousand.
Lower priorities never starve: while they wait, at least one turn in `LOW_PRIORITY_INTERVAL` goes to the priority whose
head has waited longest. Items that are taken out of turn keep the same rules among themselves. The head of the queue
changes only when it is dequeued or removed, or when a replay or a higher-priority item arrives. A replay that was taken
out and comes back is the last of the replays.
"""

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain, count, islice, zip_longest
from typing import Generic, TypeVar

from router.tenants import Priority

T = TypeVar("T")

LOW_PRIORITY_INTERVAL = 8


@dataclass(frozen=True, slots=True)
class QueueEntry:
    """An item's place in the queue, and the time until which waiting is useful. Times are the event loop's clock.

    `first_token_by_s` comes from the request's ttft_target, `deadline_s` from the call's deadline.
    """

    tenant: str = ""
    priority: Priority = Priority.STANDARD
    first_token_by_s: float | None = None
    deadline_s: float | None = None

    @property
    def worthless_after_s(self) -> float:
        """The time after which a first token is too late; infinity without a limit."""
        return min(at_s for at_s in (self.first_token_by_s, self.deadline_s, float("inf")) if at_s is not None)


class FairQueue(Generic[T]):
    """Items must be distinct. With a single tenant and priority this is a plain FIFO queue."""

    def __init__(self) -> None:
        self._replays: deque[T] = deque()
        self._lines: dict[Priority, _Line[T]] = {priority: _Line() for priority in sorted(Priority, reverse=True)}
        self._arrivals = count()
        self._num_waiting = 0
        self._num_over_lower = 0
        """Turns in a row that the highest priority has taken while lower ones waited."""
        self._num_out_of_turn = 0
        """The same for items that were taken out of turn: they must not change the head."""

    def __len__(self) -> int:
        return self._num_waiting

    def all(self) -> Iterator[T]:
        """All items, in no particular order."""
        return chain(self._replays, *(line.all() for line in self._lines.values()))

    def num_of(self, tenant: str) -> int:
        """Number of the tenant's waiting items, without replays."""
        return sum(line.num_of(tenant) for line in self._lines.values())

    def ahead_of(self, entry: QueueEntry) -> Iterator[T]:
        """Items that would be dequeued before a new item with this entry, if nothing else arrived."""
        higher = (line.all() for priority, line in self._lines.items() if priority > entry.priority)
        lower = (line.all() for priority, line in self._lines.items() if priority < entry.priority)
        before = [*chain(*higher), *self._lines[entry.priority].before(entry.tenant)]
        return chain(self._replays, before, islice(chain(*lower), len(before) // (LOW_PRIORITY_INTERVAL - 1)))

    def add(self, entry: QueueEntry, item: T) -> None:
        """Enqueue behind the tenant's other items of this priority."""
        self._lines[entry.priority].add(entry.tenant, next(self._arrivals), item)
        self._num_waiting += 1

    def add_replay(self, item: T) -> None:
        """Enqueue a replay behind those that wait, before everything else."""
        self._replays.append(item)
        self._num_waiting += 1

    def first(self) -> T:
        """Return the head. The queue must not be empty."""
        return self._replays[0] if self._replays else self._next_line().first()[1]

    def take_first(self) -> T:
        """Dequeue the head; its tenant goes to the end of the round."""
        self._num_waiting -= 1
        if self._replays:
            return self._replays.popleft()
        line = self._next_line()
        self._num_over_lower = self._num_over_lower + 1 if self._is_over_lower(line) else 0
        return line.take_first()

    def first_where(self, matches: Callable[[T], bool]) -> T | None:
        """Return the item that would be the head if only matching items were taken. Tenants before it keep their
        turns.
        """
        lines = self._in_turn(self._num_out_of_turn)
        return next(filter(matches, chain(self._replays, *(line.in_turn() for line in lines))), None)

    def take(self, item: T) -> None:
        """Dequeue a waiting item out of turn; its tenant still goes to the end of the round."""
        if item in self._replays:
            self._replays.remove(item)
        else:
            line = next(line for line in self._waiting_lines() if item in line.all())
            self._num_out_of_turn = self._num_out_of_turn + 1 if self._is_over_lower(line) else 0
            line.remove(item, rotate=True)
        self._num_waiting -= 1

    def remove(self, item: T) -> bool:
        """Remove a cancelled item; False if it is not in the queue."""
        if item in self._replays:
            self._replays.remove(item)
        elif not any(line.remove(item) for line in self._lines.values()):
            return False
        self._num_waiting -= 1
        return True

    def _waiting_lines(self) -> "list[_Line[T]]":
        """Non-empty lines, highest priority first."""
        return [line for line in self._lines.values() if line]

    def _next_line(self) -> "_Line[T]":
        return self._in_turn(self._num_over_lower)[0]

    def _in_turn(self, num_over_lower: int) -> "list[_Line[T]]":
        """Non-empty lines, the one whose turn it is first."""
        lines = self._waiting_lines()
        if num_over_lower < LOW_PRIORITY_INTERVAL - 1:
            return lines
        return [*sorted(lines[1:], key=lambda line: line.first()[0]), *lines[:1]]

    def _is_over_lower(self, line: "_Line[T]") -> bool:
        """True if this line is the highest while lower ones wait."""
        lines = self._waiting_lines()
        return len(lines) > 1 and line is lines[0]


class _Line(Generic[T]):
    """Items of one priority, each with its arrival number; tenants in round-robin order."""

    def __init__(self) -> None:
        self._by_tenant: dict[str, deque[tuple[int, T]]] = {}  # in round-robin order; no deque is empty

    def __bool__(self) -> bool:
        return bool(self._by_tenant)

    def num_of(self, tenant: str) -> int:
        return len(self._by_tenant.get(tenant, ()))

    def all(self) -> Iterator[T]:
        return (item for items in self._by_tenant.values() for _, item in items)

    def in_turn(self) -> Iterator[T]:
        """Yield the first item of each tenant, then the second of each, and so on."""
        rounds = zip_longest(*self._by_tenant.values())
        return (entry[1] for round_ in rounds for entry in round_ if entry is not None)

    def before(self, tenant: str) -> Iterator[T]:
        """Yield the items ahead of the tenant's next item: until then each other tenant has as many turns."""
        num_turns = self.num_of(tenant) + 1
        for items in self._by_tenant.values():
            yield from (item for _, item in islice(items, num_turns))

    def add(self, tenant: str, arrival: int, item: T) -> None:
        self._by_tenant.setdefault(tenant, deque()).append((arrival, item))

    def first(self) -> tuple[int, T]:
        return next(iter(self._by_tenant.values()))[0]

    def take_first(self) -> T:
        tenant = next(iter(self._by_tenant))
        items = self._by_tenant.pop(tenant)
        _, item = items.popleft()
        if items:
            self._by_tenant[tenant] = items
        return item

    def remove(self, item: T, *, rotate: bool = False) -> bool:
        for tenant, items in self._by_tenant.items():
            entry = next((entry for entry in items if entry[1] == item), None)
            if entry is not None:
                items.remove(entry)
                if rotate or not items:
                    del self._by_tenant[tenant]
                if rotate and items:
                    self._by_tenant[tenant] = items
                return True
        return False

"""Whose turn it is: replays before everybody, then higher classes first; within a class tenants one after another, and
within a tenant first come, first served.

A tenant with a thousand waiting requests delays another's first one by one request, not by a thousand. Lower classes
are never starved: while they wait, at least one turn in `LOWER_TURN` is theirs, and it goes to the class whose turn has
waited longest. Whose turn it is changes only when it is taken, leaves, or a replay or somebody of a higher class joins.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, count, islice
from typing import Generic, TypeVar

from router.tenants import Priority

T = TypeVar("T")

LOWER_TURN = 8


@dataclass(frozen=True, slots=True)
class Lane:
    """Where an item waits: its tenant's name and its class."""

    tenant: str = ""
    priority: Priority = Priority.STANDARD


class Turns(Generic[T]):
    """Waiting items, all different. With a single tenant and class it is a plain queue."""

    def __init__(self) -> None:
        self._urgent: deque[T] = deque()
        self._classes: dict[Priority, _Class[T]] = {priority: _Class() for priority in sorted(Priority, reverse=True)}
        self._arrivals = count()
        self._num_waiting = 0
        self._num_over_lower = 0
        """Turns that the highest class has taken in a row while lower ones waited."""

    def __len__(self) -> int:
        return self._num_waiting

    def all(self) -> Iterator[T]:
        """Everybody, in no certain order."""
        return chain(self._urgent, *(line.all() for line in self._classes.values()))

    def num_of(self, tenant: str) -> int:
        """How many of the tenant's wait, replays left out."""
        return sum(line.num_of(tenant) for line in self._classes.values())

    def ahead_of(self, lane: Lane) -> Iterator[T]:
        """Whom one that joins the lane now would find before it, if nobody else came."""
        higher = (line.all() for priority, line in self._classes.items() if priority > lane.priority)
        lower = (line.all() for priority, line in self._classes.items() if priority < lane.priority)
        before = [*chain(*higher), *self._classes[lane.priority].before(lane.tenant)]
        return chain(self._urgent, before, islice(chain(*lower), len(before) // (LOWER_TURN - 1)))

    def add(self, lane: Lane, item: T) -> None:
        """Behind the lane's others."""
        self._classes[lane.priority].add(lane.tenant, next(self._arrivals), item)
        self._num_waiting += 1

    def add_first(self, item: T) -> None:
        """Before everybody."""
        self._urgent.appendleft(item)
        self._num_waiting += 1

    def first(self) -> T:
        """Whose turn it is. There must be one."""
        return self._urgent[0] if self._urgent else self._next_class().first()[1]

    def take_first(self) -> T:
        """Remove and return `first()`; its tenant goes to the end of its class's line."""
        self._num_waiting -= 1
        if self._urgent:
            return self._urgent.popleft()
        line = self._next_class()
        highest, *lower = self._waiting_classes()
        self._num_over_lower = self._num_over_lower + 1 if lower and line is highest else 0
        return line.take_first()

    def remove(self, item: T) -> bool:
        """Take `item` out wherever it is; False if it is not here."""
        if item in self._urgent:
            self._urgent.remove(item)
        elif not any(line.remove(item) for line in self._classes.values()):
            return False
        self._num_waiting -= 1
        return True

    def _waiting_classes(self) -> "list[_Class[T]]":
        """Highest first."""
        return [line for line in self._classes.values() if line]

    def _next_class(self) -> "_Class[T]":
        highest, *lower = self._waiting_classes()
        if lower and self._num_over_lower >= LOWER_TURN - 1:
            return min(lower, key=lambda line: line.first()[0])
        return highest


class _Class(Generic[T]):
    """One class: items with the number of their arrival, tenants in turn."""

    def __init__(self) -> None:
        self._by_tenant: dict[str, deque[tuple[int, T]]] = {}  # in the order of turns; none is empty

    def __bool__(self) -> bool:
        return bool(self._by_tenant)

    def num_of(self, tenant: str) -> int:
        return len(self._by_tenant.get(tenant, ()))

    def all(self) -> Iterator[T]:
        return (item for items in self._by_tenant.values() for _, item in items)

    def before(self, tenant: str) -> Iterator[T]:
        """Whom the tenant's next item would have before it: each other tenant has as many turns until then."""
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

    def remove(self, item: T) -> bool:
        for tenant, items in self._by_tenant.items():
            entry = next((entry for entry in items if entry[1] == item), None)
            if entry is not None:
                items.remove(entry)
                if not items:
                    del self._by_tenant[tenant]
                return True
        return False

"""Whose turn it is: first come, first served within a tenant, and tenants one after another.

A tenant with a thousand waiting requests delays another's first one by one request, not by a thousand. The one whose
turn it is stays so, whoever joins, until it is taken or leaves: except that replays go before everybody.
"""

from collections import deque
from typing import Generic, TypeVar

T = TypeVar("T")


class Turns(Generic[T]):
    """Waiting items, all different. With a single tenant it is a plain queue."""

    def __init__(self) -> None:
        self._urgent: deque[T] = deque()
        self._by_tenant: dict[str, deque[T]] = {}  # in the order of turns; none is empty
        self._num_waiting = 0

    def __len__(self) -> int:
        return self._num_waiting

    def add(self, tenant: str, item: T) -> None:
        """Behind the tenant's others."""
        self._by_tenant.setdefault(tenant, deque()).append(item)
        self._num_waiting += 1

    def add_first(self, item: T) -> None:
        """Before everybody."""
        self._urgent.appendleft(item)
        self._num_waiting += 1

    def first(self) -> T:
        """Whose turn it is. There must be one."""
        return self._urgent[0] if self._urgent else next(iter(self._by_tenant.values()))[0]

    def take_first(self) -> T:
        """Remove and return `first()`; its tenant goes to the end of the line."""
        self._num_waiting -= 1
        if self._urgent:
            return self._urgent.popleft()
        tenant = next(iter(self._by_tenant))
        items = self._by_tenant.pop(tenant)
        item = items.popleft()
        if items:
            self._by_tenant[tenant] = items
        return item

    def remove(self, item: T) -> bool:
        """Take `item` out wherever it is; False if it is not here."""
        if item in self._urgent:
            self._urgent.remove(item)
        else:
            tenant = next((name for name, items in self._by_tenant.items() if item in items), None)
            if tenant is None:
                return False
            self._by_tenant[tenant].remove(item)
            if not self._by_tenant[tenant]:
                del self._by_tenant[tenant]
        self._num_waiting -= 1
        return True

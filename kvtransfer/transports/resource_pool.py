"""Senders and receivers keep resources for a peer between transfers, such as a gRPC connection, a process group or a
mapped arena (ResourcePool), and avoid peers where a transport has just failed (AvoidedAddresses). No I/O.
"""

import asyncio
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

_AVOID_S = 60.0


class Closable(Protocol):
    """A resource, as far as the pool needs to know it."""

    @property
    def is_broken(self) -> bool:
        """True once an operation has failed. It stays true."""
        ...

    def close(self) -> None:
        """Free the resource. Called once, when it has no users. Does not block."""
        ...


R = TypeVar("R", bound=Closable)
K = TypeVar("K", bound=Hashable)


@dataclass(slots=True)
class _Entry(Generic[K]):
    key: K
    num_users: int = 0
    idle_timer: asyncio.TimerHandle | None = None


class ResourcePool(Generic[K, R]):
    """At most `max_resources` resources (None: any number), for use on one event loop; at most one of them is current
    for a key.

    A retired or broken resource gets no new users and is closed when its last user leaves. Other resources are kept for
    `idle_s` without users, or until their place is needed.
    """

    def __init__(self, max_resources: int | None, idle_s: float) -> None:
        self._max_resources = max_resources
        self._idle_s = idle_s
        self._current: dict[K, R] = {}
        self._entries: dict[R, _Entry[K]] = {}  # all resources that are not closed, the longest unused first

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: K) -> R | None:
        """Return the current resource of `key`."""
        resource = self._current.get(key)
        if resource is not None and resource.is_broken:
            self.retire(resource)
            return None
        return resource

    def num_users(self, resource: R) -> int:
        """Return how many users a resource has that is not closed."""
        return self._entries[resource].num_users

    def add(self, key: K, make: Callable[[], R]) -> R | None:
        """Make the new current resource of `key`, and retire the old one. Return None if all places are in use."""
        old = self._current.get(key)
        if old is not None:
            self.retire(old)
        if self._max_resources is not None and len(self._entries) >= self._max_resources:
            unused = next((resource for resource, entry in self._entries.items() if not entry.num_users), None)
            if unused is None:
                return None
            self._close(unused)
        resource = self._current[key] = make()
        self._entries[resource] = _Entry(key)
        self._set_idle(resource, self._entries[resource])
        return resource

    def use(self, resource: R) -> None:
        """Add a user to a current resource."""
        entry = self._entries[resource] = self._entries.pop(resource)
        if entry.idle_timer is not None:
            entry.idle_timer.cancel()
            entry.idle_timer = None
        entry.num_users += 1

    def leave(self, resource: R) -> None:
        """Remove a user of the resource; a broken one is retired."""
        entry = self._entries[resource] = self._entries.pop(resource)
        entry.num_users -= 1
        if resource.is_broken:
            self.retire(resource)
        elif not entry.num_users:
            if self._current.get(entry.key) is resource:
                self._set_idle(resource, entry)
            else:
                self._close(resource)

    def retire(self, resource: R) -> None:
        """Give the resource no new users; close it once it has none. Idempotent."""
        entry = self._entries.get(resource)
        if entry is None:
            return
        if self._current.get(entry.key) is resource:
            del self._current[entry.key]
        if not entry.num_users:
            self._close(resource)

    def close(self) -> None:
        """Close all resources. None may have users."""
        for resource in list(self._entries):
            self._close(resource)

    def _set_idle(self, resource: R, entry: _Entry[K]) -> None:
        entry.idle_timer = asyncio.get_running_loop().call_later(self._idle_s, self._close, resource)

    def _close(self, resource: R) -> None:
        entry = self._entries.pop(resource)
        if entry.idle_timer is not None:
            entry.idle_timer.cancel()
        if self._current.get(entry.key) is resource:
            del self._current[entry.key]
        resource.close()


class AvoidedAddresses:
    """The receivers to which a transport does not offer itself for now, because it has just failed there."""

    def __init__(self) -> None:
        self._until_s: dict[str, float] = {}  # on the event loop's clock

    def __contains__(self, address: str) -> bool:
        return self._until_s.get(address, 0.0) > asyncio.get_running_loop().time()

    def add(self, address: str) -> None:
        """Avoid this address for _AVOID_S."""
        now_s = asyncio.get_running_loop().time()
        self._until_s = {other: until_s for other, until_s in self._until_s.items() if until_s > now_s}
        self._until_s[address] = now_s + _AVOID_S

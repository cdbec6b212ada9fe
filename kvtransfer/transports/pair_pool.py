"""A pool of pairs: process groups of a sender and a receiver, by the peer's key. Counts users; no I/O."""

import asyncio
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar


class Closable(Protocol):
    """A pair, as far as the pool needs to know it."""

    @property
    def is_broken(self) -> bool:
        """True once an operation has failed. It stays true."""
        ...

    def close(self) -> None:
        """Free the pair. Called once, when it has no users. Does not block."""
        ...


P = TypeVar("P", bound=Closable)
K = TypeVar("K", bound=Hashable)


@dataclass(slots=True)
class _Entry(Generic[K]):
    key: K
    num_users: int = 0
    idle_timer: asyncio.TimerHandle | None = None


class PairPool(Generic[K, P]):
    """At most `max_pairs` pairs, for use on one event loop; at most one of them is current for a key.

    A retired or broken pair gets no new users and is closed when its last user leaves. Other pairs are kept for
    `idle_s` without users, or until their place is needed.
    """

    def __init__(self, max_pairs: int, idle_s: float) -> None:
        self._max_pairs = max_pairs
        self._idle_s = idle_s
        self._current: dict[K, P] = {}
        self._entries: dict[P, _Entry[K]] = {}  # all pairs that are not closed, the longest unused first

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: K) -> P | None:
        """Return the current pair of `key`."""
        pair = self._current.get(key)
        if pair is not None and pair.is_broken:
            self.retire(pair)
            return None
        return pair

    def num_users(self, pair: P) -> int:
        """Return how many users a pair has that is not closed."""
        return self._entries[pair].num_users

    def add(self, key: K, make: Callable[[], P]) -> P | None:
        """Make the new current pair of `key`, and retire the old one. Return None if all places are in use."""
        old = self._current.get(key)
        if old is not None:
            self.retire(old)
        if len(self._entries) >= self._max_pairs:
            unused = next((pair for pair, entry in self._entries.items() if not entry.num_users), None)
            if unused is None:
                return None
            self._close(unused)
        pair = self._current[key] = make()
        self._entries[pair] = _Entry(key)
        self._set_idle(pair, self._entries[pair])
        return pair

    def use(self, pair: P) -> None:
        """Add a user to a current pair."""
        entry = self._entries[pair] = self._entries.pop(pair)
        if entry.idle_timer is not None:
            entry.idle_timer.cancel()
            entry.idle_timer = None
        entry.num_users += 1

    def leave(self, pair: P) -> None:
        """Remove a user of the pair; a broken one is retired."""
        entry = self._entries[pair] = self._entries.pop(pair)
        entry.num_users -= 1
        if pair.is_broken:
            self.retire(pair)
        elif not entry.num_users:
            if self._current.get(entry.key) is pair:
                self._set_idle(pair, entry)
            else:
                self._close(pair)

    def retire(self, pair: P) -> None:
        """Give the pair no new users; close it once it has none. Idempotent."""
        entry = self._entries.get(pair)
        if entry is None:
            return
        if self._current.get(entry.key) is pair:
            del self._current[entry.key]
        if not entry.num_users:
            self._close(pair)

    def close(self) -> None:
        """Close all pairs. None may have users."""
        for pair in list(self._entries):
            self._close(pair)

    def _set_idle(self, pair: P, entry: _Entry[K]) -> None:
        entry.idle_timer = asyncio.get_running_loop().call_later(self._idle_s, self._close, pair)

    def _close(self, pair: P) -> None:
        entry = self._entries.pop(pair)
        if entry.idle_timer is not None:
            entry.idle_timer.cancel()
        if self._current.get(entry.key) is pair:
            del self._current[entry.key]
        pair.close()

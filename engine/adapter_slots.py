"""AdapterSlots: which LoRA adapters are in a worker's memory.

The model has a fixed number of slots. If there are more adapters than slots, an adapter is read when a sequence needs
it, on a thread of its own. It replaces the adapter that was used least recently, once no sequence uses that one. An
adapter stays as long as a sequence uses it: requests for others wait in line, before they are scheduled, and not for
ever. Meanwhile the adapter that is to leave takes no new sequences: they wait in the line, too.
"""

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from weakref import WeakSet

import structlog

from checkpoint.adapters import AdapterFiles, require_unchanged
from engine.sequence import SequenceState
from mesh.domain.errors import ConfigurationError, ModelFailed, WorkerBusy

log = structlog.get_logger(__name__)

_POLL_INTERVAL_S = 0.005
_MAX_WAIT_S = 10.0
"""After it the router replays the request, here or elsewhere. Well below the time that it waits for a reservation."""
_KEPT_CLOSED_S = 3.0
"""An adapter that must leave stays closed for this time after the last request for its slot has gone: longer than a
replay's backoff.
"""


@dataclass(eq=False, slots=True)
class _Waiting:
    """A request in the line. `ready` can be cancelled at any time before it is answered."""

    choices: Sequence[SequenceState]
    give_up_s: float
    is_checked: bool = False
    """Whether the files of its adapter were those of the start when it came."""
    ready: "Future[None]" = field(default_factory=Future)

    @property
    def digest(self) -> str:
        return self.choices[0].spec.adapter

    def answer(self, error: Exception | None = None) -> None:
        if not self.ready.set_running_or_notify_cancel():
            return
        if error is None:
            self.ready.set_result(None)
        else:
            self.ready.set_exception(error)


class AdapterSlots:
    """`put(slot, adapter)` reads an adapter into a slot of the model, which no step uses meanwhile. The constructor
    fills the slots with the first adapters. Raises ConfigurationError, as `require_unchanged` does.
    """

    def __init__(
        self,
        adapters: Sequence[AdapterFiles],
        num_slots: int,
        put: Callable[[int, AdapterFiles], None],
        max_wait_s: float = _MAX_WAIT_S,
        kept_closed_s: float = _KEPT_CLOSED_S,
    ) -> None:
        self.slots: dict[str, int] = {}
        """The slots of the adapters in memory, by digest."""
        self._adapters = {adapter.digest: adapter for adapter in adapters}
        self._put = put
        self._max_wait_s = max_wait_s
        self._kept_closed_s = kept_closed_s
        self._free = list(range(num_slots))
        # Of the adapters in memory, the least recently used first. `forget` is the rule; weak references are for
        # sequences that end before they reach the engine.
        self._users: dict[str, WeakSet[SequenceState]] = {}
        self._leaving = ""  # the digest of an adapter that takes no new sequences until `_reopens_s`
        self._reopens_s = 0.0
        self._line: list[_Waiting] = []
        self._changing = threading.Lock()
        self._reading = ThreadPoolExecutor(1, "adapters")
        for digest in list(self._adapters)[:num_slots]:
            self._fill(self._free.pop(0), self._adapters[digest])

    def prepare(self, choices: Sequence[SequenceState]) -> "Future[None] | None":
        """See Runner.prepare. The future fails with ModelFailed if the adapter can no longer be read, with WorkerBusy
        if others have used all slots for too long.
        """
        if choices[0].spec.adapter not in self._adapters:
            return None
        waiting = _Waiting(choices, time.monotonic() + self._max_wait_s)
        with self._changing:
            if self._is_open(waiting.digest):
                self._use(choices)
                return None
            self._line.append(waiting)
        self._reading.submit(self._serve_line)
        return waiting.ready

    def forget(self, sequence: SequenceState) -> None:
        """The sequence has ended; idempotent."""
        with self._changing:
            if (users := self._users.get(sequence.spec.adapter)) is not None:
                users.discard(sequence)

    def close(self) -> None:
        """Cancel the loads that wait for a slot."""
        self._reading.shutdown(wait=False, cancel_futures=True)
        with self._changing:
            for waiting in self._line:
                waiting.ready.cancel()
            self._line.clear()

    def _is_open(self, digest: str) -> bool:
        """Whether sequences may begin to use the adapter: it is in memory, and need not leave."""
        return digest in self._users and (digest != self._leaving or time.monotonic() >= self._reopens_s)

    def _use(self, choices: Sequence[SequenceState]) -> None:
        digest = choices[0].spec.adapter
        users = self._users[digest] = self._users.pop(digest)
        users.update(choices)

    def _serve_line(self) -> None:
        """Answer those in the line, until there are none."""
        while self._line:
            with self._changing:
                num_before = len(self._line)
                self._line = [waiting for waiting in self._line if not waiting.ready.cancelled()]
                absent = next((waiting for waiting in self._line if waiting.digest not in self._users), None)
                if absent is None and len(self._line) < num_before:
                    self._reopens_s = 0.0  # no request in the line needs a slot
                self._let_in()
            if absent is not None and self._read(absent):
                continue
            with self._changing:
                now_s = time.monotonic()
                for waiting in [waiting for waiting in self._line if now_s > waiting.give_up_s]:
                    error = WorkerBusy("other requests use all adapters that may be in memory (max_loaded_adapters)")
                    self._end(waiting, error)
            time.sleep(_POLL_INTERVAL_S)

    def _let_in(self) -> None:
        """Answer those whose adapter is open."""
        for waiting in [waiting for waiting in self._line if self._is_open(waiting.digest)]:
            self._use(waiting.choices)
            self._end(waiting)

    def _end(self, waiting: _Waiting, error: Exception | None = None) -> None:
        self._line.remove(waiting)
        waiting.answer(error)

    def _read(self, waiting: _Waiting) -> bool:
        """Read an adapter, if there is a slot for it; returns False if there is none yet. If the adapter cannot be
        read, the request fails: at once, if its files are wrong when it comes, and no other adapter leaves for it.
        """
        adapter, started_s = self._adapters[waiting.digest], time.monotonic()
        try:
            if not waiting.is_checked:
                require_unchanged(adapter)
                waiting.is_checked = True
            if (slot := self._take_slot()) is None:
                return False
            try:
                self._fill(slot, adapter)
            except BaseException:
                self._free.append(slot)
                raise
        except Exception as error:
            log.error("an adapter cannot be read", name=adapter.name, reason=str(error))
            is_known = isinstance(error, ConfigurationError | OSError)
            with self._changing:
                self._end(waiting, ModelFailed(str(error)) if is_known else error)
        else:
            log.info("adapter read", name=adapter.name, seconds=round(time.monotonic() - started_s, 3))
        return True

    def _take_slot(self) -> int | None:
        """Take a free slot, or that of an adapter that no sequence uses. If all are in use, the least recently used one
        takes no new sequences, also for a while after those in the line have given up: else a steady stream of
        sequences would keep it in use until each replay.
        """
        with self._changing:
            if self._free:
                slot = self._free.pop()
            elif (unused := next((digest for digest, users in self._users.items() if not users), None)) is not None:
                del self._users[unused]
                slot = self.slots.pop(unused)
            else:
                if self._leaving not in self._users or self._is_open(self._leaving):
                    self._leaving = next(iter(self._users))
                self._reopens_s = time.monotonic() + self._kept_closed_s
                return None
            self._reopens_s = 0.0
            self._let_in()
            return slot

    def _fill(self, slot: int, adapter: AdapterFiles) -> None:
        """Raises ConfigurationError if the files have been changed, before they were read or meanwhile."""
        try:
            self._put(slot, adapter)
        finally:
            require_unchanged(adapter)
        with self._changing:
            self.slots[adapter.digest] = slot
            self._users[adapter.digest] = WeakSet()

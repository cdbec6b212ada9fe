"""Memory for payloads in transit, as a fixed number of slots. Callers wait in FIFO order; all on one event loop.

A transfer acquires one slot at a time, holds at most its credit, and frees each slot on an ack that depends on no other
transfer; transfers to one receiver hold `receiver_chunks` at most. So there is no deadlock, and no receiver that hangs
keeps all slots from the others.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from concurrent import futures
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from kvtransfer.transports.base import Payload, Slot
from mesh.domain.errors import TransferCorrupt, TransferFailed
from mesh.tasks import call_on

if TYPE_CHECKING:
    from torch import Tensor


ARENA_HEADER_BYTES = 4096
"""A sender's arena begins with a header; its slots lie behind it."""


def require_in_arena(payload: Payload, num_bytes: int, arena_bytes: int) -> None:
    """Raise TransferCorrupt unless the payload lies behind the header of an arena of so many bytes."""
    start, end = payload.arena_offset, payload.arena_offset + num_bytes
    if payload.inline or start < ARENA_HEADER_BYTES or end > arena_bytes:
        raise TransferCorrupt(f"a payload of {num_bytes} bytes at {start} is not inside the arena")


class ArenaSlots:
    """Equal slots of one arena, behind its header."""

    def __init__(self, memory: memoryview, slot_bytes: int) -> None:
        self._memory = memory
        self._slot_bytes = slot_bytes
        self._offsets = list(range(ARENA_HEADER_BYTES, len(memory) - slot_bytes + 1, slot_bytes))
        self.num_slots = len(self._offsets)
        self._free = asyncio.Semaphore(self.num_slots)

    @property
    def num_free(self) -> int:
        """The number of slots that are not in use."""
        return len(self._offsets)

    async def acquire(self, num_bytes: int) -> "ArenaSlot":
        """Return a slot for `num_bytes`. Raises TransferFailed if they do not fit one."""
        if num_bytes > self._slot_bytes:
            raise TransferFailed(f"a chunk of {num_bytes} bytes does not fit a slot of {self._slot_bytes}")
        await self._free.acquire()
        offset = self._offsets.pop()
        return ArenaSlot(self, offset, self._memory[offset : offset + num_bytes])

    def give_back(self, offset: int) -> None:
        """Free the slot at `offset`."""
        self._offsets.append(offset)
        self._free.release()

    def close(self) -> None:
        """Let go of the memory. No slot is in use."""
        with contextlib.suppress(BufferError):  # unmapped with the last reference
            self._memory.release()


class ArenaSlot(Slot):
    """If a slot is released too early, it may be overwritten while a receiver copies it; the copy then fails its
    checksum."""

    def __init__(self, slots: ArenaSlots, offset: int, view: memoryview) -> None:
        self._slots: ArenaSlots | None = slots
        self._offset = offset
        self._view = view

    def buffer(self) -> memoryview:
        return self._view

    def seal(self) -> Payload:
        return Payload(arena_offset=self._offset)

    def release(self, *, is_acknowledged: bool) -> None:
        slots, self._slots = self._slots, None
        if slots is not None:
            with contextlib.suppress(BufferError):  # the traceback of a failed gather may still reference the view
                self._view.release()
            slots.give_back(self._offset)


class TensorSlots:
    """Tensors for payloads, made by `make(num_bytes)` when they are first needed; `drop` gets those that have become
    too small."""

    def __init__(
        self,
        num_slots: int,
        num_bytes: int,
        *,
        make: "Callable[[int], Tensor]",
        drop: "Callable[[Tensor], None]" = lambda _: None,
    ) -> None:
        self._num_bytes = num_bytes
        self._make = make
        self._drop = drop
        self._unused: list[Tensor] = []
        self._free = asyncio.Semaphore(num_slots)
        self.num_taken = 0

    async def acquire(self, num_bytes: int) -> "Tensor":
        """Return a tensor of `num_bytes` or more. Raises what `make` raises."""
        await self._free.acquire()
        slot = self._unused.pop() if self._unused else None
        try:
            if slot is not None and slot.numel() < num_bytes:
                self._drop(slot)
                slot = None
            if slot is None:
                slot = self._make(max(num_bytes, self._num_bytes))
        except BaseException:
            self._free.release()
            raise
        self.num_taken += 1
        return slot

    def give_back(self, slot: "Tensor | None") -> None:
        """Free a slot. None: its tensor is lost, a new one will be made."""
        self.num_taken -= 1
        if slot is not None:
            self._unused.append(slot)
        self._free.release()

    @asynccontextmanager
    async def filled(
        self, num_bytes: int, fill: "Callable[[Tensor], futures.Future[None]]"
    ) -> "AsyncIterator[Payload]":
        """A slot that `fill` fills on another thread, as a payload, until the context ends. Raises what `fill` does."""
        memory = await self.acquire(num_bytes)
        filling = fill(memory[:num_bytes])
        try:
            await asyncio.wrap_future(filling)
        except asyncio.CancelledError:
            loop = asyncio.get_running_loop()
            filling.add_done_callback(lambda _: call_on(loop, self.give_back, memory))  # the thread may still write it
            raise
        except BaseException:
            self.give_back(None)
            raise
        try:
            yield Payload(inline=memory[:num_bytes].numpy().data)
        finally:
            self.give_back(memory)

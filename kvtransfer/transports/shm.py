"""The transport "shm": payloads in POSIX shared memory, for workers on one host with the same /dev/shm.

The sender copies KV into a slot of its arena. The receiver reads the slot once, with `preadv`, into the KV cache (or,
for a GPU, into pinned memory) and verifies the bytes that it has read. So the KV cache holds exactly the verified
bytes, even if a faulty sender overwrites a slot too early. A truncated arena causes a short read; with a memory mapping
it would cause a SIGBUS that kills the decode worker.

Arenas are files in shared memory that one sender writes and receivers on the same host read. Layout: one page of header
(magic, nonce), then payload. The owner holds an flock while it lives. If another process can take the lock, the owner
is dead.
"""

import asyncio
import contextlib
import errno
import fcntl
import mmap
import os
import re
import secrets
import stat
import threading
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import structlog

from kvtransfer.settings import TransferSettings
from kvtransfer.transports.base import (
    Payload,
    PayloadSource,
    Reader,
    ReceiveTransport,
    SendPath,
    SendTransport,
    Slot,
    TransportOffer,
)
from mesh.domain.errors import TransferCorrupt, TransferFailed

log = structlog.get_logger(__name__)

NAME = "shm"

HEADER_BYTES = 4096
_MAGIC = b"tandem-kv-arena1"
_NONCE_BYTES = 32
_MAX_TRIES = 16
_NAME = re.compile(r"tandem-kv-[0-9a-f]{32}")


class ShmSendTransport(SendTransport, SendPath):
    """One arena, divided into equal slots, for all transfers of this process."""

    name = NAME

    def __init__(self, arena: "Arena", slot_bytes: int) -> None:
        self._arena = arena
        self._slot_bytes = slot_bytes
        self._offsets = list(range(HEADER_BYTES, arena.num_bytes - slot_bytes + 1, slot_bytes))
        self.num_slots = len(self._offsets)
        # A semaphore serves waiters in FIFO order. A transfer acquires one slot at a time, holds at most its credit,
        # and frees each slot on an ack that depends on no other transfer: so there is no deadlock and no starvation.
        self._free = asyncio.Semaphore(self.num_slots)

    @property
    def num_free_slots(self) -> int:
        """The number of slots that are not in use."""
        return len(self._offsets)

    async def path(self, address: str, incarnation: str) -> SendPath:
        return self

    def offer(self) -> TransportOffer:
        return TransportOffer(NAME, self._arena.name, self._arena.nonce, self._arena.num_bytes)

    async def acquire(self, num_bytes: int) -> "_ArenaSlot":
        if num_bytes > self._slot_bytes:
            raise TransferFailed(f"a chunk of {num_bytes} bytes does not fit a slot of {self._slot_bytes}")
        await self._free.acquire()
        return _ArenaSlot(self, self._offsets.pop(), num_bytes)

    def memory(self) -> memoryview:
        return self._arena.view(0, self._arena.num_bytes)

    def close(self) -> None:
        self._arena.close()

    def view(self, offset: int, num_bytes: int) -> memoryview:
        """Return a writable view of a part of the arena."""
        return self._arena.view(offset, num_bytes)

    def give_back(self, offset: int) -> None:
        """Free the slot at `offset`."""
        self._offsets.append(offset)
        self._free.release()


class _ArenaSlot(Slot):
    """If a slot is released too early, it may be overwritten while a receiver copies it; the copy then fails its
    checksum."""

    def __init__(self, transport: ShmSendTransport, offset: int, num_bytes: int) -> None:
        self._transport: ShmSendTransport | None = transport
        self._offset = offset
        self._view = transport.view(offset, num_bytes)

    def buffer(self) -> memoryview:
        return self._view

    def seal(self) -> Payload:
        return Payload(arena_offset=self._offset)

    def release(self, *, is_acknowledged: bool) -> None:
        transport, self._transport = self._transport, None
        if transport is not None:
            with contextlib.suppress(BufferError):  # the traceback of a failed gather may still reference the view
                self._view.release()
            transport.give_back(self._offset)


def open_sender(settings: TransferSettings, max_chunk_bytes: int) -> ShmSendTransport | None:
    """Create the arena, after removing arenas of dead senders. Return None, and log why, if it cannot be created."""
    remove_orphans(settings.shm_dir)
    page = os.sysconf("SC_PAGESIZE")
    slot_bytes = -(-max_chunk_bytes // page) * page
    try:
        arena = Arena(settings.shm_dir, max(settings.arena_bytes, HEADER_BYTES + slot_bytes))
    except OSError as error:
        log.warning("no shared memory for KV; other transports will be used", dir=settings.shm_dir, error=str(error))
        return None
    return ShmSendTransport(arena, slot_bytes)


class _ArenaSource(PayloadSource):
    def __init__(self, fd: int, num_bytes: int, scratch: threading.local) -> None:
        self._fd = fd
        self._arena_bytes = num_bytes
        self._scratch = scratch

    def fetch(self, payload: Payload, num_bytes: int) -> memoryview:
        copy = self._buffer(num_bytes)
        self._read(payload, 0, (copy,))
        return copy

    def reader(self, payload: Payload) -> Reader:
        return partial(self._read, payload)

    def _read(self, payload: Payload, start: int, parts: Sequence[memoryview]) -> None:
        num_bytes = sum(map(len, parts))
        offset = payload.arena_offset + start
        if payload.inline or payload.arena_offset < HEADER_BYTES or offset + num_bytes > self._arena_bytes:
            raise TransferCorrupt(f"a payload of {num_bytes} bytes at {offset} is not inside the arena")
        try:
            num_read = os.preadv(self._fd, parts, offset)
        except OSError as error:
            raise TransferFailed("the sender's arena cannot be read") from error
        if num_read != num_bytes:
            raise TransferCorrupt(f"the sender's arena ended {num_bytes - num_read} bytes early")

    def _buffer(self, num_bytes: int) -> memoryview:
        """Return this thread's buffer, which grows to the largest chunk that the thread has fetched."""
        buffer: memoryview | None = getattr(self._scratch, "buffer", None)
        if buffer is None or len(buffer) < num_bytes:
            buffer = self._scratch.buffer = memoryview(bytearray(num_bytes))
        return buffer[:num_bytes]

    def close(self) -> None:
        fd, self._fd = self._fd, -1
        os.close(fd)


class ShmReceiveTransport(ReceiveTransport):
    """Opens the sender's arena anew for each transfer: it takes a few system calls and needs no cache."""

    name = NAME

    def __init__(self, settings: TransferSettings) -> None:
        self._settings = settings
        self._scratch = threading.local()

    async def connect(self, offer: TransportOffer) -> _ArenaSource | None:
        if not HEADER_BYTES < offer.arena_bytes <= self._settings.max_arena_bytes:
            return None
        fd = open_arena(self._settings.shm_dir, offer.arena, offer.nonce, offer.arena_bytes)
        return None if fd is None else _ArenaSource(fd, offer.arena_bytes, self._scratch)


class Arena:
    """Shared memory that this process owns. Raises OSError if the memory or the lock is not available."""

    def __init__(self, directory: str, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self.nonce = secrets.token_bytes(_NONCE_BYTES)
        self.name, self._fd = _create(directory)
        self._path = Path(directory, self.name)
        try:
            # Allocates the memory now: a full /dev/shm is an error here instead of a SIGBUS at a later write.
            os.posix_fallocate(self._fd, 0, num_bytes)
            self._memory = mmap.mmap(self._fd, num_bytes)
        except OSError:
            self._unlink()
            raise
        self._memory[: len(_MAGIC) + _NONCE_BYTES] = _MAGIC + self.nonce

    def view(self, offset: int, num_bytes: int) -> memoryview:
        """Return a writable view of bytes [offset, offset + num_bytes)."""
        return memoryview(self._memory)[offset : offset + num_bytes]

    def close(self) -> None:
        """Unlink and unmap the arena. It stays readable for receivers that have it open."""
        self._unlink()
        with contextlib.suppress(BufferError):  # a view is still referenced; unmapped with its last reference
            self._memory.close()

    def _unlink(self) -> None:
        self._path.unlink(missing_ok=True)
        os.close(self._fd)


def open_arena(directory: str, name: str, nonce: bytes, num_bytes: int) -> int | None:
    """Open the arena with this name and nonce. Return a read-only file descriptor, None if it is not on this host."""
    if not _NAME.fullmatch(name) or len(nonce) != _NONCE_BYTES:
        return None
    try:
        fd = os.open(os.path.join(directory, name), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return None
    try:
        status = os.fstat(fd)
        is_arena = stat.S_ISREG(status.st_mode) and status.st_size == num_bytes
        if is_arena and os.pread(fd, len(_MAGIC) + _NONCE_BYTES, 0) == _MAGIC + nonce:
            return fd
    except OSError:
        pass
    os.close(fd)
    return None


def remove_orphans(directory: str) -> int:
    """Remove the arenas of dead owners. Return their number."""
    try:
        names = [name for name in os.listdir(directory) if _NAME.fullmatch(name)]
    except OSError:
        return 0
    removed = [name for name in names if _remove_if_orphan(os.path.join(directory, name))]
    if removed:
        log.info("removed arenas of senders that are gone", arenas=removed)
    return len(removed)


def _create(directory: str) -> tuple[str, int]:
    """Raises OSError where files cannot be locked."""
    for _ in range(_MAX_TRIES):
        name = f"tandem-kv-{secrets.token_hex(16)}"
        path = os.path.join(directory, name)
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Between open and lock another sender may take this file for an orphan and remove it.
            if os.fstat(fd).st_nlink:
                return name, fd
            os.close(fd)
        except BlockingIOError:  # that sender is about to remove it
            os.close(fd)
        except OSError:
            os.close(fd)
            os.unlink(path)
            raise
    raise OSError(errno.EBUSY, f"{_MAX_TRIES} arenas in {directory} were taken away as they were made")


def _remove_if_orphan(path: str) -> bool:
    try:
        fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return False  # gone meanwhile, or another user's
    try:
        if not _try_lock(fd):
            return False
        os.unlink(path)
        return True
    except OSError:
        return False
    finally:
        os.close(fd)


def _try_lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True

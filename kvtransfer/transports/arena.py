"""Arenas: files in shared memory that one sender writes and receivers on the same host read.

Layout: one page of header (magic, nonce), then payload. The owner holds an flock while it lives. If another process can
take the lock, the owner is dead.
"""

import contextlib
import errno
import fcntl
import mmap
import os
import re
import secrets
import stat
from pathlib import Path

import structlog

log = structlog.get_logger(__name__)

HEADER_BYTES = 4096
_MAGIC = b"tandem-kv-arena1"
_NONCE_BYTES = 32
_MAX_TRIES = 16
_NAME = re.compile(r"tandem-kv-[0-9a-f]{32}")


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

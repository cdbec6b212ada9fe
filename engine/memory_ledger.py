"""MemoryLedger: what the workers of a machine have of its memory, or are going to take.

The ledger is a folder with one file per worker. A worker holds a lock on its file as long as it lives. The system
releases the lock however the worker dies, which marks the entry as stale. All other operations run under one lock on
the folder.
"""

import fcntl
import json
import os
import secrets
import stat
import tempfile
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from engine.memory import DeviceMemory, anonymous_bytes, shared_bytes

_LOCK = "lock"
_SUFFIX = ".json"


@dataclass(frozen=True, slots=True)
class Entry:
    """The memory of one worker on a device."""

    device: str
    owner: str
    pid: int
    weights_bytes: int
    anonymous_bytes_before: int  # anonymous memory of the process when it entered, later when its KV was promised
    kv_bytes: int = 0  # 0 until the weights are loaded
    usable_bytes: int = 0  # `Budget.usable_bytes` when the KV was promised
    mapped_bytes: Mapping[str, int] = field(default_factory=dict)
    """Weights that stay in files, by the identity of the files: workers that map the same files share the memory."""
    rank_pids: Sequence[int] = ()  # the worker's other ranks
    kv_fd: int = -1
    """The process's file descriptor of shared memory with the KV of all ranks, without a draft model's; -1: none."""

    @property
    def is_loading(self) -> bool:
        """True while weights are loading and KV is not allocated yet."""
        return self.kv_bytes == 0

    def touched_kv_bytes(self, memory: DeviceMemory) -> int:
        """The part of `kv_bytes` that is already subtracted from `memory.free_bytes`. On CPU: what its shared memory
        takes, and the process's growth for the rest.
        """
        if not memory.is_lazy:
            return self.kv_bytes
        size, touched = shared_bytes(self.pid, self.kv_fd) if self.kv_fd >= 0 else (0, 0)
        return min(touched + max(0, min(self._growth(self.pid), self.kv_bytes - size)), self.kv_bytes)

    def missing_weights_bytes(self, memory: DeviceMemory) -> int:
        """Weights that are not yet subtracted from `memory.free_bytes`, except those in mapped files; on a GPU all
        weights while loading.
        """
        if not self.is_loading:
            return 0
        loaded = sum(map(self._growth, (self.pid, *self.rank_pids))) if memory.is_lazy else 0
        return max(0, self.weights_bytes - sum(self.mapped_bytes.values()) - loaded)

    def _growth(self, pid: int) -> int:
        """Growth of a process's anonymous memory. A rank begins with about as much as the worker's process."""
        return max(0, anonymous_bytes(pid) - self.anonymous_bytes_before)


class HeldEntry:
    """This process's entry. `release()`, garbage collection or the end of the process releases it."""

    def __init__(self, path: Path, entry: Entry) -> None:
        self.path = path
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
        self.release = weakref.finalize(self, os.close, self._fd)
        fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        self.entry = entry
        self._write()

    def promise(self, kv_bytes: int, usable_bytes: int) -> None:
        """Record that the weights are loaded and `kv_bytes` are promised. Call it under the ledger's lock."""
        before = anonymous_bytes(self.entry.pid)
        self.entry = replace(self.entry, kv_bytes=kv_bytes, usable_bytes=usable_bytes, anonymous_bytes_before=before)
        self._write()

    def add_ranks(self, pids: Sequence[int], kv_fd: int) -> None:
        """Record the worker's other ranks, and the shared memory of their KV. Call it under the ledger's lock."""
        self.entry = replace(self.entry, rank_pids=list(pids), kv_fd=kv_fd)
        self._write()

    def _write(self) -> None:
        os.ftruncate(self._fd, 0)
        os.pwrite(self._fd, json.dumps(asdict(self.entry)).encode(), 0)


class MemoryLedger:
    """The entries of all workers that use the same folder. Methods raise OSError if the folder is not usable."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the ledger's lock: no other process reads or changes the ledger inside the `with` block."""
        fd = os.open(self._folder / _LOCK, os.O_RDONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            yield
        finally:
            os.close(fd)

    def enter(
        self, memory: DeviceMemory, owner: str, weights_bytes: int, mapped_bytes: Mapping[str, int] | None = None
    ) -> HeldEntry:
        """Announce a worker that is about to load its weights."""
        pid = os.getpid()
        mapped = dict(mapped_bytes or {})
        entry = Entry(memory.key, owner, pid, weights_bytes, anonymous_bytes(pid), mapped_bytes=mapped)
        with self.locked():
            return HeldEntry(self._folder / f"{pid}-{secrets.token_hex(4)}{_SUFFIX}", entry)

    def other_entries(self, held: HeldEntry) -> list[Entry]:
        """Entries of other live workers on the device of `held`. Deletes stale files; call it under the lock."""
        paths = [path for path in self._folder.glob(f"*{_SUFFIX}") if path != held.path]
        entries = [entry for path in paths if (entry := _live_entry(path)) is not None]
        return [entry for entry in entries if entry.device == held.entry.device]


def open_ledger(folder: str) -> MemoryLedger:
    """The ledger in `folder`, or, if empty, in this user's default folder. Raises OSError if it is not usable."""
    if folder:
        Path(folder).mkdir(parents=True, exist_ok=True)
        return MemoryLedger(Path(folder))
    shared = Path("/dev/shm")
    default = (shared if shared.is_dir() else Path(tempfile.gettempdir())) / f"tandem-memory-{os.getuid()}"
    default.mkdir(mode=0o700, exist_ok=True)
    status = default.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
        raise PermissionError(f"{default} is not a folder of this user")
    return MemoryLedger(default)


def _live_entry(path: Path) -> Entry | None:
    """The entry of a live worker. The file of a dead worker is deleted."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return _read(os.pread(fd, 1 << 16, 0))
    else:
        path.unlink(missing_ok=True)
        return None
    finally:
        os.close(fd)


def _read(content: bytes) -> Entry | None:
    try:
        return Entry(**json.loads(content))
    except (ValueError, TypeError):  # written by another version
        return None

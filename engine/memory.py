"""Memory of this machine: what a machine, a container or a GPU has, and what each worker has reserved of it.

MemoryLedger is a folder with one file per worker. A worker holds a lock on its file as long as it lives. The system
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
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

from mesh.domain.errors import ConfigurationError

_PROC = Path("/proc")
_CGROUP = Path("/sys/fs/cgroup")
_LOCK = "lock"
_SUFFIX = ".json"


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Current memory of one device. `key` is the same for all processes that share this memory.

    `is_lazy`: a page counts against `free_bytes` when it is first written, not when it is allocated.
    """

    key: str
    total_bytes: int
    free_bytes: int
    is_lazy: bool


@dataclass(frozen=True, slots=True)
class _Limit:
    """File names of a control group's memory limit and use; they differ between cgroup versions 1 and 2."""

    limit: str
    used: str
    reclaimable: str


_VERSIONS = (
    (_CGROUP, "0", _Limit("memory.max", "memory.current", "inactive_file")),
    (_CGROUP / "memory", "memory", _Limit("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")),
)


def device_memory(device: torch.device) -> DeviceMemory:
    """Memory of a GPU; on CPU the memory of the machine, or of the container if its limit is lower.

    Raises ConfigurationError for a device of another type.
    """
    if device.type == "cuda":
        free_bytes, total_bytes = torch.cuda.mem_get_info(device)
        properties = torch.cuda.get_device_properties(device)
        key = f"cuda {getattr(properties, 'uuid', None) or device}"
        return DeviceMemory(key, total_bytes, free_bytes, is_lazy=False)
    if device.type != "cpu":
        raise ConfigurationError(f"the memory of a device of type {device.type!r} is not known: use cpu or cuda")
    total_bytes, free_bytes = _machine_bytes()
    memory = DeviceMemory("cpu", total_bytes, free_bytes, is_lazy=True)
    for folder, names in _groups():
        try:
            memory = _limited(memory, folder, names)
        except (OSError, ValueError):  # this group has no limit
            continue
    return memory


def anonymous_bytes(pid: int) -> int:
    """Memory of a process that is not backed by a file; 0 if the process does not exist or the system has no /proc."""
    try:
        lines = (_PROC / str(pid) / "status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon:"))
    except (OSError, StopIteration):
        return 0


def _machine_bytes() -> tuple[int, int]:
    """Total and available memory; half of the total counts as available where /proc/meminfo cannot be read."""
    try:
        lines = (_PROC / "meminfo").read_text().splitlines()
        sizes = {name: int(value.split()[0]) * 1024 for name, _, value in (line.partition(":") for line in lines)}
        return sizes["MemTotal"], sizes["MemAvailable"]
    except (OSError, KeyError, ValueError):
        total_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        return total_bytes, total_bytes // 2


def _groups() -> Iterator[tuple[Path, _Limit]]:
    """The control groups of this process that may limit memory, innermost first."""
    try:
        entries = [line.split(":", 2) for line in (_PROC / "self" / "cgroup").read_text().splitlines()]
    except OSError:
        return
    for root, controller, names in _VERSIONS:
        for number, controllers, path in entries:
            if controller not in (number, *controllers.split(",")):
                continue
            folder = root / path.strip("/")
            for group in (folder, *folder.parents):
                if group.is_relative_to(root) and (group / names.limit).is_file():
                    yield group, names


def _limited(memory: DeviceMemory, folder: Path, names: _Limit) -> DeviceMemory:
    """`memory`, reduced to the limit of this group. Reclaimable file cache counts as free.

    Raises OSError or ValueError if the group has no limit.
    """
    limit = int((folder / names.limit).read_text())
    if limit >= memory.total_bytes:
        return memory
    stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    used = int((folder / names.used).read_text()) - int(stat.get(names.reclaimable, 0))
    free_bytes = min(memory.free_bytes, max(0, limit - used))
    return DeviceMemory(f"cpu {folder.stat().st_ino}", limit, free_bytes, is_lazy=True)


@dataclass(frozen=True, slots=True)
class Entry:
    """The memory of one worker on a device. `kv_bytes` is 0 until its weights are loaded.

    `anonymous_bytes_before` is the anonymous memory of the process when the entry was made, updated when KV is
    reserved. `usable_bytes` is `Budget.usable_bytes` at the time of the reservation.
    """

    device: str
    owner: str
    pid: int
    weights_bytes: int
    anonymous_bytes_before: int
    kv_bytes: int = 0
    usable_bytes: int = 0

    @property
    def is_loading(self) -> bool:
        """True while weights are loading and KV is not reserved yet."""
        return self.kv_bytes == 0

    def touched_kv_bytes(self, memory: DeviceMemory) -> int:
        """The part of `kv_bytes` that is already subtracted from `memory.free_bytes`; on CPU the process's growth."""
        return min(self._growth(), self.kv_bytes) if memory.is_lazy else self.kv_bytes

    def missing_weights_bytes(self, memory: DeviceMemory) -> int:
        """Weights that are not yet subtracted from `memory.free_bytes`; on a GPU all weights while loading."""
        if not self.is_loading:
            return 0
        return max(0, self.weights_bytes - (self._growth() if memory.is_lazy else 0))

    def _growth(self) -> int:
        return max(0, anonymous_bytes(self.pid) - self.anonymous_bytes_before)


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
        """Record that the weights are loaded and `kv_bytes` are reserved. Call it under the ledger's lock."""
        before = anonymous_bytes(self.entry.pid)
        self.entry = replace(self.entry, kv_bytes=kv_bytes, usable_bytes=usable_bytes, anonymous_bytes_before=before)
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

    def enter(self, memory: DeviceMemory, owner: str, weights_bytes: int) -> HeldEntry:
        """Announce a worker that is about to load its weights."""
        pid = os.getpid()
        entry = Entry(memory.key, owner, pid, weights_bytes, anonymous_bytes(pid))
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

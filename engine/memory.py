"""The memory of a machine, a container or a GPU, and how much of it a process has taken."""

import ctypes
import mmap
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from mesh.domain.errors import ConfigurationError

_PROC = Path("/proc")
_CGROUP = Path("/sys/fs/cgroup")
_STAT_BLOCK_BYTES = 512
_MADV_POPULATE_WRITE = 23  # since Linux 5.14; other systems refuse it
_COMMITTED_AT_ONCE = 2 << 20


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


def shared_bytes(pid: int, fd: int) -> tuple[int, int]:
    """Size of the memory without a name (memfd) that a process has open, and what is taken of it. Zeros if it cannot be
    seen, such as a process of another user.
    """
    try:
        status = (_PROC / str(pid) / "fd" / str(fd)).stat()
    except OSError:
        return 0, 0
    return status.st_size, status.st_blocks * _STAT_BLOCK_BYTES


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


def release_pages(mapped: Tensor) -> None:
    """Take a tensor that is a view of a mapped file out of this process's memory; its pages stay in the page cache. Its
    values must not be used any more.
    """
    if sys.platform != "linux":
        return
    first = -(-mapped.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    num_bytes = (mapped.data_ptr() + mapped.nbytes - first) // mmap.PAGESIZE * mmap.PAGESIZE
    if num_bytes > 0:
        ctypes.CDLL(None).madvise(ctypes.c_void_p(first), ctypes.c_size_t(num_bytes), mmap.MADV_DONTNEED)


def commit_pages(memory: Tensor) -> bool:
    """Let the system commit the pages of a tensor, whose values do not change, so that the first write need not wait
    for it. Other threads may use the tensor. Returns False if this system cannot do so.
    """
    if sys.platform != "linux":
        return False
    madvise, end = ctypes.CDLL(None).madvise, memory.data_ptr() + memory.nbytes
    first = memory.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
    # One huge page at a time: other changes of the process's memory wait for the end of a call.
    for page in range(first, end, _COMMITTED_AT_ONCE):
        num_bytes = min(_COMMITTED_AT_ONCE, end - page)
        if madvise(ctypes.c_void_p(page), ctypes.c_size_t(num_bytes), _MADV_POPULATE_WRITE) != 0:
            return False
    return True


def return_freed_memory() -> None:
    """Give back to the system what was freed between pieces that are in use. glibc keeps it: after the matrices of a
    model of 0.8B have been packed, half a gigabyte. Does nothing with other C libraries.
    """
    if (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
        trim(0)

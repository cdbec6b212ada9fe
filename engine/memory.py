"""How much memory a device has to give."""

import os
from pathlib import Path

import torch

_MEMINFO = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")


def available_bytes(device: torch.device) -> int:
    """Bytes that can still be allocated; on CPU the smaller of the machine's and the container's."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    machine = _machine_bytes()
    container = _container_bytes()
    return machine if container is None else min(machine, container)


def _machine_bytes() -> int:
    try:
        lines = _MEMINFO.read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2


def _container_bytes() -> int | None:
    try:
        limit = (_CGROUP / "memory.max").read_text().strip()
        used = int((_CGROUP / "memory.current").read_text())
    except (OSError, ValueError):
        return None
    return None if limit == "max" else max(0, int(limit) - used)

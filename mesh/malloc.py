"""How this process's memory allocator treats large buffers."""

import ctypes

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # of <malloc.h>
_KEEP_BYTES = 256 << 20
_MMAP_BYTES = 32 << 20  # the most that glibc takes


def keep_freed_memory() -> None:
    """Have glibc keep up to 256 MiB of freed buffers instead of giving each back to the system.

    Messages with KV come and go in megabytes; fresh pages for each cost a third of the CPU time of a transfer through
    gRPC. Other C libraries are left as they are.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_TRIM_THRESHOLD, _KEEP_BYTES)
        mallopt(_MMAP_THRESHOLD, _MMAP_BYTES)

"""Tunes glibc's memory allocator for large buffers."""

import ctypes

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # of <malloc.h>
_KEEP_BYTES = 256 << 20
_MMAP_BYTES = 32 << 20  # glibc's maximum


def keep_freed_memory() -> None:
    """Make glibc keep up to 256 MiB of freed buffers instead of returning each to the system.

    KV messages have megabytes each; new pages for every message take a third of the CPU time of a transfer over gRPC.
    Does nothing with other C libraries.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_TRIM_THRESHOLD, _KEEP_BYTES)
        mallopt(_MMAP_THRESHOLD, _MMAP_BYTES)

"""Instruction sets of this CPU, and Linux's permission to use AMX."""

import ctypes
import sys
from functools import lru_cache
from pathlib import Path

import numpy as np

from engine.kernels.cpu.arguments import Bytes

_CPUINFO = Path("/proc/cpuinfo")
_SYS_ARCH_PRCTL = 158
_ARCH_REQ_XCOMP_PERM = 0x1023
_XFEATURE_XTILEDATA = 18
_NUM_TILES = 8
_TILE_ROWS = 16
_TILE_ROW_BYTES = 64
_VECTORS = frozenset({"avx512f", "avx512bw", "avx512vl"})
_BYTE_VECTORS = frozenset({"avx512_vnni"})


@lru_cache(maxsize=1)
def cpu_flags() -> frozenset[str]:
    """Names of the instruction sets from /proc/cpuinfo; empty on other systems than Linux."""
    try:
        lines = _CPUINFO.read_text().splitlines()
    except OSError:
        return frozenset()
    return frozenset(next((line.split(":")[1].split() for line in lines if line.startswith("flags")), ()))


def why_no_loops(*, int8: bool) -> str | None:
    """The reason why this CPU cannot run the kernels, or None if it can. `int8`: kernels over bytes, too.

    Compiling a kernel on a CPU that lacks an instruction ends the process, so check before.
    """
    missing = (_VECTORS | _BYTE_VECTORS if int8 else _VECTORS) - cpu_flags()
    return f"the CPU has no {', '.join(sorted(missing))}" if missing else None


def knows_amx() -> bool:
    """True if the CPU has AMX for bytes and bf16. The kernel may still forbid it, see `has_amx`."""
    return {"amx_tile", "amx_int8", "amx_bf16"} <= cpu_flags()


def knows_bf16() -> bool:
    """True if the CPU has an instruction that rounds fp32 to bf16."""
    return "avx512_bf16" in cpu_flags()


@lru_cache(maxsize=1)
def has_amx() -> bool:
    """True if the CPU has AMX and Linux grants it. The first call requests the permission for the process."""
    if sys.platform != "linux" or not knows_amx():
        return False
    return ctypes.CDLL(None).syscall(_SYS_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XFEATURE_XTILEDATA) == 0


def amx_shapes() -> Bytes:
    """The tile configuration (palette 1): all registers have 16 rows of 64 bytes. Empty without AMX."""
    if not has_amx():
        return np.empty(0, np.uint8)
    shapes = np.zeros(64, np.uint8)
    shapes[0] = 1
    shapes[16 : 16 + 2 * _NUM_TILES : 2] = _TILE_ROW_BYTES
    shapes[48 : 48 + _NUM_TILES] = _TILE_ROWS
    return shapes

"""Facts of the machine: sizes of vectors and tiles that several kernels share, and the instruction sets of this CPU.

Vectors are those of AVX-512. On a CPU with AVX2 only, LLVM computes them in two halves. AMX also needs Linux's
permission, see `has_amx`. Kernels use no more of the CPU than the variable ONEDNN_MAX_CPU_ISA allows, as oneDNN does.
"""

import ctypes
import os
import platform
import sys
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

FLOAT_BYTES = 4
HALF_BYTES = 2
"""Bytes of a number in fp16 or bf16."""
SLOT_BYTES = 8
"""Bytes of a number of a slot in the cache."""
VECTOR_BYTES = 64
CACHE_LINE_BYTES = 64
LANES = 16
"""fp32 or int32 numbers in a vector."""
QUAD = 4
"""Bytes that one VNNI instruction multiplies and adds up in one lane."""
PAIR = 2
"""bf16 inputs that one instruction multiplies and adds up in one lane."""
FP8_FACTOR = 256.0
"""A number of fp8 (e4m3) divided by the fp16 number whose bits follow from its own by a shift."""
KEYS = 16
"""Tokens of a KV segment: one score of each fills a vector. Block sizes and head_dim are multiples of it."""
PANEL = 16
"""Columns of a panel of packed weights."""
UNIT = 2 * PANEL
"""Columns of a unit: a thread's part of a product is a number of whole units."""
TILE_ROWS = 32
"""Maximum rows of a product's tile. Kernels may read this many rows past the last row of an operand."""
QUERY_TILE_ROWS = 12
"""Queries of a prompt that are multiplied at once in fp32."""
KEY_TILE = 2 * KEYS
"""Keys that are multiplied at once with a tile of queries."""
AMX_QUERY_ROWS = 32
"""Queries of a prompt that AMX multiplies at once: two of its tiles."""
SPLIT = 1024
"""Tokens of a sequence that are one part of decode attention; see decode.py. A multiple of KEYS."""
AMX_DEPTH = 32
"""bf16 numbers in a row of an AMX tile; head_dim must be a multiple of it."""
AMX_TILE_ROWS = 16
"""Rows of an AMX tile."""
AMX_TILE_ROW_BYTES = 64
"""Bytes of such a row."""
SUM_HEADS = 8
"""Heads that share one read of a row that is the value of all of them."""
_BLOCK_NUMBERS = 2**15
_MAX_BLOCK_KEYS = 512

INT4_GROUPS, MINIMA_GROUP = (32, 64, 128), 32
"""Inputs that may share a scale in int4, and those that share a minimum."""
NUM_KINDS = 6
FOUR_BITS, MXFP4, EIGHT_BITS, STEPS, NF4, WITH_MINIMA = range(NUM_KINDS)
"""Kinds of numbers of matrices in a model in int4: integers of 4 bits, levels of MXFP4 or NF4, or integers of 8 bits;
or, if all matrices have them, steps of int8; or integers of 4 bits whose groups have minima.
"""
STEP_GROUP, MAX_STEP = 32, 17
"""Inputs that share a step of int8, and the largest step: 15 of them are 255."""
ZERO_BITS = 4
MAX_ZERO = 2**ZERO_BITS
"""The largest zero of weights of 4 bits."""
BLOCK_HEAD_BYTES = 8
"""Bytes of a block of activations, in int4, before these."""
EIGHT_BITS_ZERO = 128
"""The zero of weights of 8 bits beside int4."""
IN_FP32, IN_BF16 = 0, 1
"""Forms in which a model in fp8 has units of columns that are not fp8; the form of others is the number of inputs that
share a scale.
"""
INT8_LEVELS = 127.0
"""Largest magnitude of a quantised number."""
ZERO_POINT = 128
"""The unsigned byte that stands for 0 in quantised activations."""
SHORTS_ORDER = (0, 2, 1, 3)
"""How four quantised activations lie as signed numbers of two bytes, which they are on CPUs without VNNI: bytes 0 and 2
of a lane of weights are widened together, then 1 and 3.
"""
SIGN_BITS = 0x80
"""Makes of a signed byte the unsigned one that is 128 more, by exclusive or."""
FACTOR_AT = 2 * KEYS
"""Where the factor of 16 weights that were rounded to two bytes lies: behind them."""
MAX_SHORTS = 512
"""Numbers of 16 bits whose products with bytes add up in 32 bits."""
LIMBS_TAIL_BYTES = 64
"""Bytes behind a query that was split into two bytes a number: what the keys' zero point adds to each sum."""
LOG2_E = 1.4426950408889634


def keys_at_once(head_dim: int) -> int:
    """Keys and values of a prompt that are packed at once, in fp32 up to 256 KiB: they stay in a core's L2 cache."""
    return min(_MAX_BLOCK_KEYS, max(KEY_TILE, _BLOCK_NUMBERS // head_dim // KEY_TILE * KEY_TILE))


_CPUINFO = Path("/proc/cpuinfo")
_SYS_ARCH_PRCTL = 158
_ARCH_REQ_XCOMP_PERM = 0x1023
_XFEATURE_XTILEDATA = 18
_NUM_TILES = 8
_X86_64 = "x86_64", "AMD64"
_LEAST = frozenset({"avx2", "f16c", "fma"})
_AVX512 = frozenset({"avx512f", "avx512bw", "avx512vl"})


LIMIT_NAME = "ONEDNN_MAX_CPU_ISA"
_FROM_AVX512_ON = ("avx512", "avx10", "amx")
_LATER_AVX2 = ("avxvnniint", "avxneconvert", "avxifma")
_LIMITS: dict[str, tuple[str, ...]] = {
    "SSE41": ("avx", "fma", "f16c", "amx"),
    "AVX": ("avx2", "avxvnni", "fma", *_LATER_AVX2, *_FROM_AVX512_ON),
    "AVX2": ("avxvnni", *_LATER_AVX2, *_FROM_AVX512_ON),
    "AVX2_VNNI": (*_LATER_AVX2, *_FROM_AVX512_ON),
    "AVX512_CORE": ("avx512vnni", "avx512bf16", "avx512fp16", "avxvnni", *_LATER_AVX2, "avx10", "amx"),
    "AVX512_CORE_VNNI": ("avx512bf16", "avx512fp16", "avx10", "amx"),
    "AVX512_CORE_BF16": ("avx512fp16", "avx10", "amx"),
    "AVX512_CORE_FP16": ("avx10", "amx"),
    "AVX10_1_512": ("avx10.2", "amx"),
    "AVX512_CORE_AMX": (),
    "AVX10_1_512_AMX": (),
    "ALL": (),
    "DEFAULT": (),
    "": (),
}
"""For each limit: beginnings of the names of the instruction sets that it forbids, written without "_" and "-"."""


def _isa_limit() -> str:
    return os.environ.get(LIMIT_NAME, "").upper()


def is_allowed(instruction_set: str) -> bool:
    """True if the kernels may use an instruction set, should the CPU have it. Linux's and LLVM's names will do."""
    return not instruction_set.replace("_", "").replace("-", "").startswith(_LIMITS.get(_isa_limit(), ()))


@lru_cache(maxsize=1)
def cpu_flags() -> frozenset[str]:
    """Names of the allowed instruction sets from /proc/cpuinfo; empty on other systems than Linux."""
    try:
        lines = _CPUINFO.read_text().splitlines()
    except OSError:
        return frozenset()
    flags: Iterable[str] = next((line.split(":")[1].split() for line in lines if line.startswith("flags")), ())
    return frozenset(filter(is_allowed, flags))


def why_no_loops() -> str | None:
    """The reason why this CPU cannot run the kernels, or None if it can.

    Compiling a kernel on a CPU that lacks an instruction ends the process, so check before.
    """
    if _isa_limit() not in _LIMITS:
        return f"{LIMIT_NAME} is {_isa_limit()}, not one of {', '.join(filter(None, _LIMITS))}"
    if (architecture := platform.machine()) not in _X86_64:  # emulated, such a process sees the flags of an x86 CPU
        return f"the CPU is {architecture}, not x86-64"
    missing = _LEAST - cpu_flags()
    return f"the CPU has no {', '.join(sorted(missing))}" if missing else None


def knows_avx512() -> bool:
    """True if the CPU computes whole vectors, and has 32 registers for them. Otherwise it has 16 for halves."""
    return cpu_flags() >= _AVX512


def widens_ahead() -> bool:
    """True if weights that are multiplied as fp32 but stored in less are widened once for all tiles of many rows.

    With AVX-512 each tile widens them beside its products.
    """
    return not knows_avx512()


def knows_vnni() -> bool:
    """True if the CPU multiplies bytes and adds up four products in one instruction, for vectors of its size."""
    return ("avx512_vnni" if knows_avx512() else "avx_vnni") in cpu_flags()


def knows_amx() -> bool:
    """True if the CPU has AMX for bytes and bf16. The kernel may still forbid it, see `has_amx`."""
    return {"amx_tile", "amx_int8", "amx_bf16"} <= cpu_flags()


def outruns_memory() -> bool:
    """True if a core multiplies weights with eight rows well before it gets the next ones, as Zen 5 does. It is known
    by two sets of instructions that no other CPU has together.
    """
    return knows_avx512() and {"avx_vnni", "avx512_vp2intersect"} <= cpu_flags()


def knows_bf16() -> bool:
    """True if the CPU has instructions for bf16: they round fp32, and multiply and add up pairs."""
    return "avx512_bf16" in cpu_flags()


def abilities() -> tuple[bool, ...]:
    """All of the CPU that decides what code is written."""
    return knows_avx512(), knows_vnni(), knows_bf16(), knows_amx(), outruns_memory()


@lru_cache(maxsize=1)
def has_amx() -> bool:
    """True if the CPU has AMX and Linux grants it. The first call requests the permission for the process."""
    if sys.platform != "linux" or not knows_amx():
        return False
    return ctypes.CDLL(None).syscall(_SYS_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XFEATURE_XTILEDATA) == 0


def multiplies_bf16() -> bool:
    """True if prompts can attend in bf16: with AMX's tiles on a CPU that has them, else with vectors."""
    return has_amx() if knows_amx() else knows_bf16() and knows_avx512()


def amx_shapes() -> NDArray[np.uint8]:
    """The tile configuration (palette 1): all registers have 16 rows of 64 bytes. Empty without AMX."""
    if not has_amx():
        return np.empty(0, np.uint8)
    shapes = np.zeros(64, np.uint8)
    shapes[0] = 1
    shapes[16 : 16 + 2 * _NUM_TILES : 2] = AMX_TILE_ROW_BYTES
    shapes[48 : 48 + _NUM_TILES] = AMX_TILE_ROWS
    return shapes

"""Copies scattered pieces of KV into one payload, or back, and computes the payload's XXH3-64 in the same pass.

Each byte is read once, so the checksum is that of the bytes that were written, whatever happens to the source
meanwhile. The hash is the 64-bit XXH3 of inputs longer than 240 bytes (github.com/Cyan4973/xxHash,
doc/xxhash_spec.md): eight sums take up a stripe of 64 bytes at a time, each stripe with another part of a secret, and
are scrambled after every 16 stripes. The last stripe is taken up with a part of its own.
"""

from functools import cache
from typing import NamedTuple

import numpy as np
from llvmlite import ir
from numba import types

from engine.kernels.cpu.arguments import Address, Bytes, Int64s, UInt64s
from engine.kernels.cpu.compilation.compiler import entry, jit
from engine.kernels.cpu.compilation.emitter import (
    INT32,
    INT64,
    VOID,
    Builder,
    CodeContext,
    Emitter,
    Intrinsic,
    NumbaType,
    Signature,
    TypingContext,
    Value,
    Values,
    emitted,
)
from engine.kernels.cpu.machine import why_no_loops
from engine.kernels.cpu.vectors import address

STRIPE_BYTES = 64
_STRIPES_PER_BLOCK = 16
_MIN_BYTES = 1024
_NUM_SUMS = 8
_SUMS = ir.VectorType(INT64, _NUM_SUMS)
_SECRET_BYTES = 192
_SCRAMBLE_SECRET = _SECRET_BYTES - STRIPE_BYTES
_LAST_SECRET = _SECRET_BYTES - STRIPE_BYTES - 7
_MERGE_SECRET = 11
_AHEAD_BYTES = 12 << 10
"""Memory is asked for this far ahead, into the L2 cache and in the next pieces too: the CPU's own prefetch stops at a
piece's end."""
_PRIMES32 = 0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D
_PRIMES64 = 0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0x85EBCA77C2B2AE63, 0x27D4EB2F165667C5
_FIRST_SUMS = np.array([_PRIMES32[2], *_PRIMES64[:4], _PRIMES32[1], _PRIMES64[4], _PRIMES32[0]], np.uint64)
_PRIME, _AVALANCHE = np.uint64(_PRIMES64[0]), np.uint64(0x165667919E3779F9)
_HALF, _LOW_HALF = np.uint64(32), np.uint64(2**32 - 1)
_MERGE_WORD, _MERGE_SHIFT = divmod(_MERGE_SECRET, 8)
_RIGHT, _LEFT = np.uint64(8 * _MERGE_SHIFT), np.uint64(64 - 8 * _MERGE_SHIFT)
_SECRET = np.frombuffer(
    bytes.fromhex(
        "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671fcb79e64eccc0e578825ad07dccff7221"
        "b8084674f743248ee03590e6813a264c3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8"
        "a8fa763fe39c343ff9dcbbc7c70b4f1d8a51e04bcdb45931c89f7ec9d9787364eac5ac8334d3ebc3c581a0fffa1363eb"
        "170ddd51b7f0da49d316552629d4689e2b16be587d47a1fc8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e"
    ),
    np.uint64,
)
_NUM_SECRETS = len(_SECRET)


class Pieces(NamedTuple):
    """The pieces of KV that follow each other in a payload: of each layer, plane and block, `num_units` of `num_bytes`.
    Strides are in bytes."""

    first: Address
    num_layers: int
    layer_stride: int
    num_planes: int
    plane_stride: int
    block_stride: int
    num_units: int
    unit_stride: int
    num_bytes: int


def _words(value: int) -> Value:
    return ir.Constant(_SUMS, [value] * _NUM_SUMS)


@emitted
def _copy_stripes(
    typing: TypingContext,
    source: NumbaType,
    target: NumbaType,
    num_stripes: NumbaType,
    secret: NumbaType,
    sums: NumbaType,
    past_cache: NumbaType,
    ahead: NumbaType,
) -> Intrinsic:
    """Copy stripes, at least one and at most a block's rest, and add them to `sums`. `secret` is that of the first. If
    `past_cache`, stores do not fetch the target into the cache, and it must be aligned to a stripe. The same number of
    stripes is prefetched from `ahead` on."""

    def generate(context: CodeContext, builder: Builder, signature: Signature, args: Values) -> Value:
        emit = Emitter(context, builder)
        source_at, target_at, secret_at, sums_at, ahead_at = (emit.pointer(args[i]) for i in (0, 1, 3, 4, 6))
        swap = ir.Constant(ir.VectorType(INT32, _NUM_SUMS), [1, 0, 3, 2, 5, 4, 7, 6])

        def emit_loop(*, streamed: bool) -> None:
            with emit.loop(args[2], [emit.load(sums_at, _SUMS, 8)]) as loop:
                offset = builder.mul(loop.index, INT64(STRIPE_BYTES))
                stripe = emit.load(emit.at(source_at, offset), _SUMS, 1)
                emit.prefetch(emit.at(ahead_at, offset), to_l2=True)
                at = builder.bitcast(emit.at(target_at, offset), _SUMS.as_pointer())
                store = builder.store(stripe, at, align=STRIPE_BYTES if streamed else 1)
                if streamed:
                    store.set_metadata("nontemporal", builder.module.add_metadata([INT32(1)]))
                part = emit.load(emit.at(secret_at, builder.mul(loop.index, INT64(8))), _SUMS, 1)
                key = builder.xor(stripe, part)
                product = builder.mul(builder.and_(key, _words(2**32 - 1)), builder.lshr(key, _words(32)))
                swapped = builder.shuffle_vector(stripe, stripe, swap)
                loop.next.append(builder.add(loop.carried[0], builder.add(product, swapped)))
            emit.store(loop.next[0], sums_at, 8)

        with builder.if_else(builder.icmp_signed("!=", args[5], INT64(0))) as (past, through):
            with past:
                emit_loop(streamed=True)
            with through:
                emit_loop(streamed=False)
        return context.get_dummy_value()

    return types.void(*[types.intp] * 7), generate


@emitted
def _scramble(typing: TypingContext, secret: NumbaType, sums: NumbaType) -> Intrinsic:
    """Scramble `sums` with the eight words of `secret`. (As single words they would come back from memory, behind all
    copies before them.)"""

    def generate(context: CodeContext, builder: Builder, signature: Signature, args: Values) -> Value:
        emit = Emitter(context, builder)
        sums_at = emit.pointer(args[1])
        old = emit.load(sums_at, _SUMS, 8)
        mixed = builder.xor(old, builder.lshr(old, _words(47)))
        keyed = builder.xor(mixed, emit.load(emit.pointer(args[0]), _SUMS, 8))
        emit.store(builder.mul(keyed, _words(_PRIMES32[0])), sums_at, 8)
        return context.get_dummy_value()

    return types.void(types.intp, types.intp), generate


@emitted
def _end_streamed_stores(typing: TypingContext) -> Intrinsic:
    """Make stores past the cache visible to other threads."""

    def generate(context: CodeContext, builder: Builder, signature: Signature, args: Values) -> Value:
        Emitter(context, builder).call("llvm.x86.sse.sfence", VOID)
        return context.get_dummy_value()

    return types.void(), generate


@jit
def _list_pieces(pieces: Pieces, block_ids: Int64s, addresses: Int64s) -> None:
    number = 0
    for layer in range(pieces.num_layers):
        for plane in range(pieces.num_planes):
            start = pieces.first + layer * pieces.layer_stride + plane * pieces.plane_stride
            for block in range(len(block_ids)):
                for unit in range(pieces.num_units):
                    addresses[number] = start + block_ids[block] * pieces.block_stride + unit * pieces.unit_stride
                    number += 1


@jit
def _folded(left: np.uint64, right: np.uint64) -> np.uint64:
    """The halves of the 128-bit product, xored."""
    low = (left & _LOW_HALF) * (right & _LOW_HALF)
    cross = (left >> _HALF) * (right & _LOW_HALF)
    other = (left & _LOW_HALF) * (right >> _HALF)
    middle = (low >> _HALF) + (cross & _LOW_HALF) + (other & _LOW_HALF)
    high = (left >> _HALF) * (right >> _HALF) + (cross >> _HALF) + (other >> _HALF) + (middle >> _HALF)
    return high ^ ((middle << _HALF) | (low & _LOW_HALF))


@jit
def _digest(secret: UInt64s, sums: UInt64s, num_bytes: int) -> np.uint64:
    total = np.uint64(num_bytes) * _PRIME
    for pair in range(_NUM_SUMS // 2):
        at = _MERGE_WORD + 2 * pair
        left = (secret[at] >> _RIGHT) | (secret[at + 1] << _LEFT)
        right = (secret[at + 1] >> _RIGHT) | (secret[at + 2] << _LEFT)
        total += _folded(sums[2 * pair] ^ left, sums[2 * pair + 1] ^ right)
    total = (total ^ (total >> np.uint64(37))) * _AVALANCHE
    return total ^ (total >> _HALF)


@entry
def _copy(
    pieces: Pieces, block_ids: Int64s, addresses: Int64s, payload: Address, words: UInt64s, to_pieces: int
) -> np.uint64:
    """Copy between pieces and a payload, in order; returns the payload's hash. `addresses`, one for each piece, and
    `words` are scratch; the last of `words` is the seed."""
    seed, secret, sums = words[-1], words[:_NUM_SECRETS], words[_NUM_SECRETS : _NUM_SECRETS + _NUM_SUMS]
    for number in range(0, _NUM_SECRETS, 2):
        secret[number], secret[number + 1] = _SECRET[number] + seed, _SECRET[number + 1] - seed
    sums[:] = _FIRST_SUMS
    _list_pieces(pieces, block_ids, addresses)
    secret_at, sums_at = address(secret), address(sums)
    per_piece, last_piece = pieces.num_bytes // STRIPE_BYTES, len(addresses) - 1
    ahead_pieces, ahead_bytes = divmod(_AHEAD_BYTES, pieces.num_bytes)
    past_cache = payload % STRIPE_BYTES == 0  # a slot's lines may still be in the caches of its last reader
    total, done = len(addresses) * per_piece, 0
    for number in range(len(addresses)):
        start, end = done, done + per_piece
        while done < end:
            phase = done % _STRIPES_PER_BLOCK
            if phase == 0 and done:
                _scramble(secret_at + _SCRAMBLE_SECRET, sums_at)
            is_last = done == total - 1
            count = 1 if is_last else min(end - done, _STRIPES_PER_BLOCK - phase, total - 1 - done)
            part = secret_at + (_LAST_SECRET if is_last else 8 * phase)
            piece = addresses[number] + (done - start) * STRIPE_BYTES
            if to_pieces:
                _copy_stripes(payload, piece, count, part, sums_at, 1, payload + _AHEAD_BYTES)
            else:
                offset = (done - start) * STRIPE_BYTES + ahead_bytes
                is_beyond = offset >= pieces.num_bytes
                ahead = addresses[min(number + ahead_pieces + is_beyond, last_piece)] + offset
                _copy_stripes(piece, payload, count, part, sums_at, past_cache, ahead - is_beyond * pieces.num_bytes)
            done += count
            payload += count * STRIPE_BYTES
    _end_streamed_stores()
    return _digest(secret, sums, total * STRIPE_BYTES)


def can_copy(pieces: Pieces, num_blocks: int) -> bool:
    """True if `gather` and `scatter` can copy these pieces, and this CPU runs kernels."""
    strides = pieces.layer_stride | pieces.plane_stride | pieces.block_stride | pieces.unit_stride
    is_whole = (pieces.first | strides | pieces.num_bytes) % STRIPE_BYTES == 0
    return is_whole and _payload_bytes(pieces, num_blocks) >= _MIN_BYTES and why_no_loops() is None


def gather(pieces: Pieces, block_ids: Int64s, payload: Bytes, seed: int) -> int:
    """Copy the pieces of these blocks into the payload; returns the payload's XXH3-64. Raises ValueError if it cannot
    be written or has another size."""
    if not payload.flags.writeable:
        raise ValueError("the payload is read-only")
    return _copied(pieces, block_ids, payload, seed, to_pieces=False)


def scatter(pieces: Pieces, block_ids: Int64s, payload: Bytes, seed: int) -> int:
    """Copy the payload into the pieces of these blocks, past the cache; returns the XXH3-64 of what was written. Raises
    ValueError if the payload has another size."""
    return _copied(pieces, block_ids, payload, seed, to_pieces=True)


@cache
def prepare() -> None:
    """Compile the kernel now, or load it, so that the first transfer does not wait for it."""
    if why_no_loops() is None:
        memory = np.zeros(2 * _MIN_BYTES, np.uint8)
        pieces = Pieces(memory.ctypes.data, 1, 0, 1, 0, 0, 1, 0, _MIN_BYTES)
        gather(pieces, np.zeros(1, np.int64), memory[_MIN_BYTES:], 0)


def _copied(pieces: Pieces, block_ids: Int64s, payload: Bytes, seed: int, *, to_pieces: bool) -> int:
    if len(payload) != (num_bytes := _payload_bytes(pieces, len(block_ids))):
        raise ValueError(f"a payload of {len(payload)} bytes instead of {num_bytes}")
    addresses = np.empty(num_bytes // pieces.num_bytes, np.int64)
    words = np.empty(_NUM_SECRETS + _NUM_SUMS + 1, np.uint64)
    words[-1] = seed
    return int(_copy(pieces, block_ids, addresses, payload.ctypes.data, words, int(to_pieces)))


def _payload_bytes(pieces: Pieces, num_blocks: int) -> int:
    return pieces.num_layers * pieces.num_planes * num_blocks * pieces.num_units * pieces.num_bytes

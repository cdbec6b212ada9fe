"""Copies scattered pieces of KV into one payload, or back, and computes the payload's XXH3-64 in the same pass.

Each byte is read once, so the checksum is that of the bytes that were written, whatever happens to the source
meanwhile. The hash is the 64-bit XXH3 of inputs longer than 240 bytes (github.com/Cyan4973/xxHash,
doc/xxhash_spec.md): eight sums take up a stripe of 64 bytes at a time, each stripe with another part of a secret, and
are scrambled after every 16 stripes. The last stripe is taken up with a part of its own.
"""

from functools import cache

import numpy as np
from llvmlite import ir
from numba import types

from engine.kernels.cpu.arguments import Address, Bytes, Int64s, UInt64s
from engine.kernels.cpu.buffers import aligned
from engine.kernels.cpu.compiler import (
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
    entry,
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
_AHEAD_BYTES = 1024
"""Memory is asked for this far ahead, in the next piece too: the CPU's own prefetch stops at a piece's end."""
_MASK = 2**64 - 1
_PRIMES32 = 0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D
_PRIMES64 = 0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0x85EBCA77C2B2AE63, 0x27D4EB2F165667C5
_FIRST_SUMS = np.array([_PRIMES32[2], *_PRIMES64[:4], _PRIMES32[1], _PRIMES64[4], _PRIMES32[0]], np.uint64)
_AVALANCHE = 0x165667919E3779F9
_SECRET = bytes.fromhex(
    "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671fcb79e64eccc0e578825ad07dccff7221"
    "b8084674f743248ee03590e6813a264c3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8"
    "a8fa763fe39c343ff9dcbbc7c70b4f1d8a51e04bcdb45931c89f7ec9d9787364eac5ac8334d3ebc3c581a0fffa1363eb"
    "170ddd51b7f0da49d316552629d4689e2b16be587d47a1fc8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e"
)


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
                emit.prefetch(emit.at(ahead_at, offset))
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


@entry
def _copy_pieces(
    pieces: Int64s, stripes_per_piece: int, payload: Address, secret: UInt64s, sums: UInt64s, to_pieces: int
) -> None:
    """Copy between `pieces` (addresses) and a payload, in order, and leave the sums of all stripes in `sums`."""
    secret_at, sums_at = address(secret), address(sums)
    total, done = len(pieces) * stripes_per_piece, 0
    for number in range(len(pieces)):
        piece = pieces[number]
        end = done + stripes_per_piece
        while done < end:
            phase = done % _STRIPES_PER_BLOCK
            if phase == 0 and done:
                _scramble(secret_at + _SCRAMBLE_SECRET, sums_at)
            is_last = done == total - 1
            count = 1 if is_last else min(end - done, _STRIPES_PER_BLOCK - phase, total - 1 - done)
            part = secret_at + (_LAST_SECRET if is_last else 8 * phase)
            if to_pieces:
                _copy_stripes(payload, piece, count, part, sums_at, to_pieces, payload + _AHEAD_BYTES)
            else:
                offset = _AHEAD_BYTES - (end - done) * STRIPE_BYTES  # in the next piece, unless it is in this one
                ahead = piece + _AHEAD_BYTES if offset < 0 else pieces[min(number + 1, len(pieces) - 1)] + offset
                _copy_stripes(piece, payload, count, part, sums_at, to_pieces, ahead)
            done += count
            piece += count * STRIPE_BYTES
            payload += count * STRIPE_BYTES
    if to_pieces:
        _end_streamed_stores()


def can_copy(pieces: Int64s, piece_bytes: int) -> bool:
    """True if `gather` and `scatter` can copy pieces of this size at these addresses, and this CPU runs kernels."""
    is_whole = piece_bytes % STRIPE_BYTES == 0 and not (pieces % STRIPE_BYTES).any()
    return is_whole and len(pieces) * piece_bytes >= _MIN_BYTES and why_no_loops() is None


def gather(pieces: Int64s, piece_bytes: int, payload: Bytes, seed: int) -> int:
    """Copy the pieces into the payload; returns the payload's XXH3-64. Raises ValueError if it cannot be written or has
    another size."""
    if not payload.flags.writeable:
        raise ValueError("the payload is read-only")
    return _copy(pieces, piece_bytes, payload, seed, to_pieces=False)


def scatter(pieces: Int64s, piece_bytes: int, payload: Bytes, seed: int) -> int:
    """Copy the payload into the pieces, past the cache; returns the XXH3-64 of what was written. Raises ValueError if
    the payload has another size."""
    return _copy(pieces, piece_bytes, payload, seed, to_pieces=True)


@cache
def prepare() -> None:
    """Compile the kernel now, or load it, so that the first transfer does not wait for it."""
    if why_no_loops() is None:
        memory = aligned(2 * _MIN_BYTES, np.uint8)
        gather(np.array([memory.ctypes.data]), _MIN_BYTES, memory[_MIN_BYTES:], 0)


def _copy(pieces: Int64s, piece_bytes: int, payload: Bytes, seed: int, *, to_pieces: bool) -> int:
    if len(payload) != len(pieces) * piece_bytes:
        raise ValueError(f"a payload of {len(payload)} bytes for {len(pieces)} pieces of {piece_bytes}")
    secret, sums = _seeded_secret(seed), _FIRST_SUMS.copy()
    _copy_pieces(pieces, piece_bytes // STRIPE_BYTES, payload.ctypes.data, secret, sums, int(to_pieces))
    return _digest(sums, secret, len(payload))


def _seeded_secret(seed: int) -> UInt64s:
    words = np.frombuffer(_SECRET, np.uint64).copy()
    words[0::2] += np.uint64(seed)
    words[1::2] -= np.uint64(seed)
    return words


def _digest(sums: UInt64s, secret: UInt64s, num_bytes: int) -> int:
    words = np.frombuffer(secret.tobytes()[_MERGE_SECRET : _MERGE_SECRET + STRIPE_BYTES], np.uint64)
    keys = [int(key) for key in sums ^ words]
    total = num_bytes * _PRIMES64[0]
    for left, right in zip(keys[0::2], keys[1::2], strict=True):
        product = left * right
        total += (product & _MASK) ^ (product >> 64)
    total &= _MASK
    total ^= total >> 37
    total = total * _AVALANCHE & _MASK
    return total ^ (total >> 32)

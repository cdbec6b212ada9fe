"""Checksums that tie a chunk to its transfer and its range.

A chunk's xxh3-64 is seeded with a hash of transfer id, attempt, sequence number, the ranges of blocks, layers and
heads, and length. Correct bytes of another transfer, attempt or range therefore fail verification. This guards against
faults, not against a malicious sender: senders are authenticated.
"""

import struct

import xxhash

from kvtransfer.chunks import ChunkRange

_RANGE = struct.Struct("<QQQQQQQQ")
_FOLD = struct.Struct("<QQ")


def transfer_seed(transfer_id: str, attempt: int) -> int:
    """Return the seed that makes the checksums of one transfer differ from those of all others."""
    return xxhash.xxh3_64_intdigest(transfer_id.encode(), seed=attempt)


def chunk_checksum(seed: int, sequence_number: int, chunk_range: ChunkRange, payload: bytes | memoryview) -> int:
    """Return the checksum of one chunk; `seed` is the transfer's. Releases the GIL while it reads the payload."""
    return xxhash.xxh3_64_intdigest(payload, seed=_chunk_seed(seed, sequence_number, chunk_range, len(payload)))


def chunk_hasher(seed: int, sequence_number: int, chunk_range: ChunkRange, num_bytes: int) -> xxhash.xxh3_64:
    """Return a hasher for a payload in parts: call `update` with each part, then `intdigest` for the checksum."""
    return xxhash.xxh3_64(seed=_chunk_seed(seed, sequence_number, chunk_range, num_bytes))


def _chunk_seed(seed: int, sequence_number: int, chunk_range: ChunkRange, num_bytes: int) -> int:
    axes = (chunk_range.blocks, chunk_range.span.layers, chunk_range.span.heads)
    bounds = [number for axis in axes for number in (axis.first, axis.count)]
    identity = _RANGE.pack(sequence_number, *bounds, num_bytes)
    return xxhash.xxh3_64_intdigest(identity, seed=seed)


class Digest:
    """A hash over the checksums of a transfer's chunks, in sequence order."""

    def __init__(self) -> None:
        self.value = 0

    def add(self, checksum: int) -> None:
        """Add the checksum of the next chunk."""
        self.value = xxhash.xxh3_64_intdigest(_FOLD.pack(self.value, checksum))

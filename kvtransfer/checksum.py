"""Checksums that hold a chunk to its transfer and its place.

The seed of a chunk's xxh3-64 is itself a hash of transfer id, attempt, sequence number, block range, layer range and
length. So bytes that are right, but belong to another transfer, attempt or place, do not verify. This guards against
faults and mix-ups, not against a malicious sender: senders are authenticated.
"""

import struct

import xxhash

from kvtransfer.chunks import ChunkRange

_PLACE = struct.Struct("<QQQQQQ")
_FOLD = struct.Struct("<QQ")


def transfer_seed(transfer_id: str, attempt: int) -> int:
    """What makes the checksums of one transfer differ from all others'."""
    return xxhash.xxh3_64_intdigest(transfer_id.encode(), seed=attempt)


def chunk_checksum(seed: int, sequence_number: int, place: ChunkRange, payload: bytes | memoryview) -> int:
    """Checksum of one chunk; `seed` is its transfer's. Releases the GIL while it reads the payload."""
    return xxhash.xxh3_64_intdigest(payload, seed=_chunk_seed(seed, sequence_number, place, len(payload)))


def chunk_hasher(seed: int, sequence_number: int, place: ChunkRange, num_bytes: int) -> xxhash.xxh3_64:
    """The same for a payload that comes in parts: `update` with each, then `intdigest`."""
    return xxhash.xxh3_64(seed=_chunk_seed(seed, sequence_number, place, num_bytes))


def _chunk_seed(seed: int, sequence_number: int, place: ChunkRange, num_bytes: int) -> int:
    identity = _PLACE.pack(
        sequence_number, place.first_block, place.num_blocks, place.first_layer, place.num_layers, num_bytes
    )
    return xxhash.xxh3_64_intdigest(identity, seed=seed)


class Digest:
    """Fold of a transfer's chunk checksums, in sequence order."""

    def __init__(self) -> None:
        self.value = 0

    def add(self, checksum: int) -> None:
        """Fold in the next chunk's checksum."""
        self.value = xxhash.xxh3_64_intdigest(_FOLD.pack(self.value, checksum))

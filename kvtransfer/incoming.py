"""The rules of one transfer on its way in: pure checks, no I/O. `receiver.py` moves the bytes."""

from collections.abc import Iterable
from dataclasses import dataclass

from kvtransfer.checksum import Digest, chunk_checksum, chunk_hasher, transfer_seed
from kvtransfer.chunks import ChunkRange, Coverage
from kvtransfer.messages import Chunk, Commit, TransferOpen
from mesh.domain.errors import TransferCorrupt, TransferFailed
from mesh.domain.kv import KVLayout
from mesh.rpc.server import MAX_MESSAGE_BYTES


@dataclass(frozen=True, slots=True)
class Reservation:
    """Blocks a decode worker keeps for a transfer. `block_ids` covers all positions of the prompt.

    Positions before `first_block` hold the right KV already and are never written.
    """

    transfer_id: str
    attempt: int
    block_ids: tuple[int, ...]
    first_block: int
    num_tokens: int


class IncomingTransfer:
    """What has been promised, what has arrived, and whether the next message is allowed."""

    def __init__(self, reservation: Reservation, layout: KVLayout) -> None:
        num_blocks = len(reservation.block_ids)
        if num_blocks != layout.num_blocks_for(reservation.num_tokens):
            raise ValueError(f"{num_blocks} blocks are reserved for {reservation.num_tokens} tokens")
        if not 0 <= reservation.first_block <= num_blocks:
            raise ValueError(f"first_block {reservation.first_block} is outside of {num_blocks} blocks")
        self.reservation = reservation
        self.num_bytes = 0
        self._layout = layout
        self._seed = transfer_seed(reservation.transfer_id, reservation.attempt)
        self._coverage = Coverage(layout.num_layers, reservation.first_block, num_blocks)
        self._digest = Digest()
        self._num_chunks = 0
        self._num_unacknowledged = 0

    def check_open(self, opening: TransferOpen) -> None:
        """Raises LayoutMismatch that names both values, or TransferFailed if the sender means other blocks."""
        self._layout.require_same(opening.layout)
        expected = (self.reservation.first_block, len(self.reservation.block_ids))
        if (opening.first_block, opening.num_blocks) != expected:
            raise TransferFailed(
                f"blocks [{expected[0]}, {expected[1]}) are reserved, "
                f"the sender means [{opening.first_block}, {opening.num_blocks})"
            )

    def accept(self, chunk: Chunk, credit: int) -> None:
        """Count `chunk` in before its payload is looked at. Raises TransferCorrupt or TransferFailed."""
        if chunk.sequence_number != self._num_chunks:
            raise TransferCorrupt(f"chunk {chunk.sequence_number} came in place of {self._num_chunks}")
        if self._num_unacknowledged >= credit:
            raise TransferFailed(f"the sender has more than {credit} chunks unacknowledged")
        self._coverage.claim(chunk.place)
        expected = chunk.place.num_bytes(self._layout)
        if chunk.num_bytes != expected or expected > MAX_MESSAGE_BYTES:
            raise TransferCorrupt(f"chunk {chunk.sequence_number} has {chunk.num_bytes} bytes instead of {expected}")
        self._digest.add(chunk.checksum)
        self._num_chunks += 1
        self._num_unacknowledged += 1

    def check_payload(self, chunk: Chunk, payload: bytes | memoryview) -> None:
        """Raises TransferCorrupt unless `payload` is what the sender gathered for this very place. On any thread."""
        if len(payload) != chunk.num_bytes:
            raise TransferCorrupt(f"chunk {chunk.sequence_number} is truncated")
        self._check_sum(chunk, chunk_checksum(self._seed, chunk.sequence_number, chunk.place, payload))

    def check_parts(self, chunk: Chunk, parts: Iterable[memoryview]) -> None:
        """The same for a payload in parts, each read when it is its turn."""
        hasher = chunk_hasher(self._seed, chunk.sequence_number, chunk.place, chunk.num_bytes)
        for part in parts:
            hasher.update(part)
        self._check_sum(chunk, hasher.intdigest())

    def acknowledge(self, chunk: Chunk) -> None:
        """`chunk` is verified and written."""
        self._num_unacknowledged -= 1
        self.num_bytes += chunk.num_bytes

    def check_commit(self, commit: Commit) -> None:
        """Raises TransferFailed or TransferCorrupt unless everything has come, once. All chunks are acknowledged."""
        if commit.num_tokens != self.reservation.num_tokens:
            raise TransferFailed(f"{self.reservation.num_tokens} tokens are reserved, {commit.num_tokens} committed")
        if commit.num_chunks != self._num_chunks:
            raise TransferFailed(f"{self._num_chunks} chunks arrived, {commit.num_chunks} were sent")
        self._coverage.require_full()
        if commit.digest != self._digest.value:
            raise TransferCorrupt("the digest of all chunks does not match")

    def _check_sum(self, chunk: Chunk, checksum: int) -> None:
        if checksum != chunk.checksum:
            raise TransferCorrupt(f"chunk {chunk.sequence_number} does not match its checksum")

    def block_ids(self, place: ChunkRange) -> tuple[int, ...]:
        """Where these positions are here."""
        return self.reservation.block_ids[place.first_block : place.first_block + place.num_blocks]

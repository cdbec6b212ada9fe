"""The transfer that a receiver expects, and the checks of its messages. Pure, no I/O: `receiver.py` moves the bytes."""

from dataclasses import dataclass

from kvtransfer.chunks import ChunkRange, Coverage, Digest, chunk_seed, transfer_seed
from kvtransfer.messages import Chunk, Commit, TransferOpen
from mesh.domain.errors import TransferCorrupt, TransferFailed
from mesh.domain.kv import KVLayout, KVSpan, Span
from mesh.rpc.server import MAX_MESSAGE_BYTES


@dataclass(frozen=True, slots=True)
class ExpectedTransfer:
    """A transfer that a decode worker has reserved blocks for. `block_ids` covers all block positions of the prompt.

    Positions before `first_block` hold valid KV already and are never written.
    """

    transfer_id: str
    attempt: int
    block_ids: tuple[int, ...]
    first_block: int
    num_tokens: int


class TransferChecks:
    """Checks each message of one flow of a transfer, which brings the KV of `span`, and counts the chunks that have
    arrived.
    """

    def __init__(self, expected: ExpectedTransfer, layout: KVLayout, span: KVSpan) -> None:
        num_blocks = len(expected.block_ids)
        if num_blocks != layout.num_blocks_for(expected.num_tokens):
            raise ValueError(f"{num_blocks} blocks are reserved for {expected.num_tokens} tokens")
        if not 0 <= expected.first_block <= num_blocks:
            raise ValueError(f"first_block {expected.first_block} is outside of {num_blocks} blocks")
        self.expected = expected
        self.num_bytes = 0
        self.is_committing = False
        """The commit has come; chunks may still be on their way into the store."""
        self._layout = layout
        self._seed = transfer_seed(expected.transfer_id, expected.attempt)
        self._coverage = Coverage(Span(expected.first_block, num_blocks - expected.first_block), span)
        self._digest = Digest()
        self._num_chunks = 0
        self._num_unacknowledged = 0

    def check_open(self, opening: TransferOpen) -> None:
        """Raise LayoutMismatch if the layouts differ, TransferFailed if the sender intends to send other blocks."""
        self._layout.require_same(opening.layout)
        reserved = (self.expected.first_block, len(self.expected.block_ids))
        if (opening.first_block, opening.end_block) != reserved:
            raise TransferFailed(
                f"blocks [{reserved[0]}, {reserved[1]}) are reserved, "
                f"the sender offers [{opening.first_block}, {opening.end_block})"
            )

    def accept(self, chunk: Chunk, credit: int) -> None:
        """Check and record `chunk` before its payload is read. Raises TransferCorrupt or TransferFailed."""
        if chunk.sequence_number != self._num_chunks:
            raise TransferCorrupt(f"chunk {chunk.sequence_number} came instead of chunk {self._num_chunks}")
        if self._num_unacknowledged >= credit:
            raise TransferFailed(f"the sender has more than {credit} chunks unacknowledged")
        self._coverage.claim(chunk.extent)
        num_bytes = chunk.extent.num_bytes(self._layout)
        if chunk.num_bytes != num_bytes or num_bytes > MAX_MESSAGE_BYTES:
            raise TransferCorrupt(f"chunk {chunk.sequence_number} has {chunk.num_bytes} bytes instead of {num_bytes}")
        self._digest.add(chunk.checksum)
        self._num_chunks += 1
        self._num_unacknowledged += 1

    def chunk_seed(self, chunk: Chunk) -> int:
        """Return the seed of the chunk's checksum."""
        return chunk_seed(self._seed, chunk.sequence_number, chunk.extent, chunk.num_bytes)

    def check_sum(self, chunk: Chunk, checksum: int) -> None:
        """Raise TransferCorrupt unless `checksum`, of what was written, is the chunk's."""
        if checksum != chunk.checksum:
            raise TransferCorrupt(f"chunk {chunk.sequence_number} does not match its checksum")

    def acknowledge(self, chunk: Chunk) -> None:
        """Record that `chunk` is verified and written."""
        self._num_unacknowledged -= 1
        self.num_bytes += chunk.num_bytes

    def check_commit(self, commit: Commit) -> None:
        """Raise TransferFailed or TransferCorrupt unless everything has arrived. Call it after all acknowledgements."""
        if commit.num_tokens != self.expected.num_tokens:
            raise TransferFailed(f"{self.expected.num_tokens} tokens are reserved, {commit.num_tokens} committed")
        if commit.num_chunks != self._num_chunks:
            raise TransferFailed(f"{self._num_chunks} chunks arrived, {commit.num_chunks} were sent")
        self._coverage.require_full()
        if commit.digest != self._digest.value:
            raise TransferCorrupt("the digest of all chunks does not match")

    def block_ids(self, chunk_range: ChunkRange) -> tuple[int, ...]:
        """Return this worker's block ids for the block positions of `chunk_range`."""
        return self.expected.block_ids[chunk_range.blocks.first : chunk_range.blocks.end]

"""The transfer that a receiver expects: the checks of its messages, and its shards.

Pure, no I/O: `receiver.py` moves the bytes.

A prefill and a decode worker whose KV lies in several processes move it from process to process: a shard is the
rectangle of layers and heads that one conversation brings. It may come from any sender, as long as it overlaps no
other. The transfer is committed once the shards that are committed tile the whole. If one fails, all fail, and the
transfer has failed once none of them is written any more.

    missing ──open──▶ writing ──commit──▶ committed
                         └─────leave────▶ gone         after `fail`, of this shard or of the transfer
"""

from dataclasses import dataclass

from kvtransfer.chunks import Coverage, Digest, Extent, chunk_seed, transfer_seed
from kvtransfer.messages import Commit, TransferChunk, TransferOpen
from mesh.domain.errors import LayoutMismatch, MeshError, TransferCorrupt, TransferFailed
from mesh.domain.kv import KVLayout, KVSpan, Span
from mesh.rpc.server import MAX_MESSAGE_BYTES


@dataclass(frozen=True, slots=True)
class ExpectedTransfer:
    """A transfer that a decode worker has reserved blocks for. `block_ids` are this worker's blocks, by index in the
    transfer (KVLayout.transfer_entries).

    Blocks before `first_block` hold valid KV already and are never written.
    """

    transfer_id: str
    attempt: int
    block_ids: tuple[int, ...]
    first_block: int
    num_tokens: int

    def require_fits(self, layout: KVLayout) -> None:
        """Raise ValueError unless there is a block for all that is sent of so many tokens."""
        num_blocks = len(self.block_ids)
        if num_blocks != layout.num_transfer_blocks(self.num_tokens):
            raise ValueError(f"{num_blocks} blocks are reserved for {self.num_tokens} tokens")
        if not 0 <= self.first_block <= num_blocks:
            raise ValueError(f"first_block {self.first_block} is outside of {num_blocks} blocks")


class ShardChecks:
    """Checks each message about one shard of a transfer, the KV of `span`, and counts the chunks that have arrived.
    `expected` fits `layout`.
    """

    def __init__(self, expected: ExpectedTransfer, layout: KVLayout, span: KVSpan) -> None:
        self.expected = expected
        self.num_bytes = 0
        self.is_committing = False
        """The commit has come; chunks may still be on their way into the store."""
        self._layout = layout
        self._seed = transfer_seed(expected.transfer_id, expected.attempt)
        self._coverage = Coverage(Span(expected.first_block, len(expected.block_ids) - expected.first_block), span)
        self._digest = Digest()
        self._num_chunks = 0
        self._num_acknowledged = 0  # a count of its own, because another thread may acknowledge than accepts

    def check_open(self, opening: TransferOpen) -> None:
        """Raise LayoutMismatch if the layouts differ, TransferFailed if the sender intends to send other blocks."""
        self._layout.require_same(opening.layout)
        reserved = (self.expected.first_block, len(self.expected.block_ids))
        if (opening.first_block, opening.end_block) != reserved:
            raise TransferFailed(
                f"blocks [{reserved[0]}, {reserved[1]}) are reserved, "
                f"the sender offers [{opening.first_block}, {opening.end_block})"
            )

    def accept(self, chunk: TransferChunk, credit: int) -> None:
        """Check and record `chunk` before its payload is read. Raises TransferCorrupt or TransferFailed."""
        if chunk.sequence_number != self._num_chunks:
            raise TransferCorrupt(f"chunk {chunk.sequence_number} came instead of chunk {self._num_chunks}")
        if self._num_chunks - self._num_acknowledged >= credit:
            raise TransferFailed(f"the sender has more than {credit} chunks unacknowledged")
        self._coverage.claim(chunk.extent)
        num_bytes = chunk.extent.num_bytes(self._layout)
        if chunk.num_bytes != num_bytes or num_bytes > MAX_MESSAGE_BYTES:
            raise TransferCorrupt(f"chunk {chunk.sequence_number} has {chunk.num_bytes} bytes instead of {num_bytes}")
        self._digest.add(chunk.checksum)
        self._num_chunks += 1

    def chunk_seed(self, chunk: TransferChunk) -> int:
        """Return the seed of the chunk's checksum."""
        return chunk_seed(self._seed, chunk.sequence_number, chunk.extent, chunk.num_bytes)

    def check_checksum(self, chunk: TransferChunk, checksum: int) -> None:
        """Raise TransferCorrupt unless `checksum`, of what was written, is the chunk's."""
        if checksum != chunk.checksum:
            raise TransferCorrupt(f"chunk {chunk.sequence_number} does not match its checksum")

    def acknowledge(self, chunk: TransferChunk) -> None:
        """Record that `chunk` is verified and written."""
        self._num_acknowledged += 1
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

    def block_ids(self, extent: Extent) -> tuple[int, ...]:
        """Return this worker's ids of the blocks of `extent`."""
        return self.expected.block_ids[extent.blocks.first : extent.blocks.end]


class IncomingShards:
    """The shards that make up `whole`. `error` is the first reason for which the transfer fails, None until then."""

    def __init__(self, whole: KVSpan) -> None:
        self.error: MeshError | None = None
        self.first_token_id: int | None = None
        self._whole = whole
        self._writing: set[KVSpan] = set()
        self._committed: set[KVSpan] = set()

    @property
    def is_opened(self) -> bool:
        """True once conversations have begun for the whole."""
        return self._num_layer_heads(self._writing | self._committed) == self._whole.num_layer_heads

    @property
    def is_committed(self) -> bool:
        return self.error is None and self._num_layer_heads(self._committed) == self._whole.num_layer_heads

    @property
    def has_failed(self) -> bool:
        """True if the transfer fails and no shard is written any more."""
        return self.error is not None and not self._writing

    def require_free(self, span: KVSpan) -> None:
        """Raise TransferFailed if a shard of this span comes too late, or overlaps another."""
        if self.error is not None:
            raise TransferFailed(f"the transfer has failed: {self.error}")
        for other in self._writing | self._committed:
            if span.intersection(other) is not None:
                raise TransferFailed(f"the KV of {other} has a sender already")

    def open(self, span: KVSpan) -> None:
        """Begin a shard. Raises as `require_free`, and LayoutMismatch if it is KV that has no place here."""
        self.require_free(span)
        if not span.is_inside(self._whole):
            raise LayoutMismatch(f"{self._whole} are expected here, the sender offers {span}")
        self._writing.add(span)

    def commit(self, span: KVSpan, first_token_id: int) -> None:
        """A shard is complete and verified. Raises TransferFailed if the transfer has failed meanwhile, and
        TransferCorrupt if shards disagree about the first token; the caller must `leave` the shard then.
        """
        if self.error is not None:
            raise TransferFailed(f"the transfer has failed: {self.error}")
        if self.first_token_id not in (None, first_token_id):
            raise TransferCorrupt(f"shards bring first tokens {self.first_token_id} and {first_token_id}")
        self.first_token_id = first_token_id
        self._writing.remove(span)
        self._committed.add(span)

    def fail(self, error: MeshError) -> None:
        """The transfer fails, unless it is committed or has failed before."""
        if not self.is_committed and self.error is None:
            self.error = error

    def leave(self, span: KVSpan) -> None:
        """Nothing writes this shard any more. Does nothing if it is committed."""
        self._writing.discard(span)

    @staticmethod
    def _num_layer_heads(spans: set[KVSpan]) -> int:
        return sum(span.num_layer_heads for span in spans)

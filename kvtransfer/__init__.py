"""Moving KV blocks from a prefill worker to a decode worker.

Life of a transfer:

    decode worker                                    prefill worker
    receiver.expect(ExpectedTransfer)
                                                     transfer = sender.open(TransferSpec)
                    ◀── open: layout, transports ──
                    ── granted: transport, credit ─▶
                                                     transfer.announce(...)  as layers get ready
                    ◀══ chunks, as credit allows ══
                    ── acks ───────────────────────▶
                                                     await transfer.commit(num_tokens, first_token_id)
                    ◀── commit: digest ────────────
    on_committed(transfer_id, first_token_id)
                    ── committed ──────────────────▶ commit returns TransferResult

If the transfer fails, the receiver calls `on_failed(transfer_id, error)`, and the sender's `commit` and `ended` raise.
Either side may `await abort(...)` at any time. Blocks may be freed once commit, abort or the callback has returned: no
thread accesses them any more. Corrupt KV is refused. Uncommitted KV is never read by the engine.

A transfer holds a lease. From open to commit the sender renews the lease, even while its engine computes, and the
receiver confirms. Each side ends the transfer after `lease_s` without a message from the other, so a dead, stopped or
disconnected peer never holds blocks for longer. A reservation that no sender opens ends after `opening_lease_s`.

Words, from the outside in:

transfer       the KV of one prompt from a prefill worker to a decode worker; it numbers its blocks, see
               KVLayout.transfer_entries
shard          what one rank sends to one rank; most workers have one rank, so the transfer is the shard
conversation   the messages about a shard, in one call: over gRPC, or over a link, a Unix socket of this machine
path           the way of the payload: a transport, such as shared memory, towards one receiver
chunk, slot    what is sent, checked and acknowledged at once; the memory for its payload on the sender's side
extent         the blocks, layers and heads that a chunk has

The prefill worker's side:

sender.py                  KVSender, the entry point, and OutgoingTransfer, the handle of one transfer
outgoing_conversation.py   the sender's half of the conversation of one transfer
push_call.py               the gRPC call `Push` and its connections, and the same over a link (transports/link.py)

The decode worker's side:

receiver.py                KVReceiver, the entry point, and the service of `Push`
incoming_conversation.py   the receiver's half of a conversation; direct_writes.py: how a link's thread writes chunks
incoming_transfer.py       ExpectedTransfer, the checks of a transfer's messages, and its shards (no I/O)

Both:

messages.py, chunks.py     messages as values and as bytes; how KV is cut into chunks and checksummed
store.py                   the interface of the KV cache that both sides use
ranks.py                   KV that lies in other processes of the worker
settings.py                limits and leases
transports/                payload paths; transports/base.py is the interface for another one
"""

from kvtransfer.incoming_transfer import ExpectedTransfer
from kvtransfer.messages import SERVICE_NAME
from kvtransfer.outgoing_conversation import TransferResult, TransferSpec
from kvtransfer.ranks import AnyOutgoingTransfer, MultiRankReceiver, MultiRankSender
from kvtransfer.receiver import KVReceiver, ReceiverCallbacks
from kvtransfer.sender import KVSender, OutgoingTransfer
from kvtransfer.settings import TransferSettings
from kvtransfer.store import KVStore

__all__ = [
    "SERVICE_NAME",
    "AnyOutgoingTransfer",
    "ExpectedTransfer",
    "KVReceiver",
    "KVSender",
    "KVStore",
    "MultiRankReceiver",
    "MultiRankSender",
    "OutgoingTransfer",
    "ReceiverCallbacks",
    "TransferResult",
    "TransferSettings",
    "TransferSpec",
]

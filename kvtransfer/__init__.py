"""Moving KV blocks from a prefill worker to a decode worker.

Life of a transfer:

    decode worker                                    prefill worker
    receiver.expect(Reservation)
                                                     transfer = sender.open(TransferSpec)
                    ◀── open: layout, transports ──
                    ── granted: transport, credit ─▶
                                                     transfer.push(...)      engine's thread, as layers get ready
                    ◀══ chunks, as credit allows ══
                    ── acks ───────────────────────▶
                                                     await transfer.commit(num_tokens, first_token)
                    ◀── commit: digest ────────────
    on_committed(transfer_id, first_token)
                    ── committed ──────────────────▶ commit returns TransferResult

If the transfer fails, the receiver calls `on_failed(transfer_id, error)`, and the sender's `commit` and `ended` raise.
Either side may `await abort(...)` at any time. Blocks may be freed once commit, abort or the callback has returned: no
thread accesses them any more. Corrupt KV is refused. Uncommitted KV is never read by the engine.

A transfer holds a lease. From open to commit the sender renews the lease, even while its engine computes, and the
receiver confirms. Each side ends the transfer after `lease_s` without a message from the other, so a dead, stopped or
disconnected peer never holds blocks for longer. A reservation that no sender opens ends after `opening_lease_s`.

sender.py, sending.py, push_call.py   the prefill worker's side: entry point and transfer, conversation, gRPC calls
receiver.py, incoming.py              the decode worker's side: entry point and conversation; the rules (no I/O)
messages.py, chunks.py                messages as values and as bytes; how KV is cut into chunks and checksummed
store.py                              the interface of the KV cache that both sides use
settings.py, tasks.py                 limits and leases of both sides; asyncio helpers
transports/                           payload paths; base.py is the interface for another one
"""

from kvtransfer.incoming import Reservation
from kvtransfer.messages import SERVICE_NAME
from kvtransfer.receiver import KVReceiver, KvTransferServicer, ReceiverCallbacks
from kvtransfer.sender import KVSender, OutgoingTransfer
from kvtransfer.sending import TransferResult, TransferSpec
from kvtransfer.settings import TransferSettings
from kvtransfer.store import KVStore

__all__ = [
    "SERVICE_NAME",
    "KVReceiver",
    "KVSender",
    "KVStore",
    "KvTransferServicer",
    "OutgoingTransfer",
    "ReceiverCallbacks",
    "Reservation",
    "TransferResult",
    "TransferSettings",
    "TransferSpec",
]

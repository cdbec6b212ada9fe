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

If it fails: `on_failed(transfer_id, error)` on the left, `commit` and `ended` raise on the right.
Either side may `await abort(...)` at any time. Who waits for commit, abort or a callback may free its blocks after it:
no thread touches them any more. What arrives wrong is refused; what never committed is never decoded from.

A transfer is a lease. From open to commit a task of the sender renews it, whatever the engine does, and the receiver
answers. Who hears nothing from the other for `lease_s` ends the transfer, so that a dead, stopped or cut-off peer never
holds blocks for longer. A reservation that nobody opens ends after `opening_lease_s`.

Start reading at `sender.py` and `receiver.py`. `transports/base.py` is where another payload path plugs in.
"""

from kvtransfer.incoming import Reservation
from kvtransfer.messages import SERVICE_NAME
from kvtransfer.outgoing import OutgoingTransfer
from kvtransfer.receiver import KVReceiver, ReceiverCallbacks
from kvtransfer.sender import KVSender
from kvtransfer.sending import TransferResult, TransferSpec
from kvtransfer.servicer import KvTransferServicer
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

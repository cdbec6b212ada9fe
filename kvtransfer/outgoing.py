"""One transfer on its way out: what the prefill worker holds. `sending.py` has the conversation behind it.

    open()        a task opens the conversation; meanwhile
    push()        the engine's thread names KV that is final; it is queued, gathered and sent as credit allows
    commit()      the first token goes out behind the last chunk; the receiver confirms once all is written and verified
    abort()       or any failure: the call is cancelled, threads leave the store, slots go back

Blocks must stay allocated until commit() or abort() has returned or raised: after that, no thread reads them.
"""

import asyncio
from collections.abc import Callable

import structlog

from kvtransfer.chunks import ChunkRange
from kvtransfer.inbox import PushInbox
from kvtransfer.sending import SenderParts, SendingConversation, TransferResult, TransferSpec
from mesh.domain.errors import MeshError, TransferFailed, WorkerLost
from mesh.domain.tokens import SampledToken

log = structlog.get_logger(__name__)


class OutgoingTransfer:
    """Made by KVSender.open. `push` may be called from any thread, everything else on the event loop."""

    def __init__(self, spec: TransferSpec, parts: SenderParts, on_end: Callable[["OutgoingTransfer"], None]) -> None:
        if not 0 <= spec.first_block <= len(spec.block_ids):
            raise ValueError(f"first_block {spec.first_block} is outside of {len(spec.block_ids)} blocks")
        self.spec = spec
        self._num_layers = parts.store.layout.num_layers
        self._inbox = PushInbox(parts.store.layout, parts.settings.chunk_bytes)
        self._conversation = SendingConversation(spec, parts, self._inbox)
        self._is_aborted = False
        self._task = asyncio.get_running_loop().create_task(self._run())
        self._task.add_done_callback(lambda task: self._ended(task, on_end))

    def push(self, first_block: int, num_blocks: int, first_layer: int, num_layers: int) -> None:
        """KV of these block positions in these layers is in the store and final. Each (layer, block) once.

        Never blocks; ignored once the transfer is over. Positions before the spec's `first_block` are skipped. Raises
        ValueError if outside of the prompt's blocks or the model's layers.
        """
        skip = min(max(0, self.spec.first_block - first_block), num_blocks)
        piece = ChunkRange(first_block + skip, num_blocks - skip, first_layer, num_layers)
        if num_blocks == skip or num_layers == 0 or self._task.done():
            return
        if not piece.is_inside(self.spec.first_block, len(self.spec.block_ids), self._num_layers):
            raise ValueError(f"{piece} is outside of {len(self.spec.block_ids)} blocks or {self._num_layers} layers")
        self._inbox.push(piece)

    async def commit(self, num_tokens: int, first_token: SampledToken) -> TransferResult:
        """Everything is pushed: send it, have it verified, hand over the first token.

        Raises a MeshError if anything about the transfer has failed, now or before. If the caller is cancelled, the
        transfer goes on until `abort`.
        """
        self._conversation.first_token = first_token
        self._conversation.num_tokens = num_tokens
        self._inbox.finish()
        try:
            return await asyncio.shield(self._task)
        except asyncio.CancelledError:
            if self._task.cancelled():  # aborted before it began
                raise TransferFailed("the transfer was aborted by its sender") from None
            raise

    async def ended(self) -> None:
        """Return when the transfer is over; raise the MeshError it failed with: a reason to stop computing. Cancelling
        the wait changes nothing."""
        await asyncio.shield(self._task)

    async def abort(self) -> None:
        """End the transfer; idempotent. Returns when no thread reads the store any more: its blocks may be freed."""
        self._is_aborted = True
        self._task.cancel()
        await asyncio.wait([self._task])

    async def _run(self) -> TransferResult:
        names = {"transfer_id": self.spec.transfer_id, "to": self.spec.address}
        try:
            result = await self._conversation.run()
        except asyncio.CancelledError:
            if self._is_aborted:
                raise TransferFailed("the transfer was aborted by its sender") from None
            raise WorkerLost("the receiver is stopping") from None  # how grpc.aio shows the status CANCELLED
        except MeshError as error:
            log.info("transfer_failed", **names, error=str(error))
            raise
        except Exception as error:
            log.error("transfer_failed", **names, exc_info=error)
            raise TransferFailed("the sender failed; its log has the details") from error
        log.debug("transfer_finished", **names, num_bytes=result.num_bytes, transport=result.transport)
        return result

    def _ended(self, task: asyncio.Task[TransferResult], on_end: Callable[["OutgoingTransfer"], None]) -> None:
        if not task.cancelled():
            task.exception()  # marks it as seen: who still cares asks `commit` or `ended`
        on_end(self)

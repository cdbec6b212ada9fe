"""Sending KV: the prefill worker's side. `outgoing_conversation.py` has the conversation.

Life of a transfer here:

    open()        starts a task that opens the conversation
    announce()    says which KV is final; the task copies and sends it as credit allows
    commit()      sends the first token after the last chunk; returns once the receiver has verified all KV
    abort()       like any failure, cancels the call, waits until no thread reads the store, and frees the slots

Blocks must stay allocated until commit() or abort() has returned or raised: after that, no thread reads them.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import structlog

from kvtransfer.chunks import Extent
from kvtransfer.outgoing_conversation import OutgoingConversation, SenderResources, TransferResult, TransferSpec
from kvtransfer.push_call import ConnectionPool
from kvtransfer.settings import TransferSettings
from kvtransfer.store import KVStore
from kvtransfer.transports import open_send_transports
from kvtransfer.transports.base import SendTransport
from mesh.domain.errors import ConfigurationError, MeshError, ReceiverLost, TransferFailed
from mesh.domain.kv import KVLayout, KVSpan, Span
from mesh.rpc.credentials import Credentials
from mesh.rpc.server import MAX_MESSAGE_BYTES
from mesh.tasks import mark_retrieved

log = structlog.get_logger(__name__)


class KVSender:
    """Sends KV from one store to any number of decode workers. One per process, on its event loop.

    Raises ConfigurationError if no configured transport works here, or if a block is too large to be sent.
    """

    def __init__(
        self,
        store: KVStore,
        worker_id: str,
        credentials: Credentials,
        settings: TransferSettings | None = None,
        transports: tuple[SendTransport, ...] | None = None,
    ) -> None:
        settings = settings or TransferSettings()
        max_chunk_bytes = max(settings.chunk_bytes, store.layout.layer_block_bytes)
        if max_chunk_bytes > MAX_MESSAGE_BYTES // 2:
            raise ConfigurationError(
                f"one block of one layer has {max_chunk_bytes} bytes, over the limit of {MAX_MESSAGE_BYTES // 2}: "
                "use smaller blocks (block_size)"
            )
        self._resources = SenderResources(
            store=store,
            worker_id=worker_id,
            metadata=credentials.metadata(),
            settings=settings,
            transports=transports or open_send_transports(settings, max_chunk_bytes),
            connections=ConnectionPool(settings.channel_idle_s, credentials.tls, settings.receiver_chunks),
            executor=ThreadPoolExecutor(settings.num_threads, thread_name_prefix="kv-gather"),
        )
        self._open_transports = list(self._resources.transports)
        memories = [memory for transport in self._open_transports if (memory := transport.memory()) is not None]
        self._unpin = [store.pin(memory) for memory in memories]
        self._transfers: set[OutgoingTransfer] = set()

    @property
    def span(self) -> KVSpan:
        """The part of the model's KV that the store holds."""
        return self._resources.store.span

    @property
    def layout(self) -> KVLayout:
        """The shape of the whole model's KV."""
        return self._resources.store.layout

    def open(self, spec: TransferSpec) -> "OutgoingTransfer":
        """Start a transfer. Raises ValueError for a bad spec; later errors are raised by `commit`."""
        transfer = OutgoingTransfer(spec, self._resources, on_end=self._transfers.discard)
        self._transfers.add(transfer)
        return transfer

    async def close(self) -> None:
        """Abort all transfers, then close connections, threads and shared memory; idempotent."""
        await asyncio.gather(*(transfer.abort() for transfer in list(self._transfers)))
        await self._resources.connections.close()
        self._resources.executor.shutdown(wait=False)
        while self._unpin:
            self._unpin.pop()()
        while self._open_transports:
            self._open_transports.pop().close()


class OutgoingTransfer:
    """Created by KVSender.open, and used on its event loop."""

    def __init__(
        self, spec: TransferSpec, resources: SenderResources, on_end: Callable[["OutgoingTransfer"], None]
    ) -> None:
        if not 0 <= spec.first_block <= len(spec.block_ids):
            raise ValueError(f"first_block {spec.first_block} is outside of {len(spec.block_ids)} blocks")
        self.spec = spec
        self._stored_layers = resources.store.span.layers
        if not spec.span.is_inside(resources.store.span):
            raise ValueError(f"{spec.span} are not all in the store, which has {resources.store.span}")
        self._conversation = OutgoingConversation(spec, resources)
        self._is_aborted = False
        self._task = asyncio.get_running_loop().create_task(self._run())
        self._task.add_done_callback(mark_retrieved)  # `commit` and `ended` raise its error
        self._task.add_done_callback(lambda _: on_end(self))

    def announce(self, blocks: Span, layers: Span) -> None:
        """Say that the KV of these blocks in these layers is in the store and final. Announce each (layer, block) once.

        Does nothing once the transfer has ended. Blocks before the spec's `first_block` and layers outside of its
        `span` are skipped. Raises ValueError for blocks outside of the prompt or layers outside of the store.
        """
        if not (blocks.count and layers.count) or self._task.done():
            return
        if not blocks.is_inside(Span(0, len(self.spec.block_ids))) or not layers.is_inside(self._stored_layers):
            num_blocks = len(self.spec.block_ids)
            raise ValueError(f"{blocks}, {layers} are outside of {num_blocks} blocks or the store's layers")
        missing = Span(self.spec.first_block, len(self.spec.block_ids) - self.spec.first_block)
        blocks_to_send = blocks.intersection(missing)
        layers_to_send = layers.intersection(self.spec.span.layers)
        if blocks_to_send is not None and layers_to_send is not None:
            self._conversation.announce(Extent(blocks_to_send, KVSpan(layers_to_send, self.spec.span.heads)))

    def finish(self, num_tokens: int, first_token_id: int) -> None:
        """Say that all KV has been announced, and commit it without waiting."""
        self._conversation.finish(num_tokens, first_token_id)

    async def commit(self, num_tokens: int, first_token_id: int) -> TransferResult:
        """Send everything that was announced and the first token, and wait until the receiver has verified it.

        Raises the MeshError with which the transfer failed, now or earlier. If the caller is cancelled, the transfer
        goes on until `abort`.
        """
        self.finish(num_tokens, first_token_id)
        return await self.ended()

    async def ended(self) -> TransferResult:
        """Wait until the transfer has ended; raise the MeshError with which it failed. Cancelling the wait does not
        affect the transfer."""
        try:
            return await asyncio.shield(self._task)
        except asyncio.CancelledError:
            if self._task.cancelled():  # aborted before the task started
                raise TransferFailed("the transfer was aborted by its sender") from None
            raise

    async def abort(self) -> None:
        """End the transfer; idempotent. Its blocks may be freed afterwards: no thread reads the store any more."""
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
            raise ReceiverLost("the receiver is stopping") from None  # grpc.aio raises this for the status CANCELLED
        except MeshError as error:
            log.info("transfer_failed", **names, error=str(error))
            raise
        except Exception as error:
            log.error("transfer_failed", **names, exc_info=error)
            raise TransferFailed("the sender failed; its log has the details") from error
        log.debug("transfer_finished", **names, num_bytes=result.num_bytes, transport=result.transport)
        return result

"""Sending KV: the prefill worker's side. `outgoing.py` has the life of one transfer."""

import asyncio
from concurrent.futures import ThreadPoolExecutor

from kvtransfer.channels import ChannelPool
from kvtransfer.outgoing import OutgoingTransfer
from kvtransfer.sending import SenderResources, TransferSpec
from kvtransfer.settings import TransferSettings
from kvtransfer.store import KVStore
from kvtransfer.transports import open_send_transports
from kvtransfer.transports.base import SendTransport
from mesh.domain.errors import ConfigurationError
from mesh.domain.kv import KVSpan
from mesh.rpc.credentials import Credentials
from mesh.rpc.server import MAX_MESSAGE_BYTES


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
                f"one block of one layer has {max_chunk_bytes} bytes: too many; use smaller blocks"
            )
        self._channels = ChannelPool(settings.channel_idle_s, credentials.tls)
        self._executor = ThreadPoolExecutor(settings.num_threads, thread_name_prefix="kv-gather")
        self._resources = SenderResources(
            store=store,
            worker_id=worker_id,
            metadata=credentials.metadata(),
            settings=settings,
            transports=transports or open_send_transports(settings, max_chunk_bytes),
            channels=self._channels,
            executor=self._executor,
        )
        self._open_transports = list(self._resources.transports)
        self._transfers: set[OutgoingTransfer] = set()

    @property
    def span(self) -> KVSpan:
        """The part of the model's KV that the store holds."""
        return self._resources.store.span

    def open(self, spec: TransferSpec) -> OutgoingTransfer:
        """Start a transfer. Raises ValueError for a bad spec; later errors are raised by `commit`."""
        transfer = OutgoingTransfer(spec, self._resources, on_end=self._transfers.discard)
        self._transfers.add(transfer)
        return transfer

    async def close(self) -> None:
        """Abort all transfers, then close connections, threads and shared memory; idempotent."""
        await asyncio.gather(*(transfer.abort() for transfer in list(self._transfers)))
        await self._channels.close()
        self._executor.shutdown(wait=False)
        while self._open_transports:
            self._open_transports.pop().close()

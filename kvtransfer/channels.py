"""A sender's connections to decode workers: one per worker, closed after a time without transfers."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import grpc

from mesh.rpc.channel import open_channel
from mesh.rpc.credentials import TlsIdentity


@dataclass(slots=True)
class _Entry:
    channel: grpc.aio.Channel
    num_users: int = 0
    idle_timer: asyncio.TimerHandle | None = None


class ChannelPool:
    """Channels by address, for use on one event loop."""

    def __init__(self, idle_s: float, tls: TlsIdentity | None) -> None:
        self._tls = tls
        self._idle_s = idle_s
        self._entries: dict[str, _Entry] = {}
        self._closing: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return len(self._entries)

    @contextmanager
    def use(self, address: str) -> Iterator[grpc.aio.Channel]:
        """Yield the channel to `address`, which stays open while the block runs."""
        entry = self._entries.get(address)
        if entry is None:
            # Its own connection: control messages must not wait behind megabytes of payload.
            entry = self._entries[address] = _Entry(open_channel(address, self._tls, own_connection=True))
        if entry.idle_timer is not None:
            entry.idle_timer.cancel()
            entry.idle_timer = None
        entry.num_users += 1
        try:
            yield entry.channel
        finally:
            entry.num_users -= 1
            if entry.num_users == 0:
                loop = asyncio.get_running_loop()
                entry.idle_timer = loop.call_later(self._idle_s, self._close_idle, address)

    async def close(self) -> None:
        """Close all channels. None may be in use."""
        for address in list(self._entries):
            self._close_idle(address)
        if self._closing:
            await asyncio.wait(self._closing)

    def _close_idle(self, address: str) -> None:
        entry = self._entries.pop(address)
        if entry.idle_timer is not None:
            entry.idle_timer.cancel()
        task = asyncio.get_running_loop().create_task(entry.channel.close())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

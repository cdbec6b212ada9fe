"""A TCP proxy that can be bad: cut, refuse, delay, stall, throttle, and flip bytes of bulk payload.

It stands in front of one address and treats all its connections alike; `cut` may single some out by the ports they
come from. Faults last until `heal()`.

Bytes are flipped where only bulk payload can be: in the middle of an HTTP/2 DATA frame of at least 4 KiB that goes to
the server. In this mesh those are chunks of KV; control messages are smaller. So what is changed is what the checksum
must find, and not the framing, which gRPC itself would notice.
"""

import asyncio
import contextlib
from collections.abc import Collection
from dataclasses import dataclass

_READ_BYTES = 64 << 10
_POLL_S = 0.02
_PREFACE_BYTES = 24
_FRAME_HEADER_BYTES = 9
_DATA_FRAME = 0
_MIN_BULK_BYTES = 4096

Address = tuple[str, int]


@dataclass(slots=True)
class Conditions:
    """How bad the link is now, in both directions."""

    refuse: bool = False
    stall: bool = False
    delay_s: float = 0.0
    bytes_per_s: float = 0.0
    """0: as fast as it goes."""
    flips: int = 0
    """So many frames of bulk payload get a byte flipped; counted down."""


class FrameFlipper:
    """Follows the HTTP/2 frames of one direction of one connection, whichever way they are cut into reads."""

    def __init__(self) -> None:
        self._header = bytearray()
        self._skip = _PREFACE_BYTES
        self._flip_at: int | None = None

    def change(self, data: bytes, conditions: Conditions) -> tuple[bytes, int]:
        """The bytes to pass on, and in how many of them a bit was flipped."""
        changed, flipped, position = bytearray(data), 0, 0
        while position < len(changed):
            if self._skip:
                step = min(self._skip, len(changed) - position)
                if self._flip_at is not None and self._skip - step <= self._flip_at < self._skip:
                    changed[position + self._skip - self._flip_at - 1] ^= 0x40
                    self._flip_at = None
                    flipped += 1
                self._skip -= step
                position += step
                continue
            take = min(_FRAME_HEADER_BYTES - len(self._header), len(changed) - position)
            self._header += changed[position : position + take]
            position += take
            if len(self._header) == _FRAME_HEADER_BYTES:
                self._begin_frame(conditions)
        return bytes(changed), flipped

    def _begin_frame(self, conditions: Conditions) -> None:
        self._skip, kind = int.from_bytes(self._header[:3], "big"), self._header[3]
        self._header.clear()
        if kind == _DATA_FRAME and self._skip >= _MIN_BULK_BYTES and conditions.flips:
            conditions.flips -= 1
            self._flip_at = self._skip // 2  # counted from the frame's end


class Proxy:
    """Listens at `front`, connects to `back`."""

    def __init__(self, front: Address, back: Address) -> None:
        self.conditions = Conditions()
        self.num_flipped = 0
        self._front = front
        self._back = back
        self._server: asyncio.Server | None = None
        self._ports: dict[asyncio.Task[None], int] = {}  # of each connection, where it comes from

    @property
    def port(self) -> int:
        return self._front[1]

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._accept, *self._front)

    async def stop(self) -> None:
        if self._server is not None:
            self._server.close()
        self.cut()
        await asyncio.gather(*self._ports, return_exceptions=True)

    def cut(self, client_ports: Collection[int] | None = None) -> int:
        """Break all connections, or those from these ports; returns how many."""
        hit = [task for task, port in self._ports.items() if client_ports is None or port in client_ports]
        for task in hit:
            task.cancel()
        return len(hit)

    def heal(self) -> None:
        """Be a good link again."""
        self.conditions = Conditions()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._ports[task] = writer.get_extra_info("peername")[1]
        try:
            await self._serve(reader, writer)
        except (OSError, asyncio.CancelledError):
            pass  # cut, or one of the two ends is gone
        finally:
            writer.transport.abort()
            del self._ports[task]

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.conditions.refuse:
            return
        back_reader, back_writer = await asyncio.open_connection(*self._back)
        ways = [
            asyncio.create_task(self._pass_on(reader, back_writer, FrameFlipper())),
            asyncio.create_task(self._pass_on(back_reader, writer, None)),
        ]
        try:
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for way in ways:
                way.cancel()
            await asyncio.gather(*ways, return_exceptions=True)
            back_writer.transport.abort()

    async def _pass_on(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, flipper: FrameFlipper | None
    ) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(_READ_BYTES):
                await self._be_slow(len(data))
                if flipper is not None:
                    data, flipped = flipper.change(data, self.conditions)
                    self.num_flipped += flipped
                writer.write(data)
                await writer.drain()

    async def _be_slow(self, num_bytes: int) -> None:
        while self.conditions.stall:  # noqa: ASYNC110
            await asyncio.sleep(_POLL_S)
        delay_s = self.conditions.delay_s
        if self.conditions.bytes_per_s:
            delay_s += num_bytes / self.conditions.bytes_per_s
        if delay_s:
            await asyncio.sleep(delay_s)

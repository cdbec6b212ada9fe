"""An HTTP/2 client that takes no data: it announces a window of 0 and never opens it, but answers pings, so that
nothing finds it dead. A server's first message to it waits for ever.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator

_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_DATA, _HEADERS, _RST_STREAM, _SETTINGS, _PING, _GOAWAY = 0, 1, 3, 4, 6, 7
_ACK = _END_STREAM = 0x1
_END_HEADERS = 0x4
_INITIAL_WINDOW_SIZE = (4).to_bytes(2, "big")
_NO_WINDOW = _INITIAL_WINDOW_SIZE + (0).to_bytes(4, "big")
_STREAM = 1


class ZeroWindowClient:
    """One connection with one call. `ended` is set when the server has reset the call or closed the connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.ended = asyncio.Event()
        self.has_headers = asyncio.Event()
        """Set once the server has begun its answer."""
        self._reader = reader
        self._writer = writer

    def call(self, method: str, message: bytes = b"") -> None:
        """Send the request of a gRPC method with one message."""
        headers = {
            ":method": "POST",
            ":scheme": "http",
            ":path": method,
            ":authority": "localhost",
            "content-type": "application/grpc",
            "te": "trailers",
        }
        self._send(_SETTINGS, 0, 0, _NO_WINDOW)
        self._send(_HEADERS, _END_HEADERS, _STREAM, b"".join(map(_literal, headers, headers.values())))
        self._send(_DATA, _END_STREAM, _STREAM, b"\0" + len(message).to_bytes(4, "big") + message)

    async def follow(self) -> None:
        """Read what the server sends, which is no data, until the call has ended."""
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            while not self.ended.is_set():
                header = await self._reader.readexactly(9)
                kind, flags, stream = header[3], header[4], int.from_bytes(header[5:], "big")
                payload = await self._reader.readexactly(int.from_bytes(header[:3], "big"))
                if kind == _PING and not flags & _ACK:
                    self._send(_PING, _ACK, 0, payload)
                elif kind == _SETTINGS and not flags & _ACK:
                    self._send(_SETTINGS, _ACK, 0, b"")
                elif kind == _HEADERS:
                    self.has_headers.set()
                elif kind == _RST_STREAM and stream == _STREAM:
                    break
        self.ended.set()

    def _send(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        header = len(payload).to_bytes(3, "big") + bytes((kind, flags)) + stream.to_bytes(4, "big")
        self._writer.write(header + payload)


@contextlib.asynccontextmanager
async def zero_window_call(address: str, method: str, message: bytes = b"") -> AsyncIterator[ZeroWindowClient]:
    """A call of `method` at host:port that takes no data while the block runs."""
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(_PREFACE)
    client = ZeroWindowClient(reader, writer)
    client.call(method, message)
    following = asyncio.create_task(client.follow())
    try:
        yield client
    finally:
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)
        writer.transport.abort()


def _literal(name: str, value: str) -> bytes:
    """A header field of HPACK, literal and not indexed."""
    return b"\0" + bytes((len(name),)) + name.encode() + bytes((len(value),)) + value.encode()

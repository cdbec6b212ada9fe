"""A proxy for HTTP/2 in front of one server. It resets a stream when it is told to, as proxies do whose server dies."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

_PREFACE_BYTES, _HEADER_BYTES = 24, 9
_HEADERS, _RST_STREAM = 1, 3


class ResettingProxy:
    """`address` is where it listens."""

    def __init__(self, upstream: str) -> None:
        self.address = ""
        self._upstream = upstream
        self._stream = 0
        self._client: asyncio.StreamWriter | None = None

    def reset(self, code: int) -> None:
        """Reset the stream that was opened last, with this error code of HTTP/2."""
        assert self._client is not None
        self._client.write(_frame_header(4, _RST_STREAM, self._stream) + code.to_bytes(4, "big"))

    async def serve_one(self, client_reader: asyncio.StreamReader, client_writer: asyncio.StreamWriter) -> None:
        """Pass on the frames of one connection until either side closes it."""
        host, _, port = self._upstream.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        self._client = client_writer
        with contextlib.suppress(OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
            writer.write(await client_reader.readexactly(_PREFACE_BYTES))
            await asyncio.gather(self._pass_on(client_reader, writer), self._pass_on(reader, client_writer))
        writer.close()
        client_writer.close()

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Frame by frame, so that a reset comes between two."""
        while True:
            header = await reader.readexactly(_HEADER_BYTES)
            payload = await reader.readexactly(int.from_bytes(header[:3], "big"))
            if header[3] == _HEADERS:
                self._stream = int.from_bytes(header[5:], "big")
            writer.write(header + payload)


@asynccontextmanager
async def resetting_proxy(upstream: str) -> AsyncIterator[ResettingProxy]:
    """A proxy that listens until the block ends."""
    proxy = ResettingProxy(upstream)
    server = await asyncio.start_server(proxy.serve_one, "127.0.0.1", 0)
    proxy.address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield proxy
    finally:
        server.close()


def _frame_header(length: int, kind: int, stream: int) -> bytes:
    return length.to_bytes(3, "big") + bytes([kind, 0]) + stream.to_bytes(4, "big")

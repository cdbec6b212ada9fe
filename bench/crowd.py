"""Clients that never send a whole request: idle ones send nothing, dripping ones a byte of a header each second.

    python -m bench.crowd PORT IDLE DRIPPING

A client that the server disconnects comes back. The process prints a line once all clients have connected for the first
time, and ends with its standard input.
"""

import asyncio
import contextlib
import sys

from mesh.interrupts import run_async, run_program
from mesh.process_limits import raise_open_files
from mesh.tasks import cancel_all

_DRIP_S = 1.0
_RECONNECT_S = 0.5


async def _stay(port: int, drips: bool, arrived: asyncio.Semaphore) -> None:
    """Keep one client connected until cancelled."""
    is_new = True
    while True:
        with contextlib.suppress(OSError):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            if is_new:
                arrived.release()
            is_new = False
            dripping = asyncio.create_task(_drip(writer)) if drips else None
            try:
                await reader.read()
            finally:
                if dripping is not None:
                    dripping.cancel()
                writer.transport.abort()
        await asyncio.sleep(_RECONNECT_S)


async def _drip(writer: asyncio.StreamWriter) -> None:
    writer.write(b"GET /ping HTTP/1.1\r\nx-long: ")
    while True:
        writer.write(b"x")
        await asyncio.sleep(_DRIP_S)


async def _run(port: int, num_idle: int, num_dripping: int) -> None:
    arrived = asyncio.Semaphore(0)
    clients = [asyncio.create_task(_stay(port, n < num_dripping, arrived)) for n in range(num_idle + num_dripping)]
    for _ in clients:
        await arrived.acquire()
    print("all connected", flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await cancel_all(clients)


def main() -> None:
    raise_open_files()
    port, num_idle, num_dripping = map(int, sys.argv[1:4])
    run_async(_run(port, num_idle, num_dripping))


if __name__ == "__main__":
    run_program(main)

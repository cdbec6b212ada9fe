"""`python -m tests.service.gateway.crowd PORT IDLE DRIPPING`: clients that send nothing, or a byte each second.

Those that are let go come back. Prints a line when all are there for the first time; ends with its standard input.
"""

import asyncio
import contextlib
import resource
import sys


async def stay(port: int, drips: bool, arrived: asyncio.Semaphore) -> None:
    """One client."""
    is_new = True
    while True:
        with contextlib.suppress(OSError):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            if is_new:
                arrived.release()
            is_new = False
            dripping = asyncio.create_task(drip(writer)) if drips else None
            with contextlib.suppress(OSError):
                await reader.read()
            if dripping is not None:
                dripping.cancel()
            writer.transport.abort()
        await asyncio.sleep(0.5)


async def drip(writer: asyncio.StreamWriter) -> None:
    writer.write(b"GET /ping HTTP/1.1\r\nx-long: ")
    while True:
        writer.write(b"x")
        await asyncio.sleep(1)


async def main(port: int, num_idle: int, num_dripping: int) -> None:
    arrived = asyncio.Semaphore(0)
    clients = [asyncio.create_task(stay(port, n < num_dripping, arrived)) for n in range(num_idle + num_dripping)]
    for _ in clients:
        await arrived.acquire()
    print("all here", flush=True)  # noqa: T201
    await asyncio.to_thread(sys.stdin.read)
    for client in clients:
        client.cancel()


if __name__ == "__main__":
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    asyncio.run(main(*map(int, sys.argv[1:4])))

"""Requests as bytes, from a thread of their own: a client library would change them, and its work would be measured."""

import asyncio
import contextlib
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

_PATIENCE_S = 60.0


@dataclass
class Stops:
    """`longest_s` is how long the event loop stood still at most. Time that other processes took from this one is none
    of the loop's: a stop is no longer than the CPU time that this process has used meanwhile.
    """

    longest_s: float = 0.0


@asynccontextmanager
async def loop_stops() -> AsyncIterator[Stops]:
    """Watches the running loop while the block runs."""
    stops = Stops()

    async def watch() -> None:
        while True:
            wall_s, cpu_s = time.monotonic(), time.process_time()
            await asyncio.sleep(0.001)
            gap_s = min(time.monotonic() - wall_s, time.process_time() - cpu_s)
            stops.longest_s = max(stops.longest_s, gap_s)

    watching = asyncio.create_task(watch())
    try:
        yield stops
        await asyncio.sleep(0.002)  # a stop that goes on until here counts
    finally:
        watching.cancel()


def request(path: str, body: bytes, content_type: str = "application/json", *headers: str) -> bytes:
    """A whole POST, after which the connection closes."""
    lines = [f"POST {path} HTTP/1.1", f"content-type: {content_type}", f"content-length: {len(body)}", *headers]
    if not any(line.lower().startswith("host:") for line in headers):
        lines.append("host: 127.0.0.1")
    return "\r\n".join([*lines, "connection: close", "", ""]).encode() + body


async def answer_to(url: str, raw: bytes) -> tuple[int, bytes]:
    """Status and body; (0, b"") if the server closes the connection without a word."""
    return await asyncio.to_thread(_answer_to, url, raw)


def address_of(url: str) -> tuple[str, int]:
    host, _, port = url.partition("//")[2].partition(":")
    return host, int(port)


def _answer_to(url: str, raw: bytes) -> tuple[int, bytes]:
    with socket.create_connection(address_of(url), _PATIENCE_S) as client:
        with contextlib.suppress(ConnectionError):  # it may have answered all the same
            client.sendall(raw)
        answer = b""
        with contextlib.suppress(ConnectionError):
            while chunk := client.recv(1 << 16):
                answer += chunk
    if not answer:
        return 0, b""
    head, _, body = answer.partition(b"\r\n\r\n")
    return int(head.split()[1]), body

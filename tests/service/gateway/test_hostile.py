"""Clients that mean no good, or are merely broken: each is answered, and nothing of them stays."""

import asyncio
import gc
import json
import tracemalloc
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager

import psutil
import pytest

from tests.fakes.sdk_router import Script
from tests.service.gateway.http import RunningGateway, running_gateway
from tests.waiting import until

_MIB = 1 << 20
BROKEN = (
    *(b"", b"{", b"\xff\xfe\x00", b"[]", b'"text"', b"null", b'{"prompt":'),
    *(b"[" * 100_000, b'{"prompt": NaN}', b"1" * 5000),
)
CHAT = {"messages": [{"role": "user", "content": "hi"}], "stream": True}


@asynccontextmanager
async def connection(gateway: RunningGateway) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """A bare one, closed at the end without a word."""
    host, _, port = gateway.url.removeprefix("http://").partition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        yield reader, writer
    finally:
        writer.transport.abort()


async def status_of(reader: asyncio.StreamReader) -> int:
    return int((await asyncio.wait_for(reader.readline(), 60)).split()[1])


@contextmanager
def most_allocated() -> Iterator[Callable[[], int]]:
    """Afterwards: the most bytes that Python held at once in the block, more than at its start. Resident memory would
    also tell of what the allocator keeps and of other tests' leftovers."""
    tracemalloc.start()
    try:
        yield lambda: peak_bytes
    finally:
        peak_bytes = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()


@pytest.mark.parametrize("announced", [True, False], ids=["content-length", "chunked"])
async def test_32_mib_are_refused_and_not_kept(announced: bool) -> None:
    body = b"x" * (32 * _MIB)

    async def pieces() -> AsyncIterator[bytes]:
        for start in range(0, len(body), _MIB):
            yield body[start : start + _MIB]

    async with running_gateway() as gateway:
        # Piece by piece in both cases: what the client keeps would count, too.
        headers = {"content-length": str(len(body))} if announced else {}
        with most_allocated() as most_bytes:
            response = await gateway.http.post("/v1/completions", content=pieces(), headers=headers)
        assert response.status_code == 413
        assert most_bytes() < 24 * _MIB, "at most the cap of 8 MiB is ever held"
        assert (await gateway.post("/v1/completions", {"prompt": "x"})).status_code == 200


async def test_32_mib_are_accepted_if_the_limit_allows() -> None:
    async with running_gateway(max_body_bytes=33 * _MIB) as gateway:
        body = json.dumps({"prompt": "x" * 100, "user": "y" * (32 * _MIB)})
        assert (await gateway.http.post("/v1/completions", content=body)).status_code == 200


@pytest.mark.parametrize(("path", "status"), [("/v1/completions", 400), ("/generate", 422), ("/invocations", 424)])
async def test_broken_json_is_the_clients_fault(path: str, status: int) -> None:
    async with running_gateway() as gateway:
        for raw in BROKEN:
            response = await gateway.http.post(path, content=raw, headers={"content-type": "application/json"})
            assert (response.status_code, bool(response.json())) == (status, True), raw[:20]
        assert gateway.script.requests == []


async def test_a_flood_of_headers_ends_with_its_connection() -> None:
    """Names and values without end, and a line that never ends: nothing is kept past 64 KiB."""
    async with running_gateway() as gateway:
        for line in (b"x-%d: %s\r\n", b"y"):
            async with connection(gateway) as (reader, writer):
                writer.write(b"GET /v1/models HTTP/1.1\r\nhost: 127.0.0.1\r\n")
                for number in range(20_000):
                    writer.write(line % (number, b"v" * 50) if b"%" in line else line * 64)
                assert await status_of(reader) in (400, 431)
        assert (await gateway.http.get("/v1/models")).status_code == 200


async def test_invalid_requests() -> None:
    async with running_gateway() as gateway:
        for raw in (b"\x16\x03\x01\x02\x00" * 20 + b"\r\n\r\n", b"GET\r\n\r\n"):
            async with connection(gateway) as (reader, writer):
                writer.write(raw)
                assert await status_of(reader) == 400
        both = b"POST /generate HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: 5\r\ncontent-length: 9\r\n\r\n{}"
        async with connection(gateway) as (reader, writer):
            writer.write(both)
            assert await status_of(reader) == 400


async def test_disconnected_clients_leave_nothing_behind() -> None:
    """At every point: while the body comes, before the first token, in the middle of a stream."""
    script = Script(hold_after_messages=3)
    async with running_gateway(script) as gateway:
        await leave_everywhere(gateway, script, 1)
        gc.collect()
        tasks, files = len(asyncio.all_tasks()), psutil.Process().num_fds()
        await leave_everywhere(gateway, script, 20)
        gc.collect()
        assert len(asyncio.all_tasks()) <= tasks
        assert psutil.Process().num_fds() <= files + 1
        metrics = gateway.backend.metrics
        assert (metrics.num_waiting, metrics.num_running) == (0, 0)


async def leave_everywhere(gateway: RunningGateway, script: Script, times: int) -> None:
    raw = json.dumps(CHAT).encode()
    head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: %d\r\n\r\n"
    for _ in range(times):
        async with connection(gateway) as (_, writer):
            writer.write(head % (len(raw) + 1) + raw)
        for hold_after in (0, 3):
            script.hold_after_messages = hold_after
            script.holding.clear()
            script.cancelled.clear()
            async with connection(gateway) as (reader, writer):
                writer.write(head % len(raw) + raw)
                await asyncio.wait_for(script.holding.wait(), 60)
                if hold_after:
                    await reader.readuntil(b"data: ")
            await asyncio.wait_for(script.cancelled.wait(), 60)
    open_requests = gateway.backend.metrics.open_requests
    await until(lambda: open_requests.collect()[0].samples[0].value == 0)

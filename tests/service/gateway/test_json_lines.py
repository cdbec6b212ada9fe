"""JSON lines as they leave: over a bare socket, where nothing joins, splits or hides what was sent."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from tests.fakes.sdk_router import STORY, Script
from tests.service.gateway.http import RunningGateway, running_gateway
from tests.service.gateway.test_hostile import connection

NUM_TOKENS = 4
BODIES = {
    "/invocations": {"inputs": "One", "parameters": {"max_new_tokens": NUM_TOKENS}, "stream": True},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}], "stream": True},
}


@asynccontextmanager
async def json_lines(gateway: RunningGateway) -> AsyncIterator[asyncio.StreamReader]:
    """What comes back when a stream has been asked for."""
    body = json.dumps(BODIES["/invocations"]).encode()
    async with asyncio.timeout(60), connection(gateway) as (reader, writer):
        head = f"POST /invocations HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        yield reader


async def read_head(reader: asyncio.StreamReader) -> bytes:
    return await reader.readuntil(b"\r\n\r\n")


async def read_chunk(reader: asyncio.StreamReader) -> bytes:
    """One of the chunked transfer encoding; b"" is the last."""
    size = int(await reader.readline(), 16)
    return (await reader.readexactly(size + 2)).removesuffix(b"\r\n")


@pytest.mark.parametrize("num_before", [0, 2], ids=["before the first token", "between tokens"])
async def test_json_lines_have_no_pings(num_before: int) -> None:
    """While events of another stream get their pings, for as long a time."""
    script = Script(hold_after_messages=num_before)
    async with running_gateway(script, ping_interval_s=0.01) as gateway, json_lines(gateway) as reader:
        await script.holding.wait()
        if num_before:
            await read_head(reader)
            lines = b""
            while lines.count(b"\n") < num_before:  # lines that are ready together may share a chunk
                lines += await read_chunk(reader)
        anything = asyncio.create_task(reader.read(1))
        async with gateway.http.stream("POST", "/v1/chat/completions", json=BODIES["/v1/chat/completions"]) as events:
            pings = (line async for line in events.aiter_lines() if line == ": ping")
            for _ in range(5):
                await anext(pings)
            assert not anything.done()
            script.release.set()
            await anything


async def test_each_line_is_sent_at_once_in_its_own_chunk() -> None:
    """The next token is only generated when the line of the one before has been read."""
    script = Script(hold_after_messages=0)
    async with running_gateway(script) as gateway, json_lines(gateway) as reader:
        texts = []
        for number in range(NUM_TOKENS):
            await script.holding.wait()
            script.let_one_pass()
            if number == 0:
                head = await read_head(reader)
                assert head.startswith(b"HTTP/1.1 200 ")
                assert b"content-type: application/jsonlines" in head
            chunk = await read_chunk(reader)
            assert chunk.endswith(b"\n")
            assert chunk.count(b"\n") == 1
            texts.append(json.loads(chunk)["token"]["text"])
        assert "".join(texts) == STORY[3 : 3 + NUM_TOKENS]
        assert await read_chunk(reader) == b"", "nothing after the last line"

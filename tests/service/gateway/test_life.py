"""Clients that do not read, and a gateway that stops."""

import asyncio
import json

import httpx2
import pytest

import tandem
from gateway.app import build_app
from gateway.backend import build_backend
from gateway.server import serving
from gateway.settings import GatewaySettings
from tests.fakes.sdk_router import STORY, Script, running_router
from tests.service.gateway.http import running_gateway
from tests.service.gateway.test_hostile import connection

CHAT = {"messages": [{"role": "user", "content": "hi"}], "stream": True}
BODY = json.dumps(CHAT).encode()
MUCH = json.dumps(CHAT | {"logprobs": True, "top_logprobs": 20, "n": 4}).encode()  # more than sockets hold


async def test_a_client_that_reads_nothing_is_disconnected(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    script = Script(story="x" * 4000, tokens_per_message=100, max_total_tokens=10_000)
    async with running_gateway(script, slow_reader_s=0.2, grace_s=1.0) as gateway:
        monkeypatch.setattr(gateway.backend.metrics, "observe_generation", lambda failure, _: ended.set_result(failure))
        host, _, port = gateway.url.removeprefix("http://").partition(":")
        _, writer = await asyncio.open_connection(host, int(port), limit=1)
        head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: {len(MUCH)}\r\n\r\n"
        writer.write(head.encode() + MUCH)
        assert await ended == "dropped"
        writer.transport.abort()


@pytest.mark.parametrize("finishes", [True, False])
async def test_answers_may_end_within_the_grace(finishes: bool) -> None:
    """One that does not is broken off, and seen to be by its client."""
    script = Script(hold_after_messages=3)
    async with running_router(script) as router:
        settings = GatewaySettings(router=router.address, port=0, grace_s=30.0 if finishes else 1.0)
        async with tandem.AsyncClient(router.address, max_retries=0) as client, httpx2.AsyncClient() as http:
            async with serving(build_app(build_backend(settings, client)), settings) as address:
                reading = asyncio.create_task(http.post(f"http://{address}/v1/chat/completions", content=BODY))
                await script.holding.wait()
                if finishes:
                    asyncio.get_running_loop().call_soon(script.release.set)
            if finishes:
                lines = [line for line in (await reading).text.splitlines() if line]
                chunks = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
                assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks) == STORY
                assert lines[-1] == "data: [DONE]"
            else:
                with pytest.raises(httpx2.RemoteProtocolError):
                    await reading
                await script.cancelled.wait()


def request_to(path: str, body: bytes) -> bytes:
    return b"POST %s HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: %d\r\n\r\n" % (path.encode(), len(body)) + body


@pytest.mark.parametrize("streams", [True, False], ids=["stream", "whole answer"])
async def test_a_client_that_closes_its_sending_half_gets_its_answer(streams: bool) -> None:
    script = Script(hold_after_messages=0)
    async with running_gateway(script) as gateway, connection(gateway) as (reader, writer):
        writer.write(request_to("/v1/chat/completions", json.dumps(CHAT | {"stream": streams}).encode()))
        writer.write_eof()
        async with asyncio.timeout(60):
            await script.holding.wait()
            start = await reader.readexactly(len(b"HTTP/1.1 "))  # sent ahead, byte by byte
            script.release.set()
            answer = start + await reader.read()
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 OK\r\n")
    assert not script.cancelled.is_set()
    if streams:
        assert body.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
    else:
        assert json.loads(body)["choices"][0]["message"]["content"] == STORY


@pytest.mark.parametrize("closes_half_first", [True, False])
async def test_a_client_that_leaves_before_its_answer_cancels_the_request(closes_half_first: bool) -> None:
    script = Script(hold_after_messages=0)
    async with running_gateway(script) as gateway:
        async with connection(gateway) as (reader, writer):
            writer.write(request_to("/v1/chat/completions", json.dumps(CHAT | {"stream": False}).encode()))
            await asyncio.wait_for(script.holding.wait(), 60)
            if closes_half_first:
                writer.write_eof()
                assert await asyncio.wait_for(reader.readexactly(1), 60) == b"H"
        await asyncio.wait_for(script.cancelled.wait(), 60)


async def test_a_client_that_leaves_within_its_stream_after_it_closed_its_sending_half_cancels_the_request() -> None:
    script = Script(hold_after_messages=3)
    async with running_gateway(script, ping_interval_s=0.1) as gateway:
        async with connection(gateway) as (reader, writer):
            writer.write(request_to("/v1/chat/completions", BODY))
            writer.write_eof()
            await asyncio.wait_for(reader.readuntil(b"data: "), 60)
        await asyncio.wait_for(script.cancelled.wait(), 60)


async def test_a_sending_half_that_closes_within_an_answer_cancels_the_request() -> None:
    script = Script(hold_after_messages=3)
    async with running_gateway(script) as gateway, connection(gateway) as (reader, writer):
        writer.write(request_to("/v1/chat/completions", BODY))
        await asyncio.wait_for(reader.readuntil(b"data: "), 60)
        writer.write_eof()
        await asyncio.wait_for(script.cancelled.wait(), 60)
        assert not (await asyncio.wait_for(reader.read(), 60)).endswith(b"0\r\n\r\n")


async def test_the_end_of_an_unfinished_request_closes_its_connection() -> None:
    async with running_gateway() as gateway, connection(gateway) as (reader, writer):
        writer.write(request_to("/v1/chat/completions", BODY)[:-1])
        writer.write_eof()
        assert await asyncio.wait_for(reader.read(), 60) == b""

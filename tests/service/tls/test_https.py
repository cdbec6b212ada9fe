"""HTTPS of the gateway: what clients get over it, and that its connections have the limits of others."""

import asyncio
import json
import ssl
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import httpx2
import pytest
from structlog.testing import capture_logs

from gateway.connections import Connection, Connections, _TlsLayer
from gateway.settings import GatewaySettings
from mesh import public_tls
from mesh.domain.errors import ConfigurationError
from tests.fakes.certificates import Authority, LivePair
from tests.fakes.sdk_router import STORY, Script
from tests.service.gateway.http import RunningGateway, running_gateway
from tests.service.gateway.raw_http import address_of, request
from tests.service.gateway.test_connections import connections, ended
from tests.service.gateway.test_hostile import most_allocated
from tests.service.gateway.test_life import CHAT, MUCH, request_to
from tests.waiting import until

CHATS = "/v1/chat/completions"
BODY = json.dumps(CHAT).encode()
SOON_S = 60.0


@pytest.fixture(scope="module")
def pair(authority: Authority) -> dict[str, str]:
    files = authority.issue("https")
    return {"public_tls_cert": str(files.cert), "public_tls_key": str(files.key)}


@pytest.fixture
def trust(authority: Authority) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=str(authority.cert))


@asynccontextmanager
async def secured(
    gateway: RunningGateway, trust: ssl.SSLContext
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """A bare connection over TLS, closed at the end without a word."""
    reader, writer = await asyncio.open_connection(*address_of(gateway.url), ssl=trust)
    try:
        yield reader, writer
    finally:
        writer.transport.abort()


async def test_a_client_that_knows_the_ca_streams(pair: dict[str, str], trust: ssl.SSLContext) -> None:
    async with running_gateway(**pair) as gateway, httpx2.AsyncClient(base_url=gateway.url, verify=trust) as http:
        async with http.stream("POST", CHATS, json=CHAT) as response:
            lines = [line async for line in response.aiter_lines() if line]
        assert lines[-1] == "data: [DONE]"
        chunks = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
        assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks) == STORY
        # The same connection goes on: a refusal, a page, and a check of the page's origin.
        assert (await http.post(CHATS, content=b"x" * (9 << 20))).status_code == 413
        assert "text/html" in (await http.get("/mesh", headers={"origin": gateway.url})).headers["content-type"]
        async with httpx2.AsyncClient(base_url=gateway.url, verify=ssl.create_default_context()) as stranger:
            with pytest.raises(httpx2.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
                await stranger.get("/ping")
        for message in (request("/ping", b""), request_to(CHATS, BODY)):
            async with connections(gateway.url, 1) as ((reader, writer),):  # plain HTTP
                writer.write(message)
                answer = await asyncio.wait_for(reader.read(), SOON_S)
                assert answer.startswith(b"HTTP/1.1 400 ")
                assert b"This port speaks HTTPS: begin the address with https://" in answer
        async with connections(gateway.url, 1) as ((reader, writer),):  # neither
            writer.write(b"\x80 no HTTP\r\n\r\n")
            await ended(reader)


@pytest.mark.parametrize("is_secure", [True, False])
async def test_writes_to_a_client_that_has_gone_are_dropped_without_a_word(
    pair: dict[str, str], trust: ssl.SSLContext, caplog: pytest.LogCaptureFixture, is_secure: bool
) -> None:
    """Many events may be written in the turn of the event loop in which the client resets its connection."""
    script = Script(hold_after_messages=2)
    settings = pair if is_secure else {}
    opened: list[Connection] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Connections, "has_request", lambda _, connection: opened.append(connection))
        async with running_gateway(script, **settings) as gateway:
            client = asyncio.open_connection(*address_of(gateway.url), ssl=trust if is_secure else None)
            _, writer = await asyncio.wait_for(client, SOON_S)
            writer.write(request_to(CHATS, BODY))
            await asyncio.wait_for(script.holding.wait(), SOON_S)
            opened[-1].wire.abort()  # as asyncio does when a write meets a reset
            for _ in range(20):
                opened[-1].cycle.transport.write(b"data: x\n\n")
            await until(script.cancelled.is_set)
            writer.transport.abort()
    assert [record.getMessage() for record in caplog.records if record.name == "asyncio"] == []


async def test_a_stop_waits_for_no_handshake_and_no_goodbye(pair: dict[str, str], trust: ssl.SSLContext) -> None:
    async with AsyncExitStack() as after:
        async with running_gateway(grace_s=60.0, header_timeout_s=60.0, **pair) as gateway:
            await after.enter_async_context(connections(gateway.url, 1))
            reader, writer = await after.enter_async_context(secured(gateway, trust))
            writer.write(b"GET /ping HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n")
            assert (await reader.readline()).startswith(b"HTTP/1.1 200")
            writer.transport.pause_reading()
            started_s = time.monotonic()
        assert time.monotonic() - started_s < 20


async def test_connections_without_a_handshake_lock_nobody_out(pair: dict[str, str], trust: ssl.SSLContext) -> None:
    async with (
        running_gateway(max_connections=20, header_timeout_s=1.0, **pair) as gateway,
        connections(gateway.url, 60) as idle,
        secured(gateway, trust) as (reader, writer),
    ):
        writer.write(request("/ping", b""))
        assert (await asyncio.wait_for(reader.readline(), SOON_S)).startswith(b"HTTP/1.1 ")
        for waiting, _ in idle:
            await ended(waiting)
        async with secured(gateway, trust) as (silent, _):  # a handshake, and no headers
            await ended(silent)


async def test_clients_that_only_begin_a_handshake_take_little_memory(pair: dict[str, str]) -> None:
    num_clients = 200
    async with running_gateway(header_timeout_s=60.0, **pair) as gateway:
        with most_allocated() as most_bytes, pytest.MonkeyPatch.context() as patch:
            begun: list[object] = []
            begin = _TlsLayer.feed
            patch.setattr(_TlsLayer, "feed", lambda layer, data: (begin(layer, data), begun.append(layer)))
            async with connections(gateway.url, num_clients) as clients:
                for _, writer in clients:
                    writer.write(b"\x16")
                await until(lambda: len(begun) == num_clients)
    assert most_bytes() < num_clients * 128 << 10, "with the clients' own ends"


async def test_a_long_first_message_of_a_handshake_is_read_whole(pair: dict[str, str], trust: ssl.SSLContext) -> None:
    trust.set_alpn_protocols([*(f"{number:0250}" for number in range(200)), "http/1.1"])
    async with running_gateway(**pair) as gateway, secured(gateway, trust) as (reader, writer):
        writer.write(request("/ping", b""))
        assert (await asyncio.wait_for(reader.readline(), SOON_S)).startswith(b"HTTP/1.1 ")


async def test_a_client_that_leaves_cancels_its_request(pair: dict[str, str], trust: ssl.SSLContext) -> None:
    trust.maximum_version = ssl.TLSVersion.TLSv1_2
    script = Script(hold_after_messages=0)
    async with running_gateway(script, **pair) as gateway:
        async with secured(gateway, trust) as (_, writer):
            writer.write(request_to(CHATS, BODY))
            await asyncio.wait_for(script.holding.wait(), SOON_S)
        await asyncio.wait_for(script.cancelled.wait(), SOON_S)


async def test_a_client_that_reads_nothing_is_cut_off(
    pair: dict[str, str], trust: ssl.SSLContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    cut: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    script = Script(story="x" * 4000, tokens_per_message=100, max_total_tokens=10_000)
    async with running_gateway(script, slow_reader_s=0.2, grace_s=1.0, **pair) as gateway:
        monkeypatch.setattr(gateway.backend.metrics, "observe_generation", lambda failure, _: cut.set_result(failure))
        async with secured(gateway, trust) as (_, writer):
            writer.transport.pause_reading()
            writer.write(request_to(CHATS, MUCH))
            assert await asyncio.wait_for(cut, SOON_S) == "dropped"


async def test_a_renewed_certificate_is_for_new_connections(
    authority: Authority, trust: ssl.SSLContext, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(public_tls, "_CHECK_INTERVAL_S", 0.01)
    live = LivePair(tmp_path, authority.issue("https-before"))
    new = authority.issue("https-after")
    async with running_gateway(**live.settings) as gateway, secured(gateway, trust) as (reader, writer):
        with capture_logs() as logs:
            live.replace(cert=new.cert)  # without its key
            await until(lambda: "KEY_VALUES_MISMATCH" in str(logs))
            assert await shown_by(gateway, trust) == "https-before"
            live.replace(key=new.key)
            await until(lambda: "certificate read again, new connections use it" in str(logs))
        assert [line["log_level"] for line in logs] == ["error", "info"]
        assert await shown_by(gateway, trust) == "https-after"
        writer.write(request("/ping", b""))  # the connection from before goes on
        assert (await asyncio.wait_for(reader.readline(), SOON_S)).startswith(b"HTTP/1.1 ")


async def test_a_certificate_that_expires_is_reported_once(
    authority: Authority, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(public_tls, "_CHECK_INTERVAL_S", 0.001)
    monkeypatch.setattr(public_tls, "_EXPIRY_TURNS", 1)
    late, after = authority.issue("expired-in-use", days=0), authority.issue("after-expiry")
    live = LivePair(tmp_path, late)
    is_late = False

    def load(cert: str, key: str) -> str:
        if is_late:
            public_tls.host_in(cert, key)
        return Path(cert).read_text()

    used = public_tls.CertificateReloader((str(live.cert), str(live.key)), load)
    following = asyncio.create_task(used.follow())
    with capture_logs() as logs:
        is_late = True
        await until(lambda: bool(logs))
        assert used.latest == late.cert.read_text()
        live.replace(after.cert, after.key)
        await until(lambda: used.latest == after.cert.read_text())
    following.cancel()
    assert [line["event"] for line in logs] == [
        "clients refuse the certificate: replace its files",
        "certificate read again, new connections use it",
    ]
    assert "certificate has expired" in logs[0]["error"]


async def shown_by(gateway: RunningGateway, trust: ssl.SSLContext) -> str:
    """The common name in the certificate that a new connection sees."""
    async with secured(gateway, trust) as (_, writer):
        ((_, name),) = writer.get_extra_info("peercert")["subject"][0]
        return name


async def test_files_that_vanish_while_they_are_read_end_nothing(
    authority: Authority, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(public_tls, "_CHECK_INTERVAL_S", 0.01)
    live = LivePair(tmp_path, authority.issue("vanishing-before"))

    def load(cert: str, key: str) -> str:
        certificate = Path(cert).read_text()
        if live.key.resolve().name == "gone.key":
            ssl.create_default_context().load_cert_chain(cert, key)
        return certificate

    used = public_tls.CertificateReloader((str(live.cert), str(live.key)), load)
    following = asyncio.create_task(used.follow())
    with capture_logs() as logs:
        live.replace(key=tmp_path / "gone.key")
        await until(lambda: "No such file" in str(logs))
    after = authority.issue("vanishing-after")
    live.replace(after.cert, after.key)
    await until(lambda: used.latest == after.cert.read_text() or following.done())
    assert not following.done()
    following.cancel()


def test_wrong_files_are_refused_in_words(authority: Authority, pair: dict[str, str]) -> None:
    """As the router refuses them (test_mesh_tls.py), by the same checks."""
    tls = GatewaySettings(**pair).load_public_tls()
    assert tls is not None
    assert tls.latest.minimum_version == ssl.TLSVersion.TLSv1_2
    late, other = authority.issue("late-https", days=0), authority.issue("other-https")
    for wrong, message in (
        ({"public_tls_key": ""}, "belong together"),
        ({"public_tls_key": "/nowhere.key"}, r"cannot read /nowhere\.key: No such file"),
        ({"public_tls_key": str(other.key)}, "KEY_VALUES_MISMATCH"),
        ({"public_tls_cert": str(late.cert), "public_tls_key": str(late.key)}, "certificate has expired"),
    ):
        with pytest.raises(ConfigurationError, match=message):
            GatewaySettings(**(pair | wrong))

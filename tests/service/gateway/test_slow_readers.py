"""Clients that read slowly get their answers; clients that read nothing are let go."""

import asyncio
import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from starlette.responses import FileResponse

from gateway import web
from gateway.connections import Connection
from tests.defects import Repaired
from tests.fakes.sdk_router import Script
from tests.service.gateway.http import running_gateway
from tests.service.gateway.raw_http import address_of
from tests.service.gateway.test_connections import HEAD, PATIENCE_S
from tests.service.gateway.test_life import CHAT
from tests.waiting import until


@pytest.fixture
def small_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The gateway's kernel buffers little."""
    accepted = Connection.accepted

    def accept(connection: Connection, wire: asyncio.Transport) -> None:
        wire.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        accepted(connection, wire)

    monkeypatch.setattr(Connection, "accepted", accept)


@contextmanager
def connected(url: str) -> Iterator[socket.socket]:
    """A client whose kernel buffers little, too."""
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.settimeout(PATIENCE_S)
        client.connect(address_of(url))
        yield client


def ask(client: socket.socket, path: str) -> None:
    client.sendall(f"GET {path} HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: close\r\n\r\n".encode())


async def test_new_client_that_has_not_read_yet_gets_its_whole_answer(
    small_buffers: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its first check finds an answer that is larger than the system's buffers."""
    is_overdue, unsent = Connection.is_overdue, list[int]()

    def check(connection: Connection, *arguments: Any) -> bool:
        unsent.append(connection.wire.get_write_buffer_size())
        return is_overdue(connection, *arguments)

    monkeypatch.setattr(Connection, "is_overdue", check)
    script = "pages/vendor/katex/katex.min.js"
    async with running_gateway() as gateway:
        with connected(gateway.url) as client:
            ask(client, f"/{script}")
            await until(lambda: any(unsent), PATIENCE_S)
            with client.makefile("rb") as answer:
                content = await asyncio.to_thread(answer.read)
    assert content.endswith((web.PAGES.parent / script).read_bytes())


@pytest.mark.parametrize("piece_bytes", [FileResponse.chunk_size, 1024])
async def test_client_that_reads_slowly_but_steadily_gets_its_whole_answer(
    piece_bytes: int, small_buffers: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, repaired: Repaired
) -> None:
    """Between two checks the client reads a piece. Those of a file's size are refilled in between, so each check finds
    as many bytes unsent as the one before; small ones never open the client's window far.
    """
    is_overdue, num_checks = Connection.is_overdue, 0

    def check(connection: Connection, *arguments: Any) -> bool:
        nonlocal num_checks
        num_checks += connection.flow is not None and connection.flow.write_paused
        return is_overdue(connection, *arguments)

    monkeypatch.setattr(Connection, "is_overdue", check)
    content = os.urandom(40 * FileResponse.chunk_size)
    async with running_gateway(slow_reader_s=2.0, batch_folder=str(tmp_path), max_body_bytes=8 << 20) as gateway:
        form = {"data": {"purpose": "batch"}, "files": {"file": ("input.jsonl", content)}}
        file_id = (await gateway.http.post("/v1/files", **form)).json()["id"]
        with connected(gateway.url) as client:
            ask(client, f"/v1/files/{file_id}/content")
            with client.makefile("rb") as answer:
                received, num_checks = b"", 0
                for number in range(1, 36):
                    received += await asyncio.to_thread(answer.read, piece_bytes)
                    await until(lambda number=number: num_checks >= number, PATIENCE_S)
                received += await asyncio.to_thread(answer.read)
    assert received.endswith(content)
    repaired("D46", "they get it, however long it takes; a client that reads nothing for slow_reader_s (30 s) is cut")


async def test_client_that_takes_nothing_of_a_stream_that_rests_is_let_go() -> None:
    """The server does not wait for it, as what there is of the stream is in the system's buffers, but it may have
    vanished.
    """
    script = Script(story="x" * 200, tokens_per_message=100, hold_after_messages=1)
    body = json.dumps(CHAT | {"stream": True, "logprobs": True, "top_logprobs": 20}).encode()
    async with running_gateway(script, slow_reader_s=0.5) as gateway:
        with connected(gateway.url) as client:
            client.sendall(HEAD.replace(b"/completions", b"/chat/completions") % len(body) + b"\r\n" + body)
            async with asyncio.timeout(PATIENCE_S):
                await script.holding.wait()
                await script.cancelled.wait()


async def test_the_kernel_does_not_keep_a_whole_answer_for_long() -> None:
    """The server has closed the connection of a client that reads nothing."""

    def states(port: int) -> list[str]:
        return [each.status for each in psutil.net_connections("tcp4") if each.raddr and each.raddr.port == port]

    async with running_gateway(slow_reader_s=0.5) as gateway:
        with connected(gateway.url) as client:
            ask(client, "/pages/vendor/marked.esm.js")
            port = client.getsockname()[1]
            await until(lambda: states(port) == [psutil.CONN_FIN_WAIT1], PATIENCE_S)
            await until(lambda: not states(port), PATIENCE_S)

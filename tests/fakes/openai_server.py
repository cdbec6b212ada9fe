"""An OpenAI-compatible server on a bare socket: it answers by a script, and can break off where real ones would."""

import asyncio
import json
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

BROKEN_OFF, NO_FINISH, ERROR_EVENT, GARBAGE = "broken off", "no finish", "error event", "garbage"


@dataclass
class OpenAIScript:
    """Faults, request by request (a kind above, or an HTTP status), and the requests received."""

    faults: deque[str | int] = field(default_factory=deque)
    with_usage: bool = True
    asked: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    headers: list[str] = field(default_factory=list)


class _Connection:
    """One request on one connection."""

    def __init__(self, script: OpenAIScript, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._script = script
        self._reader = reader
        self._writer = writer

    async def serve(self) -> None:
        head = (await self._reader.readuntil(b"\r\n\r\n")).decode()
        length = next(
            int(line.split(":")[1]) for line in head.splitlines() if line.lower().startswith("content-length")
        )
        body = json.loads(await self._reader.readexactly(length))
        path = head.split()[1]
        self._script.asked.append((path, body))
        self._script.headers.append(head)
        fault = self._script.faults.popleft() if self._script.faults else None
        if isinstance(fault, int):
            self._start(fault, "application/json")
            self._chunk(b'{"error": "full"}')
        else:
            self._start(200, "text/event-stream")
            self._answer(body, fault, is_chat="chat" in path)
        if fault != BROKEN_OFF:
            self._writer.write(b"0\r\n\r\n")

    def _answer(self, body: dict[str, Any], fault: str | None, *, is_chat: bool) -> None:
        if is_chat:
            self._event({"choices": [{"delta": {"role": "assistant", "content": ""}, "finish_reason": None}]})
        for index in range(body["max_tokens"]):
            is_last = index == body["max_tokens"] - 1
            if is_last and fault == ERROR_EVENT:
                self._event({"error": {"message": "out of memory"}})
                return
            if is_last and fault == GARBAGE:
                self._chunk(b"data: {oops\n\n")
            if is_last and fault == BROKEN_OFF:
                return
            reason = "length" if is_last and fault != NO_FINISH else None
            content: dict[str, Any] = {"delta": {"content": "x"}} if is_chat else {"text": "x"}
            self._event({"choices": [{**content, "finish_reason": reason}]})
        if self._script.with_usage:
            self._event({"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": body["max_tokens"]}})
        self._chunk(b"data: [DONE]\n\n")

    def _event(self, message: dict[str, Any]) -> None:
        self._chunk(f"data: {json.dumps(message)}\n\n".encode())

    def _start(self, status: int, kind: str) -> None:
        lines = (
            f"HTTP/1.1 {status} X\r\nContent-Type: {kind}\r\nTransfer-Encoding: chunked\r\nConnection: close\r\n\r\n"
        )
        self._writer.write(lines.encode())

    def _chunk(self, data: bytes) -> None:
        self._writer.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")


@asynccontextmanager
async def running_openai_server(script: OpenAIScript) -> AsyncIterator[str]:
    """A server until the block ends; gives its URL."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(EOFError, ConnectionError):  # the client has left in the middle of its request
            try:
                await _Connection(script, reader, writer).serve()
            finally:
                writer.close()
                await writer.wait_closed()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"

"""Clients that nobody wants, in a process of their own: `python -m tests.chaos.attackers KIND TARGET...`.

Each prints what came of it as a line of JSON. Those that hold connections print "held" first and go on until standard
input closes.
"""

import asyncio
import json
import socket
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import httpx2

import tandem

_AT_A_TIME = 12
_TEXT_CHARS = 4_000_000
_BODY_BYTES = 8_000_000
_NUM_IDLE, _NUM_DRIPPING = 2000, 1000
_NUM_UNREAD, _UNREAD_BUFFER_BYTES = 100, 4096
_WATCHES_PER_PORT = 3

Result = dict[str, Any]


async def texts(address: str) -> Result:
    """Prompts of 4 MB and their tokens, twelve at a time, in four kinds of text."""
    kinds = ("many words ", "a", " ", "é漢字 ")
    prompts = [(kind * _TEXT_CHARS)[: _TEXT_CHARS // len(kind[0].encode())] for kind in kinds]
    prompts = [prompt.encode()[:_TEXT_CHARS].decode(errors="ignore") for prompt in prompts]
    slots, endings, slowest_s = asyncio.Semaphore(_AT_A_TIME), Counter[str](), 0.0

    async def ask(number: int) -> None:
        nonlocal slowest_s
        prompt = prompts[number // 2 % len(prompts)]
        async with slots:
            began_s = time.monotonic()
            try:
                if number % 2:
                    await client.tokenize(prompt=prompt, timeout=120)
                else:
                    await client.generate(prompt=prompt, max_new_tokens=1, timeout=120)
                ending = "answered"
            except tandem.TandemError as error:
                ending = type(error).__name__
            endings[f"{('generate', 'tokenize')[number % 2]}: {ending}"] += 1
            slowest_s = max(slowest_s, time.monotonic() - began_s)

    async with tandem.AsyncClient(address, max_retries=0) as client:
        await asyncio.gather(*map(ask, range(4 * _AT_A_TIME)))
    return {"endings": endings, "slowest_s": slowest_s}


def _bodies() -> dict[str, tuple[str, bytes]]:
    """Path and body of requests with lists of wrong elements."""
    chat, completion = {"model": ""}, {"model": "", "prompt": "x"}
    content = {"messages": [{"role": "user", "content": "x"}]}
    members: dict[str, tuple[str, dict[str, Any], str, str]] = {
        "messages of {}": ("/v1/chat/completions", chat, "messages", "{}"),
        "messages of 1": ("/v1/chat/completions", chat, "messages", "1"),
        "tools of {}": ("/v1/chat/completions", content, "tools", "{}"),
        "stop of 1": ("/v1/completions", completion, "stop", "1"),
        "prompt of []": ("/v1/completions", {}, "prompt", "[]"),
        'prompt of "" and {}': ("/v1/completions", {}, "prompt", '""'),
        "logit_bias of nulls": ("/v1/completions", completion, "logit_bias", "null"),
        "inputs of 1": ("/invocations", {}, "inputs", "1"),
        "TGI's stop of 1": ("/generate", {"inputs": "x"}, "parameters.stop", "1"),
    }
    return {name: (path, _body(base, member, element)) for name, (path, base, member, element) in members.items()}


def _body(base: dict[str, Any], member: str, element: str) -> bytes:
    if member == "logit_bias":
        value = "{" + ",".join(f'"{number}":null' for number in range(_BODY_BYTES // 16)) + "}"
    else:
        last = ",{}" if element == '""' else ""
        value = "[" + ",".join([element] * ((_BODY_BYTES - 200) // (len(element) + 1))) + last + "]"
    outer, _, name = member.rpartition(".")
    text = f'"{name}":{value}'
    text = f'"{outer}":{{{text}}}' if outer else text
    return ("{" + ",".join([json.dumps(base)[1:-1], text] if base else [text]) + "}").encode()


async def bodies(url: str) -> Result:
    """Bodies of 8 MB, one after the other."""
    statuses, slowest_s = dict[str, str](), 0.0
    async with httpx2.AsyncClient(base_url=url, timeout=300) as http:
        for name, (path, body) in _bodies().items():
            began_s = time.monotonic()
            try:
                status = (await http.post(path, content=body, headers={"content-type": "application/json"})).status_code
                statuses[name] = str(status)
            except httpx2.TransportError as error:  # cut off while it was sending, which is an answer too
                statuses[name] = type(error).__name__
            slowest_s = max(slowest_s, time.monotonic() - began_s)
    return {"statuses": statuses, "slowest_s": slowest_s}


async def idle(url: str) -> Result:
    """2,000 connections that say nothing, and 1,000 that say a byte of a header a second."""
    begin = b"GET /ping HTTP/1.1\r\nhost: x\r\nx-drip: "
    silent = [await _connected(url, b"") for _ in range(_NUM_IDLE)]
    dripping = [await _connected(url, begin) for _ in range(_NUM_DRIPPING)]
    began_s, last_closed_s, num_open = time.monotonic(), 0.0, len(silent) + len(dripping)
    async for _ in _held_open():
        silent = [connection for connection in silent if _is_open(connection)]
        dripping = [connection for connection in dripping if _is_open(connection, b"a")]
        if len(silent) + len(dripping) < num_open:
            num_open, last_closed_s = len(silent) + len(dripping), time.monotonic() - began_s
    return {"idle": len(silent), "dripping": len(dripping), "last_closed_s": last_closed_s}


async def unread(url: str) -> Result:
    """100 streams of which nothing is read."""
    body = {"prompt": "The", "max_tokens": 400, "n": 2, "logprobs": 5, "stream": True, "ignore_eos": True}
    content = json.dumps(body).encode()
    lines = ("POST /v1/completions HTTP/1.1", "host: 127.0.0.1", "content-type: application/json")
    request = "\r\n".join((*lines, f"content-length: {len(content)}", "", "")).encode() + content
    clients = [await _connected(url, request, _UNREAD_BUFFER_BYTES) for _ in range(_NUM_UNREAD)]
    async for _ in _held_open():
        pass
    return {"clients": len(clients)}


async def watchers(*addresses: str) -> Result:
    """Health watchers that announce an HTTP/2 window of 0, some at each port."""
    clients = [
        await _connected(f"http://{address}", _watch()) for address in addresses for _ in range(_WATCHES_PER_PORT)
    ]
    async for _ in _held_open():
        pass
    return {"watchers": len(clients)}


def _watch() -> bytes:
    """HTTP/2's preface, settings with an initial window of 0, and a call of Health/Watch for the whole server."""
    headers = {
        ":method": "POST",
        ":scheme": "http",
        ":path": "/grpc.health.v1.Health/Watch",
        ":authority": "localhost",
        "content-type": "application/grpc",
        "te": "trailers",
    }
    packed = b"".join(b"\0" + _literal(name) + _literal(value) for name, value in headers.items())
    settings = (4).to_bytes(2, "big") + (0).to_bytes(4, "big")
    end_headers, end_stream = 4, 1
    return (
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
        + _frame(4, 0, 0, settings)
        + _frame(1, end_headers, 1, packed)
        + _frame(0, end_stream, 1, bytes(5))
    )


def _literal(text: str) -> bytes:
    """A string of HPACK, without Huffman's code."""
    return bytes([len(text)]) + text.encode()


def _frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return len(payload).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + payload


async def _connected(url: str, begin: bytes, buffer_bytes: int = 0) -> socket.socket:
    """A connection that has said `begin`; nothing is read from it."""
    host, _, port = url.removeprefix("http://").rpartition(":")
    connection = socket.socket()
    connection.setblocking(False)
    if buffer_bytes:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer_bytes)
    await asyncio.get_running_loop().sock_connect(connection, (host, int(port)))
    await asyncio.get_running_loop().sock_sendall(connection, begin)
    return connection


def _is_open(connection: socket.socket, data: bytes = b"") -> bool:
    """False once the server has closed it. It says `data` first."""
    try:
        connection.send(data)
        return connection.recv(1, socket.MSG_PEEK) != b""
    except BlockingIOError:
        return True
    except OSError:
        return False


async def _held_open() -> AsyncIterator[None]:
    """Say that all is in place; then once a second, until standard input closes."""
    sys.stdout.write("held\n")
    sys.stdout.flush()
    end = asyncio.create_task(asyncio.to_thread(sys.stdin.read))
    while not end.done():
        await asyncio.wait([end], timeout=1.0)
        yield


KINDS: dict[str, Callable[..., Coroutine[Any, Any, Result]]] = {
    attack.__name__: attack for attack in (texts, bodies, idle, unread, watchers)
}

if __name__ == "__main__":
    sys.stdout.write(json.dumps(asyncio.run(KINDS[sys.argv[1]](*sys.argv[2:]))) + "\n")

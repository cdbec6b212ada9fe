"""Bodies that mean no good: each gets its status and a reason, and the event loop goes on meanwhile.

A row is one input with the status that answers it. Bodies of 8 MB were frozen on for minutes before there were limits.
"""

import codecs
import gzip
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest

from gateway.schema import MAX_MESSAGES
from tests.defects import Repaired
from tests.service.gateway.http import running_gateway
from tests.service.gateway.raw_http import answer_to, loop_stops, request
from tests.service.gateway.test_hostile import most_allocated

LARGE = (8 << 20) - 1024
CHAT, COMPLETIONS, LMI, TGI = "/v1/chat/completions", "/v1/completions", "/invocations", "/generate"
JSON, CSV = "application/json", "text/csv"
# A large body is copied a few times; parsing it into objects took gigabytes.
MOST_BYTES = 8 * LARGE
LONGEST_STOP_S = 0.2


def filled(start: bytes, element: bytes, end: bytes, size: int = LARGE) -> bytes:
    return start + element * ((size - len(start) - len(end)) // len(element)) + end


def chat(**members: str) -> bytes:
    """`members` are JSON text."""
    listed = "".join(f', "{name}": {value}' for name, value in members.items())
    return f'{{"messages": [{{"role": "user", "content": "x"}}]{listed}}}'.encode()


@dataclass(frozen=True)
class Row:
    """`says` is a part of the answer."""

    name: str
    path: str
    status: int
    make: Callable[[], bytes] = field(repr=False)
    content_type: str = JSON
    says: str = ""
    defect: str = ""


def of(name: str, path: str, status: int, body: bytes | Callable[[], bytes], says: str = "", **more: Any) -> Row:
    return Row(name, path, status, body if callable(body) else lambda: body, says=says, **more)


NUMBERS = [
    of("n 5,000,000", CHAT, 400, chat(n="5000000", stream="true"), "'n'", defect="D4"),
    of("n 5,000,000 with tools", CHAT, 400, chat(n="5000000", tools='[{"function":{"name":"f"}}]'), "'n'", defect="D4"),
    of("n 5,000,000 of completions", COMPLETIONS, 400, b'{"prompt": "x", "n": 5000000}', "'n'", defect="D4"),
    of("n 5,000,000 of LMI", LMI, 424, b'{"inputs": "x", "parameters": {"n": 5000000}}', "n: ", defect="D4"),
    of("best_of of TGI", TGI, 422, b'{"inputs": "x", "parameters": {"best_of": 5000000}}', "best_of", defect="D4"),
    of("n 1e20", CHAT, 400, chat(n="1e20"), "n: ", defect="D16"),
    of("n of 400 digits", CHAT, 400, chat(n="9" * 400), "n: ", defect="D16"),
    of("max_tokens of 400 digits", CHAT, 400, chat(max_tokens="9" * 400), "max_tokens", defect="D16"),
    of("max_tokens of 5,000 digits", CHAT, 400, chat(max_tokens="9" * 5000), "number", defect="D16"),
    of("max_tokens 1e20", COMPLETIONS, 400, b'{"prompt": "x", "max_tokens": 1e20}', "max_tokens", defect="D16"),
    of("temperature of 400 digits", CHAT, 400, chat(temperature="9" * 400), "temperature", defect="D16"),
    of("temperature 1e308", CHAT, 400, chat(temperature="1e308"), "temperature"),
    of("seed 2^70", CHAT, 400, chat(seed=str(2**70)), "seed"),
    of("token ids below 0", COMPLETIONS, 400, b'{"prompt": [-1]}', "prompt"),
    of(
        "LMI: max_new_tokens of 400 digits",
        LMI,
        424,
        b'{"inputs":"x","parameters":{"max_new_tokens":%s}}' % (b"9" * 400),
    ),
    of("TGI: truncate of 400 digits", TGI, 422, b'{"inputs":"x","parameters":{"truncate":%s}}' % (b"9" * 400)),
]

LONG_LISTS = [
    of(
        f"{element.decode()} in {member}",
        path,
        status,
        partial(filled, b'{"%s": [' % member.encode(), element + b",", element + b"]}"),
        defect="D5" if element == b"{}" else "",
    )
    for path, member, status in ((CHAT, "messages", 400), (COMPLETIONS, "prompt", 400), (LMI, "inputs", 424))
    for element in (b"{}", b"[]", b'""', b"1.5", b"null")
]
LARGE_BODIES = [
    *LONG_LISTS,
    of("stop", COMPLETIONS, 400, lambda: filled(b'{"prompt": "x", "stop": [', b"1,", b"1]}")),
    of("tools", CHAT, 400, lambda: filled(chat()[:-1] + b', "tools": [', b"{},", b"{}]}")),
    of("TGI: stop", TGI, 422, lambda: filled(b'{"inputs": "x", "parameters": {"stop": [', b"1,", b"1]}}")),
    of("a member nobody knows", CHAT, 400, lambda: filled(chat()[:-1] + b', "else": [', b"[],", b"[]]}")),
    of("a list of lists of one id", COMPLETIONS, 400, lambda: filled(b'{"prompt": [', b"[1],", b"[1]]}")),
    of("distinct keys", CHAT, 400, lambda: b"{" + b",".join(b'"%d":1' % n for n in range(LARGE // 12)) + b"}"),
    of("nesting", CHAT, 400, lambda: b"[" * LARGE),
    of("digits", CHAT, 400, lambda: b"1" * LARGE),
    of("quotes", CHAT, 400, lambda: b'"' * LARGE),
    of("backslashes", CHAT, 400, lambda: b'["' + b"\\" * (LARGE - 4) + b'"]'),
    of("messages", CHAT, 400, lambda: filled(b'{"messages": [', b'{"role":"user","content":""},', b"{}]}", 200_000)),
    of("logit_bias", CHAT, 400, lambda: chat(logit_bias="{" + ",".join(f'"a{n}": "x"' for n in range(60_000)) + "}")),
    of("a schema", CHAT, 400, lambda: chat(guided_json='{"enum": [' + "1," * 400_000 + "1]}"), "16,384 values"),
    of("CSV: commas", LMI, 424, lambda: filled(b"inputs,x\n", b",", b""), content_type=CSV, says="commas"),
    of("CSV: rows", LMI, 424, lambda: filled(b"inputs,x\n", b"a\n", b""), content_type=CSV, says="rows"),
    of("CSV: one text", LMI, 424, lambda: filled(b"inputs\n", b"a", b""), content_type=CSV, says="field larger"),
]

CSV_BODIES = [
    of("CSV with a field too large", LMI, 424, b"inputs\n" + b"x" * 140_000, "field larger", content_type=CSV),
    of("CSV with a bare CR", LMI, 424, b"inputs\nsecret\rtext", "new-line", content_type=CSV),
    of("CSV that is not UTF-8", LMI, 424, b"inputs\n\xff", "UTF-8", content_type=CSV),
]


def rows(*tables: list[Row]) -> Any:
    return pytest.mark.parametrize("row", [pytest.param(row, id=row.name) for table in tables for row in table])


@rows(NUMBERS, CSV_BODIES)
async def test_invalid_values_are_refused_with_a_reason(row: Row, repaired: Repaired) -> None:
    async with running_gateway() as gateway:
        with most_allocated() as most_bytes:
            async with loop_stops() as stops:
                status, answer = await answer_to(gateway.url, request(row.path, row.make(), row.content_type))
        assert (status, row.says.encode() in answer) == (row.status, True), answer
        assert b"something went wrong" not in answer
        assert gateway.script.requests == []
        assert (gateway.backend.metrics.num_waiting, gateway.backend.metrics.num_running) == (0, 0)
    assert stops.longest_s < LONGEST_STOP_S
    assert most_bytes() < 16 << 20
    if row.defect:
        repaired(row.defect, f"{row.name}: {status}, loop stopped {1000 * stops.longest_s:.0f} ms at most, memory flat")


@rows(LARGE_BODIES)
async def test_large_bodies_are_refused_quickly(row: Row, repaired: Repaired) -> None:
    raw = request(row.path, row.make(), row.content_type)
    async with running_gateway() as gateway:
        async with loop_stops() as stops:
            status, answer = await answer_to(gateway.url, raw)
        with most_allocated() as most_bytes:  # by itself: it slows everything down
            await answer_to(gateway.url, raw)
        assert (status, row.says.encode() in answer) == (row.status, True), answer
        assert len(answer) < 2000
        assert gateway.script.requests == []
    assert stops.longest_s < LONGEST_STOP_S
    assert most_bytes() < MOST_BYTES
    if row.defect:
        cost = f"loop stopped {1000 * stops.longest_s:.0f} ms at most, {most_bytes() >> 20} MiB"
        repaired(row.defect, f"{len(raw) / 1e6:.1f} MB of {row.name}: {status}, {cost}")


LEGITIMATE = [
    of("a byte order mark", CHAT, 200, lambda: codecs.BOM_UTF8 + chat()),
    of("a text of 4 MB", COMPLETIONS, 200, lambda: b'{"prompt": "%s"}' % (b"a, " * 1_300_000)),
    of("a text of escapes", CHAT, 200, lambda: chat()[:-4] + b"\\u00e9\\n" * 500_000 + b'"}]}'),
    of("200,000 token ids", COMPLETIONS, 200, lambda: b'{"prompt": [%s1]}' % (b"123," * 199_999)),
    of(
        "messages",
        CHAT,
        200,
        lambda: b'{"messages": [%s]}' % b",".join([b'{"role":"user","content":"x"}'] * MAX_MESSAGES),
    ),
]


@rows(LEGITIMATE)
async def test_large_bodies_that_are_legitimate(row: Row) -> None:
    async with running_gateway() as gateway, loop_stops() as stops:
        status, answer = await answer_to(gateway.url, request(row.path, row.make()))
    assert status == row.status, answer[:300]
    assert stops.longest_s < 2 * LONGEST_STOP_S, "the fake router parses it, too, on the same loop"


@pytest.mark.parametrize(
    "path", ["/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/tokenize"]
)
async def test_a_body_that_is_no_object_is_named_so(path: str) -> None:
    async with running_gateway() as gateway:
        response = await gateway.post(path, [])
    assert response.status_code in (400, 422)
    assert "the body must be a JSON object" in response.text


async def test_a_compressed_body_is_refused_by_its_name() -> None:
    async with running_gateway() as gateway:
        headers = {"content-encoding": "gzip"}
        response = await gateway.http.post("/v1/completions", content=gzip.compress(b"{}"), headers=headers)
    assert response.status_code == 415
    assert "content-encoding gzip" in response.json()["error"]["message"]


async def test_a_slash_behind_the_models_lists_them() -> None:
    async with running_gateway() as gateway:
        listed, with_slash = [(await gateway.http.get(path)).json() for path in ("/v1/models", "/v1/models/")]
    assert with_slash == listed
    assert listed["data"]


async def test_a_function_needs_a_name() -> None:
    body = {"messages": [{"role": "user", "content": "x"}], "tool_choice": "required"}
    async with running_gateway() as gateway:
        response = await gateway.post("/v1/chat/completions", body | {"tools": [{"function": {"name": ""}}]})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "tools[0].function.name"


async def test_a_forced_call_beside_a_structure_is_the_fault_of_tool_choice() -> None:
    body = {"messages": [{"role": "user", "content": "x"}], "tools": [{"function": {"name": "f"}}]}
    odd = {"tool_choice": "required", "guided_json": {"type": "object"}}
    async with running_gateway() as gateway:
        response = await gateway.post("/v1/chat/completions", body | odd)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "tool_choice"

"""What every stream keeps to, however it goes."""

import asyncio
import json
import random
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import pytest
from starlette.responses import StreamingResponse

import tandem
from gateway.answers import JSON_LINES, SSE, SSE_DONE, stream_answer
from gateway.errors import Problem
from gateway.feed import Feed
from gateway.lmi.requests import InvocationBody
from gateway.lmi.responses import FORMATS, Lines, LmiShape
from gateway.openai.chat import AnswerFormat, ChatChunks
from gateway.openai.completion_members import Envelope
from gateway.openai.requests import ChatBody, ClientFieldNames
from gateway.tgi.endpoints import StreamEvents, TgiShape
from tandem import FinishReason, Token, TokenEvent, Usage
from tests.evidence import Evidence

FAULTS = [
    tandem.InternalError,
    tandem.NoWorkers,
    tandem.ConnectionFailed,
    tandem.DeadlineExceeded,
    tandem.SlowReader,
    tandem.Cancelled,
]
NUM_STREAMS = 10_000


def exchange(ping_interval_s: float = 10.0) -> Any:
    """As much of one as a stream needs."""
    progress = SimpleNamespace(failed=lambda problem: None)
    settings = SimpleNamespace(ping_interval_s=ping_interval_s)
    return SimpleNamespace(settings=settings, request_id="r", progress=progress)


async def events(num_tokens: int, fault: Exception | None) -> AsyncGenerator[TokenEvent, None]:
    """Some tokens, then the fault, or a proper end."""
    for number in range(num_tokens):
        is_last = fault is None and number == num_tokens - 1
        usage = Usage(1, num_tokens) if is_last else None
        reason = FinishReason.LENGTH if is_last else None
        yield TokenEvent(0, Token(number, "x", -0.5), "request", reason, usage)
    if fault is not None:
        raise fault


def chat() -> Any:
    body = ChatBody(messages=[])
    envelope = Envelope.new("chat.completion", "chatcmpl", "m")
    return ChatChunks(body, envelope, AnswerFormat(None, "none"), ClientFieldNames.of(body))


def tgi() -> Any:
    shape = TgiShape(details=True, prefill=False, prefix="", seed=None, top_tokens=False, max_new_tokens=None)
    return StreamEvents(shape)


def lmi() -> Any:
    return Lines(LmiShape(FORMATS["rolling"], InvocationBody(inputs="x")))


def ends_well_chat(lines: list[bytes], faulted: bool) -> bool:
    last = json.loads(lines[-2].removeprefix(b"data: "))
    return lines[-1] == b"data: [DONE]" and (("error" in last) == faulted)


def ends_well_tgi(lines: list[bytes], faulted: bool) -> bool:
    last = json.loads(lines[-1].removeprefix(b"data: "))
    return "error_type" in last if faulted else last["generated_text"] is not None


def ends_well_lmi(lines: list[bytes], faulted: bool) -> bool:
    last = json.loads(lines[-1])
    return (last.get("details", {}).get("finish_reason") == "error") == faulted and "generated_text" in last


@pytest.mark.parametrize(
    ("framing", "renderer", "ends_well"),
    [(SSE_DONE, chat, ends_well_chat), (SSE, tgi, ends_well_tgi), (JSON_LINES, lmi, ends_well_lmi)],
    ids=["openai", "tgi", "lmi"],
)
async def test_every_stream_ends_properly(
    framing: Any, renderer: Callable[[], Any], ends_well: Callable[[list[bytes], bool], bool], evidence: Evidence
) -> None:
    draw = random.Random(22)
    bare = 0
    for _ in range(NUM_STREAMS // 3):
        fault = draw.choice([None, *FAULTS])
        error = None if fault is None else fault("broken")
        feed = Feed([partial(events, draw.randint(1, 4), error)])
        response = await stream_answer(exchange(), feed, renderer(), framing)
        assert isinstance(response, StreamingResponse)
        body = b"".join([chunk async for chunk in _chunks(response)])
        await feed.close()
        lines = [line for line in body.split(b"\n") if line]
        bare += not ends_well(lines, fault is not None)
    evidence("R22", "streams without a proper end", f"{bare} of {NUM_STREAMS // 3}", target="0", ok=bare == 0)
    assert bare == 0


def _chunks(response: StreamingResponse) -> AsyncIterator[bytes]:
    return response.body_iterator  # type: ignore[return-value]


async def test_an_early_error_is_raised_and_a_late_one_is_not() -> None:
    with pytest.raises(tandem.NoWorkers):
        await stream_answer(exchange(), Feed([partial(events, 0, tandem.NoWorkers("none"))]), chat(), SSE_DONE)


async def test_tokens_that_are_held_back_are_silence() -> None:
    """A long argument that is sent when it is complete, say: proxies would drop the connection meanwhile."""
    pinged = asyncio.Event()

    async def held_back() -> AsyncGenerator[TokenEvent, None]:
        async with asyncio.timeout(60):
            while not pinged.is_set():
                yield TokenEvent(0, Token(1, ""), "request")
                await asyncio.sleep(0)
        yield TokenEvent(0, Token(2, "x"), "request", FinishReason.LENGTH, Usage(1, 2))

    feed = Feed([held_back])
    response = await stream_answer(exchange(ping_interval_s=0.2), feed, chat(), SSE_DONE)
    chunks = []
    async for chunk in _chunks(cast(StreamingResponse, response)):
        chunks.append(chunk)
        if chunk == SSE_DONE.ping:
            pinged.set()
    await feed.close()
    assert pinged.is_set()
    assert b'"content":"x"' in b"".join(chunks)


def test_every_sdk_error_is_in_the_table() -> None:
    from gateway.errors import TABLE

    def below(cls: type[Exception]) -> set[type[Exception]]:
        return {each for child in cls.__subclasses__() for each in {child} | below(child)}

    assert below(tandem.TandemError) <= TABLE.keys()


def test_errors_that_could_name_addresses_have_a_fixed_text() -> None:
    for kind in (tandem.ConnectionFailed, tandem.Cancelled, tandem.InternalError, tandem.DeadlineExceeded, ValueError):
        assert "10.1.2.3" not in Problem.of(kind("10.1.2.3")).message


@pytest.mark.parametrize("render", [tgi, lmi])
def test_an_ending_without_a_token_has_the_whole_text(render: Callable[[], Any]) -> None:
    """As it comes after a reconnect, when all tokens have been delivered before."""
    renderer = render()
    list(renderer.event(TokenEvent(0, Token(7, "x", -0.5), "request")))
    (last,) = renderer.event(TokenEvent(0, None, "request", FinishReason.LENGTH, Usage(1, 1)))
    assert last["generated_text"] == "x"
    assert last["token"]["text"] == ""
    assert list(renderer.event(TokenEvent(0, None, "request"))) == []

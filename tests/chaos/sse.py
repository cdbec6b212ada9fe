"""Completions over HTTP as server-sent events, held against an undisturbed answer of the SDK."""

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx2

import tandem
from gateway.openai.completion_members import finish_reason

_NAMES = {"token_ids": "prompt", "max_new_tokens": "max_tokens"}
_LEFT_OUT = ("top_logprobs",)
_KINDS = {
    "rate_limit_exceeded": "Overloaded",
    "unavailable": "NoWorkers",
    "timeout": "DeadlineExceeded",
    "slow_reader": "SlowReader",
}


@dataclass(slots=True)
class SseAnswer:
    """The content of one stream so far. `ending` is "finished", or the kind of its error."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    finish_reasons: list[str] = field(default_factory=list)
    num_done: int = 0
    times_s: list[float] = field(default_factory=list)
    ending: str = "ConnectionFailed"
    error: str = ""
    on_token: Callable[[], None] = lambda: None


def body_of(ask: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of `AsyncClient.stream` as the body of a streamed completion."""
    named = {_NAMES.get(name, name): value for name, value in ask.items() if name not in _LEFT_OUT}
    return {"temperature": 0.0, "stream": True, "return_token_ids": True} | named


async def read_completion(http: httpx2.AsyncClient, body: Mapping[str, Any], answer: SseAnswer) -> None:
    """Fill `answer` as the stream comes. Errors of the service and of the connection are its ending."""
    try:
        async with http.stream("POST", "/v1/completions", json=dict(body)) as response:
            if response.status_code != 200:
                _take_error(json.loads(await response.aread())["error"], answer)
                return
            async for line in response.aiter_lines():
                _take(line, answer)
    except httpx2.TransportError as error:
        answer.ending, answer.error = "ConnectionFailed", f"{type(error).__name__}: {error}"
        return
    if answer.num_done and not answer.error:
        answer.ending = "finished"


def _take(line: str, answer: SseAnswer) -> None:
    if not line.startswith("data:"):
        return
    data = line.removeprefix("data:").strip()
    if data == "[DONE]":
        answer.num_done += 1
        return
    event = json.loads(data)
    if "error" in event:
        _take_error(event["error"], answer)
        return
    for choice in event["choices"]:
        if choice.get("token_ids"):
            answer.token_ids += choice["token_ids"]
            answer.times_s.append(time.monotonic())
            answer.on_token()
        answer.text += choice["text"]
        if choice["finish_reason"] is not None:
            answer.finish_reasons.append(choice["finish_reason"])


def _take_error(error: Mapping[str, Any], answer: SseAnswer) -> None:
    answer.ending, answer.error = _KINDS.get(error["code"], error["type"]), str(error["message"])


def sse_faults(answer: SseAnswer, expected: tandem.Choice) -> list[str]:
    """Describe everything that is wrong with a stream. The text of a stream that ended with an error must be a
    beginning of the answer.
    """
    ids, faults = [token.id for token in expected.tokens], []
    if answer.ending == "finished":
        if len(answer.finish_reasons) != 1 or answer.num_done != 1:
            faults.append(f"ended {len(answer.finish_reasons)} times, {answer.num_done} [DONE]")
        elif answer.finish_reasons != [finish_reason(expected.finish_reason)]:
            faults.append(f"ended with {answer.finish_reasons[0]}, not {expected.finish_reason}")
        if answer.text != expected.text:
            faults.append("the text differs")
        if answer.token_ids != ids:
            faults.append(f"tokens differ ({len(answer.token_ids)} of {len(ids)} came)")
    elif answer.token_ids != ids[: len(answer.token_ids)]:
        faults.append(f"tokens differ within the first {len(answer.token_ids)}")
    return faults

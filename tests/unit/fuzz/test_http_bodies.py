"""Mutated bodies on every route that takes one: each gets an answer or a refusal, and none is an error of ours."""

import json
import random
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

import httpx2
import pytest
from starlette.routing import Route

import tandem
from gateway import exchange as exchange_module
from gateway.app import build_app
from gateway.backend import build_backend
from gateway.settings import GatewaySettings
from tandem import FinishReason, Token, TokenEvent, Usage
from tandem._requests import generate_request, tokenize_request
from tests.evidence import Evidence

NUM_BODIES = 3_000
BODIES: list[dict[str, Any]] = [
    {"inputs": "x", "parameters": {"temperature": 0.5, "stop": ["a"], "details": True, "top_n_tokens": 2}},
    {"inputs": ["x", "y"], "parameters": {"n": 2, "seed": 1, "truncate": 3, "decoder_input_details": True}},
    {
        "messages": [{"role": "user", "content": [{"type": "text", "text": "x"}]}],
        "n": 2,
        "tools": [{"function": {"name": "f"}}],
    },
    {"prompt": [[1, 2], [3]], "logprobs": 2, "echo": True, "stream": True, "logit_bias": {"3": 1.5}},
    {"prompt": "x", "stream": True, "stream_options": {"include_usage": True}, "max_tokens": 3, "n": 2},
    {"inputs": "x", "stream": True, "parameters": None},
    {
        "system": [{"type": "text", "text": "x"}],
        "messages": [
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": "x"}]},
            {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "f", "input": {"b": 1}}]},
        ],
        "max_tokens": 9,
        "tools": [{"name": "f", "input_schema": {"type": "object"}}],
        "tool_choice": {"type": "tool", "name": "f"},
        "stop_sequences": ["x"],
        "stream": True,
    },
    {
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "x"}]},
            {"type": "reasoning", "summary": [{"type": "summary_text", "text": "x"}]},
            {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "a", "output": "x"},
        ],
        "tools": [{"type": "function", "name": "f", "parameters": {"type": "object"}}],
        "tool_choice": {"type": "function", "name": "f"},
        "text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": "object"}}},
        "stream": True,
    },
]
ODD: list[Any] = [None, True, -1, 1e308, 2**70, "", "\ud800", "x" * 300, [], {}, [[[]]], {"a": {"b": []}}, float("nan")]


class Answering:
    """Stands in for the SDK's client: builds real requests, and answers with one token for each choice."""

    def acting_for(self, key: str | None) -> "Answering":
        return self

    async def models(self, timeout: float = 0) -> tuple[tandem.Model, ...]:
        return (tandem.Model("m", 9, 10, 300, (), True, True),)

    async def model(self, name: str = "", timeout: float = 0) -> tandem.Model:
        return (await self.models())[0]

    async def tokenize(self, **arguments: Any) -> tuple[Token, ...]:
        tokenize_request({name: value for name, value in arguments.items() if name != "timeout"})  # type: ignore[arg-type]
        return (Token(1, "x"), Token(2, "y"))

    async def render(self, **arguments: Any) -> str:
        return "xy"

    async def wait_ready(self, timeout: float = 0) -> None:
        return

    async def drain(self, worker_id: str, timeout: float = 0) -> None:
        return

    undrain = drain

    async def switch_role(self, worker_id: str, role: str, timeout: float = 0) -> None:
        return

    async def stream(self, **arguments: Any) -> AsyncGenerator[TokenEvent, None]:
        request = generate_request(arguments)  # type: ignore[arg-type]
        if request.num_choices > 8:
            raise tandem.InvalidRequest("n")
        for index in range(request.num_choices or 1):
            yield TokenEvent(index, Token(1, "x", -0.5), "id", FinishReason.LENGTH, Usage(1, 1))


@pytest.fixture
async def http(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[httpx2.AsyncClient]:
    def fail(*_: Any, **__: Any) -> None:
        raise AssertionError("an error of ours")

    monkeypatch.setattr(exchange_module.log, "exception", fail, raising=False)
    app = build_app(build_backend(GatewaySettings(), Answering()))  # type: ignore[arg-type]
    transport = httpx2.ASGITransport(app)
    async with httpx2.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
        yield client


def post_routes() -> list[str]:
    app = build_app(build_backend(GatewaySettings(), Answering()))  # type: ignore[arg-type]
    paths = [route.path for route in app.routes if isinstance(route, Route) and "POST" in (route.methods or ())]
    return [path.replace("{model}", "m").replace("{version}", "1").replace("{worker}", "w") for path in paths]


def mutated(value: Any, draw: random.Random) -> Any:
    """One place somewhere inside is replaced, dropped or doubled."""
    if isinstance(value, dict) and value and draw.random() < 0.8:
        name = draw.choice(list(value))
        if draw.random() < 0.1:
            return {key: each for key, each in value.items() if key != name}
        return value | {name: mutated(value[name], draw)}
    if isinstance(value, list) and value and draw.random() < 0.8:
        place = draw.randrange(len(value))
        return [*value[:place], mutated(value[place], draw), *value[place:]]
    return draw.choice(ODD)


async def test_mutated_bodies(http: httpx2.AsyncClient, evidence: Evidence) -> None:
    draw = random.Random(17)
    paths = post_routes()
    assert len(paths) > 12
    odd = []
    for _ in range(NUM_BODIES):
        body = json.dumps(mutated(draw.choice(BODIES), draw)).encode()
        if draw.random() < 0.1:
            body = body[: draw.randrange(len(body))] + bytes([draw.randrange(256)])
        path = draw.choice(paths)
        response = await http.post(path, content=body, headers={"content-type": "application/json"})
        if response.status_code not in (200, 400, 415, 422, 424):
            odd.append((path, response.status_code, body))
    assert odd == []
    evidence("R17", "unhandled exceptions, mutated HTTP bodies", f"0 of {NUM_BODIES}", target="0", ok=True)

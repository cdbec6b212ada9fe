"""Structured output through a real mesh of the bundled model, also when a worker is killed in the middle."""

import asyncio
import json
import signal
from pathlib import Path
from typing import Any

import jsonschema
import openai
import pytest

import tandem
from tests.e2e.mesh_process import mesh, pools_are_whole

MODEL = Path(__file__).parents[2] / "demo_model" / "tandem-small"
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "animal": {"enum": ["cat", "dog", "mouse"]},
        "names": {"type": "array", "items": {"type": "string", "maxLength": 12}, "minItems": 25, "maxItems": 30},
        "age": {"type": "integer", "minimum": 1, "maximum": 20},
    },
    "required": ["animal", "names", "age"],
    "additionalProperties": False,
}
FEEDS: dict[str, Any] = {
    "feed": {
        "type": "object",
        "properties": {"food": {"$ref": "#/$defs/food"}},
        "required": ["food"],
        "additionalProperties": False,
        "$defs": {"food": {"enum": ["fish", "cheese"]}},
    },
    "walk": {
        "type": "object",
        "properties": {"minutes": {"type": "integer", "minimum": 0, "maximum": 90}},
        "additionalProperties": False,
    },
}
TOOLS: Any = [{"type": "function", "function": {"name": name, "parameters": FEEDS[name]}} for name in FEEDS]
CHAT: Any = [{"role": "user", "content": "Tell me about your pet."}]


def requests() -> list[dict[str, Any]]:
    """Schemas with different seeds, beside requests that may say what they like."""
    free = [{"messages": CHAT, "max_new_tokens": 250, "ignore_eos": True, "seed": seed} for seed in (1, 2)]
    bound = [{"messages": CHAT, "json_schema": SCHEMA, "seed": seed, "max_new_tokens": 900} for seed in (3, 4, 5)]
    return [{"temperature": 1.0, "top_logprobs": 1} | request for request in (*free, *bound)]


def shown(tokens: Any) -> list[tuple[int, float]]:
    return [(token.id, token.logprob) for token in tokens]


async def test_schemas_hold_and_a_killed_worker_changes_nothing(tmp_path: Path) -> None:
    async with (
        mesh(MODEL, tmp_path, "--decode", "2", "--http-port", "0") as running,
        tandem.AsyncClient(running.address) as client,
    ):
        await refusals(client)
        await over_http(running.http)
        expected = await asyncio.gather(*(client.generate(**request) for request in requests()))
        for result in expected[2:]:
            assert result.finish_reason == "eos_token"
            jsonschema.validate(json.loads(result.text), SCHEMA)
        in_middle = [asyncio.Event() for _ in expected]

        async def follow(request: dict[str, Any], here: asyncio.Event) -> list[tandem.TokenEvent]:
            events = []
            async for event in client.stream(**request):
                events.append(event)
                if len(events) == 10:
                    here.set()
            return events

        streams = [asyncio.create_task(follow(*each)) for each in zip(requests(), in_middle, strict=True)]
        await asyncio.gather(*(event.wait() for event in in_middle))
        assert not all(stream.done() for stream in streams)
        running.signal("decode_worker", signal.SIGKILL)
        for events, result in zip(await asyncio.gather(*streams), expected, strict=True):
            assert shown(event.token for event in events) == shown(result.tokens)
        await pools_are_whole(client)


async def over_http(url: str) -> None:
    """As OpenAI's client asks for it."""
    wanted: Any = {"type": "json_schema", "json_schema": {"name": "pet", "strict": True, "schema": SCHEMA}}
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0) as client:
        answer = await client.chat.completions.create(
            model="tandem-small", messages=CHAT, response_format=wanted, seed=9, n=2
        )
        for choice in answer.choices:
            jsonschema.validate(json.loads(choice.message.content or ""), SCHEMA)
        called = await client.chat.completions.create(
            model="tandem-small",
            messages=CHAT,
            tools=TOOLS,
            tool_choice="required",
            parallel_tool_calls=False,
            seed=9,
            n=2,
        )
        for choice in called.choices:
            assert choice.finish_reason == "tool_calls"
            for call in choice.message.tool_calls or ():
                function: Any = call.function  # type: ignore[union-attr]
                jsonschema.validate(json.loads(function.arguments), FEEDS[function.name])
        bad: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"uniqueItems": True}}}
        with pytest.raises(openai.BadRequestError, match="uniqueItems"):
            await client.chat.completions.create(model="tandem-small", messages=CHAT, response_format=bad)


async def refusals(client: tandem.AsyncClient) -> None:
    """In words, before any work."""
    for request, complaint in [
        ({"json_schema": {"type": "array", "uniqueItems": True}}, "uniqueItems"),
        ({"regex": "(a"}, "regex cannot be used"),
        ({"grammar": "start: nobody"}, "unknown name"),
        ({"json_object": True, "ignore_eos": True}, "ignore_eos contradicts json_object"),
    ]:
        with pytest.raises(tandem.InvalidRequest, match=complaint):
            await client.generate(prompt="x", max_new_tokens=5, **request)

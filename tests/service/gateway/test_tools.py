"""Tools with OpenAI's own Python client, unmodified."""

import json
import threading
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest

from gateway.openai import answer_parser
from gateway.openai.tool_choice import parse_tool_use
from tandem.v1 import generation_pb2 as pb
from tests.defects import Repaired
from tests.fakes.sdk_router import Script
from tests.service.gateway.http import RunningGateway, running_gateway

MESSAGES: Any = [{"role": "user", "content": "weather?"}]
TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    }
]
CALL = '{"name": "weather", "arguments": {"city": "Zürich"}}'


@pytest.fixture
async def gateway() -> AsyncIterator[RunningGateway]:
    script = Script(story=f"I look.\n<tool_call>\n{CALL}\n</tool_call>", tool_call_format="hermes")
    async with running_gateway(script) as running:
        yield running


def client_of(gateway: RunningGateway) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="x", max_retries=0)


async def test_calls_and_their_results(gateway: RunningGateway) -> None:
    async with client_of(gateway) as client:
        answer = await client.chat.completions.create(model="fake", messages=MESSAGES, tools=TOOLS)
        choice = answer.choices[0]
        assert (choice.finish_reason, choice.message.content) == ("tool_calls", "I look.")
        assert choice.message.tool_calls is not None
        [call] = choice.message.tool_calls
        assert call.type == "function"
        assert (call.function.name, json.loads(call.function.arguments)) == ("weather", {"city": "Zürich"})
        turns = [*MESSAGES, choice.message, {"role": "tool", "tool_call_id": call.id, "content": "fine"}]
        await client.chat.completions.create(model="fake", messages=turns, tools=TOOLS)
    chat = gateway.script.requests[-1].chat
    assert json.loads(chat.tools_json) == TOOLS
    shown = json.loads(chat.messages[1].extra_json)["tool_calls"][0]
    assert shown["function"] == {"name": "weather", "arguments": {"city": "Zürich"}}, "an object, for the template"
    assert json.loads(chat.messages[2].extra_json) == {"tool_call_id": call.id}


async def test_an_answer_with_a_schema_may_be_a_call(gateway: RunningGateway) -> None:
    """Over all three APIs that know tools; messages name what the client sent."""
    gateway.script.story = f"<tool_call>\n{CALL}\n</tool_call>"
    schema = {"type": "object", "properties": {"answer": {"type": "string"}}}
    function = TOOLS[0]["function"]
    for path, body in [
        (
            "/v1/chat/completions",
            {
                "tools": TOOLS,
                "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}},
            },
        ),
        (
            "/v1/responses",
            {
                "input": "hi",
                "tools": [{"type": "function", **function}],
                "text": {"format": {"type": "json_schema", "name": "a", "schema": schema}},
            },
        ),
        (
            "/v1/messages",
            {
                "max_tokens": 99,
                "tools": [{"name": "weather", "input_schema": function["parameters"]}],
                "output_config": {"format": {"type": "json_schema", "schema": schema}},
            },
        ),
    ]:
        answer = await gateway.post(path, {"messages": MESSAGES, **body} if "input" not in body else body)
        assert answer.status_code == 200, answer.text
        assert "Zürich" in answer.text
        grammar = gateway.script.requests[-1].sampling.structure.grammar
        assert grammar.startswith("start: answer | ")
        assert '"answer":{"type":"string"}' in grammar


@pytest.mark.parametrize("n", [1, 2])
async def test_streams(gateway: RunningGateway, n: int) -> None:
    """Read as applications do: parts of a call are put together by its index."""
    async with client_of(gateway) as client:
        stream = await client.chat.completions.create(
            model="fake", messages=MESSAGES, tools=TOOLS, stream=True, n=n, logprobs=True
        )
        deltas = [chunk.choices[0] async for chunk in stream]
    for index in range(n):
        own = [each for each in deltas if each.index == index]
        assert "".join(each.delta.content or "" for each in own) == "I look."
        parts = [part for each in own for part in each.delta.tool_calls or ()]
        first, *rest = parts
        assert (first.index, first.type, first.function and first.function.name) == (0, "function", "weather")
        assert first.id
        assert len(rest) > 5, "arguments come as they are written"
        arguments = "".join(part.function.arguments or "" for part in parts if part.function)
        assert json.loads(arguments) == {"city": "Zürich"}
        assert [each.finish_reason for each in own if each.finish_reason] == ["tool_calls"]
        scored = sum(len(each.logprobs.content or ()) for each in own if each.logprobs)
        assert scored == len(gateway.script.story.encode())


async def test_large_tools_are_worked_on_beside_the_event_loop(
    gateway: RunningGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads = []

    def parse(*arguments: Any) -> Any:
        threads.append(threading.current_thread().name)
        return parse_tool_use(*arguments)

    monkeypatch.setattr(answer_parser, "parse_tool_use", parse)
    gateway.script.story = CALL
    async with client_of(gateway) as client:
        for num_values in (1, 16_000):
            schema = {"type": "object", "properties": {"city": {"enum": list(range(num_values))}}}
            tools: Any = [{"type": "function", "function": {"name": "weather", "parameters": schema}}]
            answer = await client.chat.completions.create(
                model="fake", messages=MESSAGES, tools=tools, tool_choice="required"
            )
            assert answer.choices[0].finish_reason == "tool_calls"
    assert threads[0] != threads[1]
    assert threads[1].startswith("bodies")


async def test_forced_calls(gateway: RunningGateway) -> None:
    """The model is held to a schema; the answer has nothing but the call."""
    gateway.script.story = CALL
    forced: Any = {"type": "function", "function": {"name": "weather"}}
    async with client_of(gateway) as client:
        answer = await client.chat.completions.create(model="fake", messages=MESSAGES, tools=TOOLS, tool_choice=forced)
        assert answer.choices[0].message.content is None
        assert [call.function.name for call in answer.choices[0].message.tool_calls or ()] == ["weather"]  # type: ignore[union-attr]
        schema = json.loads(gateway.script.requests[-1].sampling.structure.json_schema)
        assert schema["properties"]["name"] == {"const": "weather"}
        chunks = await client.chat.completions.create(
            model="fake", messages=MESSAGES, tools=TOOLS, tool_choice=forced, stream=True
        )
        assert {chunk.choices[0].delta.content async for chunk in chunks} == {None}, (
            "an empty text is one for the AI SDK"
        )
        with pytest.raises(openai.BadRequestError, match="another structure"):
            await client.chat.completions.create(
                model="fake",
                messages=MESSAGES,
                tools=TOOLS,
                tool_choice="required",
                extra_body={"guided_json": {"type": "object"}},
            )


@pytest.mark.parametrize(
    "response_format", [{"type": "json_object"}, {"type": "json_schema", "name": "x", "schema": {}}]
)
async def test_a_forced_call_has_no_text_that_a_format_could_hold(
    gateway: RunningGateway, response_format: dict[str, Any]
) -> None:
    """As with OpenAI; instructor sends both."""
    gateway.script.story = CALL
    function = TOOLS[0]["function"]
    of_chats = response_format | {"json_schema": response_format}
    for path, body in [
        ("/v1/chat/completions", {"messages": MESSAGES, "tools": TOOLS, "response_format": of_chats}),
        (
            "/v1/responses",
            {"input": "hi", "tools": [{"type": "function", **function}], "text": {"format": response_format}},
        ),
    ]:
        response = await gateway.post(path, body | {"tool_choice": "required"})
        assert response.status_code == 200, response.text
        structure = gateway.script.requests.pop().sampling.structure
        assert structure.WhichOneof("kind") == "json_schema"
        assert '"weather"' in structure.json_schema


@pytest.mark.parametrize(("parser", "calls"), [("auto", True), ("none", False), ("hermes", True), ("mistral", False)])
async def test_the_format_is_the_templates_or_the_operators(parser: str, calls: bool) -> None:
    script = Script(story=f"<tool_call>{CALL}</tool_call>", tool_call_format="hermes")
    async with running_gateway(script, tool_call_parser=parser) as gateway, client_of(gateway) as client:
        answer = await client.chat.completions.create(model="fake", messages=MESSAGES, tools=TOOLS)
    message = answer.choices[0].message
    assert bool(message.tool_calls) == calls
    assert (message.content or "") == ("" if calls else script.story)


async def test_the_format_of_an_adapter_is_its_models() -> None:
    """Also where another model is the default one, and a model's own name comes before an adapter's."""
    second = pb.Model(name="second", tool_call_format="llama3_json", has_reasoning=True, adapters=["tuned", "fake"])
    script = Script(story=f"<think>Hm.</think>{CALL}", tool_call_format="hermes", more_models=(second,))
    async with running_gateway(script) as gateway, client_of(gateway) as client:
        for model, is_read in (("second", True), ("tuned", True), ("fake", False)):
            answer = await client.chat.completions.create(model=model, messages=MESSAGES, tools=TOOLS)
            message = answer.choices[0].message
            assert bool(message.tool_calls) == is_read, model
            assert getattr(message, "reasoning_content", "") == ("Hm." if is_read else ""), model
        listed = [(model.id, model.parent) async for model in client.models.list()]  # type: ignore[attr-defined]
    assert listed == [("fake", None), ("second", None), ("tuned", "second"), ("fake", "second")]


async def test_the_format_of_an_adapter_stays_where_the_router_has_just_been_started() -> None:
    """It lists no adapters until its workers are back, and requests for them wait."""
    second = pb.Model(name="second", tool_call_format="llama3_json", adapters=["tuned"])
    script = Script(story=CALL, tool_call_format="hermes", more_models=(second,))
    async with running_gateway(script) as gateway, client_of(gateway) as client:
        for key in ("before", "after"):  # the gate asks the router anew for each key
            keyed = client.with_options(api_key=key)
            answer = await keyed.chat.completions.create(model="tuned", messages=MESSAGES, tools=TOOLS)
            assert answer.choices[0].message.tool_calls, key
            script.more_models = (pb.Model(name="second", tool_call_format="llama3_json"),)


@pytest.mark.parametrize(("name", "call"), [("mistral", f"[TOOL_CALLS][{CALL}]"), ("hermes", f"<tool_call>{CALL}")])
async def test_calls_behind_text_where_marks_are_control_tokens(name: str, call: str) -> None:
    """Without its marks such a call would be text, as it is not at the beginning."""
    async with running_gateway(Script(story=f"I look.\n{call}", tool_call_format=name)) as gateway:
        async with client_of(gateway) as client:
            answer = await client.chat.completions.create(model="fake", messages=MESSAGES, tools=TOOLS)
            await client.chat.completions.create(model="fake", messages=MESSAGES)
        assert answer.choices[0].message.content == "I look."
        assert [made.function.name for made in answer.choices[0].message.tool_calls or ()] == ["weather"]  # type: ignore[union-attr]
        with_tools, without = (request.output for request in gateway.script.requests)
        assert with_tools.HasField("skip_special_tokens")
        assert not with_tools.skip_special_tokens
        assert with_tools.HasField("include_eos")
        assert not without.HasField("skip_special_tokens"), "there is nothing to look for"


TAGGED = {
    "qwen3_coder": "<tool_call>\n<function=count>\n<parameter=city>\nZürich\n</parameter>\n<parameter=days>\n3\n"
    "</parameter>\n</function>\n</tool_call>",
    "glm45": "<tool_call>count\n<arg_key>city</arg_key>\n<arg_value>Zürich</arg_value>\n<arg_key>days</arg_key>\n"
    "<arg_value>3</arg_value>\n</tool_call>",
    "deepseek_v3": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>count\n```json\n"
    '{"city": "Zürich", "days": 3}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
}
TAGGED["cohere_command3"] = (
    '<|START_ACTION|>[{"tool_call_id": "0", "tool_name": "count", "parameters": {"city": "Zürich", "days": 3}}]'
)
COUNT: Any = [
    {
        "type": "function",
        "function": {
            "name": "count",
            "parameters": {"properties": {"city": {"type": "string"}, "days": {"type": "integer"}}},
        },
    }
]


@pytest.mark.parametrize("name", TAGGED)
async def test_calls_between_tags(name: str) -> None:
    """Values get the types of the function's schema, in streams too; forced calls are JSON whatever the format."""
    script = Script(story=f"I look.\n{TAGGED[name]}", tool_call_format=name)
    async with running_gateway(script) as gateway, client_of(gateway) as client:
        arguments: Any = {"model": "fake", "messages": MESSAGES, "tools": COUNT}
        answer = await client.chat.completions.create(**arguments)
        message = answer.choices[0].message
        assert (answer.choices[0].finish_reason, message.content) == ("tool_calls", "I look.")
        [call] = message.tool_calls or ()
        assert call.type == "function"
        assert (call.function.name, json.loads(call.function.arguments)) == ("count", {"city": "Zürich", "days": 3})
        asked = gateway.script.requests[-1].output
        assert not asked.skip_special_tokens, "the tags may be control tokens"
        assert asked.HasField("include_eos")
        assert not asked.include_eos, "the end-of-sequence token is no text for a client who did not ask for it"
        stream = await client.chat.completions.create(**arguments, stream=True)
        parts = [part async for chunk in stream for part in chunk.choices[0].delta.tool_calls or ()]
        assert [part.function.name for part in parts if part.id and part.function] == ["count"]
        assert len(parts) > 5, "arguments come as they are written"
        text = "".join(part.function.arguments or "" for part in parts if part.function)
        assert text == call.function.arguments
        script.story = '{"name": "count", "arguments": {"city": "Bern"}}'
        forced = await client.chat.completions.create(
            **arguments, tool_choice={"type": "function", "function": {"name": "count"}}
        )
        [call] = forced.choices[0].message.tool_calls or ()
        assert call.type == "function"
        assert json.loads(call.function.arguments) == {"city": "Bern"}


TIME: Any = {"type": "function", "function": {"name": "time", "parameters": {"type": "object"}}}


@pytest.mark.parametrize("mode", ["auto", "required"])
async def test_allowed_tools(gateway: RunningGateway, mode: str, repaired: Repaired) -> None:
    """The template and the schema have them alone."""
    allowed: Any = {"mode": mode, "tools": [{"type": "function", "function": {"name": "weather"}}]}
    if mode == "required":
        gateway.script.story = f"[{CALL}]"
    async with client_of(gateway) as client:
        answer = await client.chat.completions.create(
            model="fake",
            messages=MESSAGES,
            tools=[TIME, *TOOLS],
            tool_choice={"type": "allowed_tools", "allowed_tools": allowed},
        )
        flat: Any = {"type": "allowed_tools", "mode": mode, "tools": [{"type": "function", "name": "weather"}]}
        tools: Any = [{"type": "function", **tool["function"]} for tool in (TIME, *TOOLS)]
        response = await client.responses.create(model="fake", input="weather?", tools=tools, tool_choice=flat)
    assert [call.function.name for call in answer.choices[0].message.tool_calls or ()] == ["weather"]  # type: ignore[union-attr]
    assert [item.type for item in response.output][-1] == "function_call"
    for request in gateway.script.requests[-2:]:
        assert [tool["function"]["name"] for tool in json.loads(request.chat.tools_json)] == ["weather"]
        assert request.sampling.HasField("structure") is (mode == "required")
    repaired("F18", "allowed_tools restricts the functions")


@pytest.mark.parametrize(
    ("choice", "named"),
    [
        ({"allowed_tools": {"mode": "auto", "tools": [{"function": {"name": "nope"}}]}}, "no function 'nope' in tools"),
        ({"allowed_tools": {"mode": "often", "tools": []}}, "tool_choice.allowed_tools.mode"),
        ({"allowed_tools": {"mode": "required", "tools": []}}, "tool_choice needs tools"),
        ({}, "tool_choice.allowed_tools"),
    ],
)
async def test_allowed_tools_that_make_no_sense_are_refused(gateway: RunningGateway, choice: Any, named: str) -> None:
    for tools in (TOOLS, 5, [1, None]):
        body = {"messages": MESSAGES, "tools": tools, "tool_choice": {"type": "allowed_tools", **choice}}
        response = await gateway.post("/v1/chat/completions", body)
        assert response.status_code == 400
        if tools is TOOLS:
            assert named in response.json()["error"]["message"]

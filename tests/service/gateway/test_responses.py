"""/v1/responses with OpenAI's own Python client, unmodified."""

import json
from collections.abc import AsyncIterator
from typing import Any

import grpc
import openai
import pytest
from openai.types.responses import ResponseErrorEvent
from pydantic import BaseModel

from tests.fakes.sdk_router import Refusal, Script
from tests.service.gateway.http import RunningGateway, running_gateway

CALL = '{"name": "weather", "arguments": {"city": "Zürich"}}'
STORY = f"<think>\nHm, well.\n</think>\n\nI look.\n<tool_call>\n{CALL}\n</tool_call>"
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS: Any = [{"type": "function", "name": "weather", "parameters": PARAMETERS, "strict": True}]
IMAGE = {"role": "user", "content": [{"type": "input_image"}]}
FULL = Refusal(grpc.StatusCode.RESOURCE_EXHAUSTED, "full", (("tandem-error", "Overloaded"),))


@pytest.fixture
async def gateway() -> AsyncIterator[RunningGateway]:
    async with running_gateway(Script(story=STORY, tool_call_format="hermes", has_reasoning=True)) as running:
        yield running


@pytest.fixture
async def client(gateway: RunningGateway) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="x", max_retries=0) as client:
        yield client


async def test_a_conversation_with_a_call(gateway: RunningGateway, client: openai.AsyncOpenAI) -> None:
    answer = await client.responses.create(model="fake", input="weather?", instructions="Be brief.", tools=TOOLS)
    thought, message, call = answer.output
    assert thought.type == "reasoning"
    assert [part.text for part in thought.content or ()] == ["Hm, well."]
    assert (message.type, answer.output_text) == ("message", "I look.")
    assert call.type == "function_call"
    assert (call.name, json.loads(call.arguments)) == ("weather", {"city": "Zürich"})
    assert (answer.status, answer.store, answer.error) == ("completed", False, None)
    assert answer.usage is not None
    assert answer.usage.input_tokens == len("system: Be brief.\nuser: weather?\n")
    assert answer.usage.output_tokens == len(STORY.encode()) + 1
    assert 0 < answer.usage.output_tokens_details.reasoning_tokens < answer.usage.output_tokens
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "fine"}
    question = {"role": "user", "content": [{"type": "input_text", "text": "weather?"}]}
    history: Any = [question, *(item.to_dict() for item in answer.output), result]
    await client.responses.create(model="fake", input=history, tools=TOOLS, reasoning={"effort": "none"})
    chat = gateway.script.requests[-1].chat
    assert [(turn.role, turn.content) for turn in chat.messages] == [
        ("user", "weather?"),
        ("assistant", "I look."),
        ("tool", "fine"),
    ]
    shown = json.loads(chat.messages[1].extra_json)
    assert shown["reasoning_content"] == "Hm, well."
    assert shown["tool_calls"][0]["function"] == {"name": "weather", "arguments": {"city": "Zürich"}}
    assert json.loads(chat.messages[2].extra_json) == {"tool_call_id": call.call_id}
    assert json.loads(chat.tools_json)[0]["function"] == {"name": "weather", "parameters": PARAMETERS}
    assert json.loads(chat.template_kwargs_json) == {"enable_thinking": False}


async def test_streams(gateway: RunningGateway, client: openai.AsyncOpenAI) -> None:
    """The client builds the response from the events itself, and compares it with the last event's."""
    async with client.responses.stream(model="fake", input="weather?", tools=TOOLS) as stream:
        events: list[Any] = [event async for event in stream]
        final = await stream.get_final_response()
    assert [event.sequence_number for event in events] == list(range(len(events)))
    texts = {
        name: "".join(event.delta for event in events if event.type == f"response.{name}.delta")
        for name in ("reasoning_text", "output_text", "function_call_arguments")
    }
    assert texts["reasoning_text"] == "Hm, well."
    assert texts["output_text"] == final.output_text == "I look."
    assert json.loads(texts["function_call_arguments"]) == {"city": "Zürich"}
    kinds = [event.type.removeprefix("response.") for event in events if not event.type.endswith(".delta")]
    part = ["content_part.added", "done", "content_part.done"]
    assert kinds == [
        *("created", "in_progress"),
        *("output_item.added", part[0], "reasoning_text.done", part[2], "output_item.done"),
        *("output_item.added", part[0], "output_text.done", part[2], "output_item.done"),
        *("output_item.added", "function_call_arguments.done", "output_item.done"),
        "completed",
    ]
    done = [event.item.to_dict() for event in events if event.type == "response.output_item.done"]
    assert [item["type"] for item in done] == [item.type for item in final.output]
    assert done[-1]["arguments"] == texts["function_call_arguments"]


@pytest.mark.parametrize(
    ("story", "shown"),
    [(STORY, "I look."), ("I look.", "I look."), ("<think>\n\n</think>\n\nI look.\n", "I look.\n"), ("a <b", "a <b")],
)
async def test_texts_have_log_probs(
    gateway: RunningGateway, client: openai.AsyncOpenAI, story: str, shown: str
) -> None:
    gateway.script.story = story
    asked: Any = {"model": "fake", "input": "weather?", "tools": TOOLS, "include": ["message.output_text.logprobs"]}
    async with client.responses.stream(**asked, top_logprobs=2) as stream:
        events: list[Any] = [event async for event in stream]
        final = await stream.get_final_response()
    whole = await client.responses.create(**asked)
    assert (final.top_logprobs, whole.top_logprobs) == (2, 0)
    assert gateway.script.requests[-2].output.top_logprobs == 2
    for answer, num_top in ((final, 2), (whole, 0)):
        texts: list[Any] = [part for item in answer.output if item.type == "message" for part in item.content]
        [text] = texts
        assert "".join(entry.token for entry in text.logprobs) == text.text == shown
        assert {len(entry.top_logprobs) for entry in text.logprobs} == {num_top}
        assert all(entry.logprob < 0 for entry in text.logprobs)
    deltas = [event for event in events if event.type == "response.output_text.delta"]
    assert all("".join(entry.token for entry in event.logprobs) == event.delta for event in deltas)
    plain: Any = (await client.responses.create(model="fake", input="weather?")).output
    assert [part.logprobs for item in plain if item.type == "message" for part in item.content] == [[]]


async def test_the_tools_of_a_coding_agent(gateway: RunningGateway, client: openai.AsyncOpenAI) -> None:
    """Functions in a group, tools that take text, and what OpenAI runs itself; calls name what the client has sent."""
    patch: Any = {"type": "custom", "name": "patch", "format": {"type": "grammar", "syntax": "lark", "definition": "x"}}
    web: Any = {"type": "web_search"}
    spawn: Any = {"type": "function", "name": "spawn", "parameters": PARAMETERS, "strict": False, "description": "d"}
    group: Any = {"type": "namespace", "name": "agents", "description": "More of you.", "tools": [spawn, patch]}
    gateway.script.story = "".join(
        f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"
        for name, arguments in [
            ("agents__spawn", {"city": "Bern"}),
            ("patch", {"input": "+ é\n"}),
            ("agents__patch", {"text": "-"}),
        ]
    )
    async with client.responses.stream(model="fake", input="go", tools=[web, group, patch]) as stream:
        events: list[Any] = [event async for event in stream]
        answer = await stream.get_final_response()
    spawned, patched, other = (item.to_dict() for item in answer.output)
    assert [spawned[name] for name in ("type", "namespace", "name")] == ["function_call", "agents", "spawn"]
    assert [patched[name] for name in ("type", "name", "input")] == ["custom_tool_call", "patch", "+ é\n"]
    assert "namespace" not in patched
    assert [other[name] for name in ("namespace", "name", "input")] == ["agents", "patch", '{"text": "-"}']
    inputs = [event for event in events if event.type.startswith("response.custom_tool_call_input")]
    assert [event.to_dict().get("input", event.to_dict().get("delta")) for event in inputs[:2]] == ["+ é\n"] * 2
    assert [tool["type"] for tool in answer.to_dict()["tools"]] == ["namespace", "custom"], "that the model was offered"
    results = [
        {"type": f"{kind}_output", "call_id": item["call_id"], "output": "done"}
        for kind, item in (("function_call", spawned), ("custom_tool_call", patched))
    ]
    history: Any = [
        {"type": "additional_tools", "role": "developer", "tools": [group]},
        *({"role": role, "content": role[0]} for role in ("developer", "system", "user", "developer")),
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": None, "encrypted_content": None},
        *(spawned, patched, *results),
    ]
    forced: Any = {"type": "custom", "name": "patch", "namespace": "agents"}
    gateway.script.story = '{"name": "agents__patch", "arguments": {"input": "x"}}'
    await client.responses.create(model="fake", input=history, tools=[patch], tool_choice=forced)
    chat = gateway.script.requests[-1].chat
    assert [(turn.role, turn.content) for turn in chat.messages] == [
        *(("system", "d\ns"), ("user", "u\nd"), ("assistant", ""), ("tool", "done"), ("tool", "done"))
    ]
    called = [call["function"] for call in json.loads(chat.messages[2].extra_json)["tool_calls"]]
    assert called == [
        {"name": "agents__spawn", "arguments": {"city": "Bern"}},
        {"name": "patch", "arguments": {"input": "+ é\n"}},
    ]
    offered = [tool["function"] for tool in json.loads(chat.tools_json)]
    assert [tool["name"] for tool in offered] == ["patch", "agents__spawn", "agents__patch"]
    assert offered[0]["parameters"]["required"] == ["input"]
    assert "fit this grammar (lark):\nx" in offered[0]["description"]
    assert "agents__patch" in gateway.script.requests[-1].sampling.structure.json_schema


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_that_is_cut_off(gateway: RunningGateway, client: openai.AsyncOpenAI, stream: bool) -> None:
    answer: Any = await client.responses.create(model="fake", input="x", max_output_tokens=40, stream=stream)
    if stream:
        *_, last = [event async for event in answer]
        assert last.type == "response.incomplete"
        answer = last.response
    assert (answer.status, answer.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert [item.status for item in answer.output] == ["completed", "incomplete"]


class City(BaseModel):
    city: str


async def test_structures_and_forced_calls(gateway: RunningGateway, client: openai.AsyncOpenAI) -> None:
    gateway.script.story = '{"city": "Bern"}'
    parsed = await client.responses.parse(model="fake", input="where?", text_format=City)
    assert parsed.output_parsed == City(city="Bern")
    schema = json.loads(gateway.script.requests[-1].sampling.structure.json_schema)
    assert schema["properties"].keys() == {"city"}
    gateway.script.story = CALL
    named: Any = {"type": "function", "name": "weather"}
    answer = await client.responses.create(model="fake", input="x", tools=TOOLS, tool_choice=named)
    assert [item.type for item in answer.output] == ["function_call"]
    assert answer.to_dict()["tool_choice"] == named


async def test_streams_that_fail(gateway: RunningGateway, client: openai.AsyncOpenAI) -> None:
    late = Refusal(FULL.code, FULL.details, FULL.trailing, after_messages=40)
    gateway.script.refusals.extend([FULL, late])
    with pytest.raises(openai.RateLimitError):
        await client.responses.create(model="fake", input="x", stream=True)
    stream = await client.responses.create(model="fake", input="x", stream=True)
    with pytest.raises(openai.APIError, match="full"):
        [event async for event in stream]
    gateway.script.refusals.append(late)
    lines = await gateway.lines("/v1/responses", {"input": "x", "stream": True})
    failed, error = (json.loads(line.removeprefix("data: ")) for line in lines[-3::2])
    assert (failed["type"], failed["response"]["status"]) == ("response.failed", "failed")
    assert (error["type"], error["error"]["code"]) == ("error", "rate_limit_exceeded")
    assert ResponseErrorEvent.model_validate(error, strict=True).message == "full"


async def test_a_stream_that_fails_before_its_first_token_begins_like_any_other() -> None:
    """The stream has begun, because proxies drop silent connections."""
    settings = {"ping_interval_s": 0.05, "request_timeout_s": 1.0}
    async with running_gateway(Script(hold_after_messages=0), **settings) as gateway:
        lines = await gateway.lines("/v1/responses", {"input": "x", "stream": True})
    events = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: ")]
    assert [event["type"] for event in events] == [
        *("response.created", "response.in_progress", "response.failed", "error")
    ]
    assert [event["sequence_number"] for event in events] == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("members", "param", "code", "message"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id", "previous_response_not_found", "'resp_1' not"),
        ({"background": True}, "background", "unsupported_parameter", "not supported"),
        ({"conversation": "conv_1"}, "conversation", "unsupported_parameter", "not supported"),
        ({"top_logprobs": 21}, "top_logprobs", "integer_above_max_value", "Expected a value <= 20"),
        ({"max_output_tokens": 0}, "max_output_tokens", "integer_below_min_value", "Expected a value >= 1"),
        ({"input": [IMAGE]}, "input[0].content[0].type", "invalid_value", "'input_image'"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type", "invalid_value", "'item_reference'"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type", "invalid_value", "'web_search'"),
        ({"tool_choice": {"type": "web_search"}}, "tool_choice.type", "invalid_value", "'web_search'"),
        ({"tool_choice": "required"}, "tool_choice", None, "needs tools"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format.schema", "missing_required_parameter", "Missing"),
        ({"input": None}, "input", None, "Field required"),
        ({"prompt": {"id": "pmpt_1"}}, "prompt", "unsupported_parameter", "not supported"),
        ({"input": [{"role": "user"}]}, "input", None, "input.list[Item].0: Value error, should have content"),
        ({"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, "input", None, "should have text"),
        ({"input": [{"type": "function_call", "name": "f", "arguments": "{}"}]}, "input", None, "have call_id"),
        ({"input": [{"type": "function_call", "call_id": "a"}]}, "input", None, "should have name"),
        ({"input": [{"type": "function_call_output", "output": "x"}]}, "input", None, "should have call_id"),
        ({"input": [{"type": "function_call_output", "call_id": "a"}]}, "input", None, "should have output"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools[0]", None, "tools.0: Value error, sho"),
    ],
)  # fmt: skip
async def test_refusals(
    gateway: RunningGateway, members: dict[str, Any], param: str, code: str | None, message: str
) -> None:
    response = await gateway.post("/v1/responses", {"model": "fake", "input": "x"} | members)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert (error["type"], error["param"], error["code"]) == ("invalid_request_error", param, code)
    assert message in error["message"]


async def test_input_tokens_are_those_that_a_response_would_count(gateway: RunningGateway) -> None:
    question = {"model": "fake", "input": "weather?", "instructions": "Be brief.", "tools": TOOLS}
    counted = await gateway.post("/v1/responses/input_tokens", question)
    answered = (await gateway.post("/v1/responses", question)).json()
    num_tokens = len("system: Be brief.\nuser: weather?\n")
    assert answered["usage"]["input_tokens"] == num_tokens
    assert counted.json() == {"object": "response.input_tokens", "input_tokens": num_tokens}
    counted_chat, answered_chat = gateway.script.tokenized[0].chat, gateway.script.requests[0].chat
    assert counted_chat.tools_json == answered_chat.tools_json != ""


@pytest.mark.parametrize(("member", "value"), [("previous_response_id", "resp_1"), ("temperature", 3), ("top_p", -1)])
async def test_input_tokens_refuses_what_a_response_refuses(
    gateway: RunningGateway, member: str, value: object
) -> None:
    question = {"model": "fake", "input": "weather?", member: value}
    responses = [await gateway.post(f"/v1/responses{route}", question) for route in ("", "/input_tokens")]
    assert [response.status_code for response in responses] == [400, 400]
    answered, counted = (response.json()["error"] for response in responses)
    assert counted == answered
    assert counted["param"] == member


async def test_the_routers_refusals_name_the_clients_members(gateway: RunningGateway) -> None:
    complaint = "max_new_tokens (9) must be <= max_total_tokens"
    gateway.script.refusals.append(
        Refusal(grpc.StatusCode.INVALID_ARGUMENT, complaint, (("tandem-error", "InvalidRequest"),))
    )
    error = (await gateway.post("/v1/responses", {"input": "x", "max_output_tokens": 9})).json()["error"]
    assert error["message"] == "max_output_tokens (9) must be <= the model's context length"
    assert (error["param"], error["code"]) == ("max_output_tokens", "context_length_exceeded")


async def test_embeddings_are_refused(client: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="does not support embeddings") as caught:
        await client.embeddings.create(model="fake", input="x")
    assert (caught.value.param, caught.value.code) == ("model", "unsupported_model")
    with pytest.raises(openai.NotFoundError):
        await client.embeddings.create(model="nobody", input="x")

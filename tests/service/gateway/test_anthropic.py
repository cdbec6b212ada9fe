"""Anthropic's own client, unmodified, in an environment of its own, and what it does not show."""

import json
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from tandem.v1.cache_pb2 import KEEP_PRIORITY_HIGH as HIGH
from tandem.v1.cache_pb2 import KEEP_PRIORITY_LOW as LOW
from tests.client_environment import output_of, python_with
from tests.fakes.sdk_router import Refusal, Script
from tests.service.gateway.http import RunningGateway, gateway_at, running_gateway

_PACKAGE = "anthropic==2.12.0"
_CLIENT = Path(__file__).with_name("anthropic_client.py")
CALL = '{"name": "weather", "arguments": {"city": "Zürich"}}'
STORY = f"<think>\nHm, well.\n</think>\n\nI look.\n<tool_call>\n{CALL}\n</tool_call>"
THOUGHT = {"type": "thinking", "thinking": "Hm, well.", "signature": ""}
QUESTION = [{"role": "user", "content": "weather?"}]


@pytest.fixture(scope="session")
def python_with_client() -> str:
    return python_with(_PACKAGE, "anthropic")


@pytest.fixture
async def gateway() -> AsyncIterator[RunningGateway]:
    async with running_gateway(Script(story=STORY, tool_call_format="hermes", has_reasoning=True)) as running:
        yield running


@pytest.mark.timeout(360)
async def test_the_anthropic_client(python_with_client: str, gateway: RunningGateway) -> None:
    ok = Refusal(grpc.StatusCode.OK, after_messages=1000)
    overloaded = Refusal(grpc.StatusCode.RESOURCE_EXHAUSTED, "full", (("tandem-error", "Overloaded"),))
    broken = Refusal(grpc.StatusCode.INVALID_ARGUMENT, "stop: too long", (("tandem-error", "InvalidRequest"),))
    unknown = Refusal(grpc.StatusCode.NOT_FOUND, "no model", (("tandem-error", "ModelNotFound"),))
    late = Refusal(overloaded.code, "full", overloaded.trailing, after_messages=40)
    gateway.script.refusals.extend([ok] * 4 + [unknown, overloaded, broken, late])
    told = json.loads(await output_of(python_with_client, _CLIENT, gateway.url))
    ((name, shown_as, kind, max_input_tokens),) = told["models"]
    assert (name, shown_as, kind) == ("fake", "fake", "model")
    assert max_input_tokens > 0
    text, call = {"type": "text", "text": "I look."}, told["whole"]["content"][-1]
    assert told["whole"]["content"] == [THOUGHT, text, call]
    assert (call["type"], call["name"], call["input"]) == ("tool_use", "weather", {"city": "Zürich"})
    assert (told["whole"]["stop_reason"], told["whole"]["model"]) == ("tool_use", "fake")
    assert told["whole"]["usage"]["output_tokens"] == len(STORY.encode()) + 1
    assert told["whole"]["usage"]["input_tokens"] == told["counted"] == len("system: Be brief.\nuser: weather?\n")
    ids = {"id": told["whole"]["id"]}
    [*streamed, streamed_call] = told["streamed"]["content"]
    assert [*streamed, streamed_call | {"id": call["id"]}] == told["whole"]["content"]
    assert {name: told["streamed"][name] for name in ("stop_reason", "usage")} == {
        name: told["whole"][name] for name in ("stop_reason", "usage")
    }
    assert ids["id"].startswith("msg_")
    assert [told["events"].count(f"content_block_{name}") for name in ("start", "stop")] == [3, 3]
    assert (told["events"][0], told["events"][-1]) == ("message_start", "message_stop")
    assert (told["cut"]["stop_reason"], told["cut"]["content"]) == ("max_tokens", [THOUGHT | {"thinking": "Hm,"}])
    assert told["errors"] == [
        [404, "not_found_error", "no model"],
        [400, "invalid_request_error", told["errors"][1][2]],
        [529, "overloaded_error", "full"],
        [400, "invalid_request_error", "stop_sequences: too long"],
        ["overloaded_error"],
    ]
    assert len(set(told["request_ids"])) == len(told["request_ids"]) == 5
    _, _, after_call, *_ = gateway.script.requests
    system, _, answer, result, go_on = after_call.chat.messages
    assert (system.role, system.content) == ("system", "Be brief.")
    shown = json.loads(answer.extra_json)
    assert shown["reasoning_content"] == "Hm, well."
    assert shown["tool_calls"][0]["function"] == {"name": "weather", "arguments": {"city": "Zürich"}}
    assert (result.role, result.content, json.loads(result.extra_json)) == (
        "tool",
        "fine",
        {"tool_call_id": call["id"]},
    )
    assert (go_on.role, go_on.content) == ("user", "Go on.")


async def test_members_that_change_the_prompt(gateway: RunningGateway) -> None:
    body: dict[str, Any] = {"messages": QUESTION, "max_tokens": 9, "priority": "batch"}
    turns = [*QUESTION, {"role": "assistant", "content": "It is"}]
    response = await gateway.post("/v1/messages", body | {"messages": turns, "thinking": {"type": "disabled"}})
    assert response.status_code == 200
    chat = gateway.script.requests[-1].chat
    assert chat.continue_final_message, "Anthropic goes on with the assistant's last turn"
    assert json.loads(chat.template_kwargs_json) == {"enable_thinking": False}
    assert json.loads(chat.messages[1].extra_json or "{}") == {}


async def test_what_a_coding_agent_sends(gateway: RunningGateway) -> None:
    """Tools by Anthropic's types, and words of the system within the conversation, which few templates know."""
    tools = [
        {"type": kind, "name": name}
        for kind, name in (("web_search_20250305", "web"), ("bash_20250124", "bash"), ("text_editor_20250728", "edit"))
    ]
    turns = [*QUESTION, {"role": "system", "content": "Be brief."}, *QUESTION]
    body: dict[str, Any] = {
        "messages": turns,
        "tools": tools,
        "max_tokens": 9,
        "thinking": {"type": "adaptive"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    }
    for path in ("messages?beta=true", "messages/count_tokens?beta=true"):
        response = await gateway.post(f"/v1/{path}", body, **{"anthropic-beta": "interleaved-thinking-2025-05-14"})
        assert response.status_code == 200, response.text
    chat = gateway.script.requests[-1].chat
    assert [(turn.role, turn.content) for turn in chat.messages] == [("user", "weather?\nBe brief.\nweather?")]
    offered = [tool["function"] for tool in json.loads(chat.tools_json)]
    assert [(tool["name"], "command" in tool["parameters"]["properties"]) for tool in offered] == [
        ("bash", True),
        ("edit", True),
    ]


async def test_marks_of_what_to_cache(gateway: RunningGateway) -> None:
    mark = {"type": "ephemeral"}
    marked = [{"role": "user", "content": [{"type": "text", "text": "weather?", "cache_control": mark}]}]
    system = [{"type": "text", "text": "Be brief.", "cache_control": mark | {"ttl": "1h"}}]
    bodies: list[dict[str, Any]] = [
        {"messages": QUESTION},
        {"messages": marked},
        {"messages": marked, "system": system, "session_id": "agent"},
        {"messages": marked, "keep_priority": "low", "time_to_live": 5},
    ]
    for body in bodies:
        assert (await gateway.post("/v1/messages", body | {"max_tokens": 9})).status_code == 200
    hints = [request.cache_hints for request in gateway.script.requests[-4:]]
    assert [hint.session_id for hint in hints] == ["", "", "agent", ""]
    assert [hint.keep_priority for hint in hints] == [0, HIGH, HIGH, LOW]
    assert [hint.time_to_live.seconds for hint in hints] == [0, 300, 3600, 5]


@pytest.mark.parametrize(
    ("choice", "function", "parallel"),
    [({"type": "any"}, "array", True), ({"type": "tool", "name": "weather"}, "object", False)],
)
async def test_forced_calls(gateway: RunningGateway, choice: Any, function: str, parallel: bool) -> None:
    gateway.script.story = f"[{CALL}]" if parallel else CALL
    tools = [{"name": "weather", "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}}}]
    body = {"messages": QUESTION, "max_tokens": 900, "tools": tools, "tool_choice": choice}
    answer = (await gateway.post("/v1/messages", body)).json()
    assert [block["input"] for block in answer["content"]] == [{"city": "Zürich"}]
    assert json.loads(gateway.script.requests[-1].sampling.structure.json_schema)["type"] == function


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        ('{"city": NaN, "days": [1e999, -Infinity, 2.5], "n": 3}', {"city": None, "days": [None, None, 2.5], "n": 3}),
        (r'{"a": "Z\ud83d", "\udc00": "\ud83d\ude00 \\ud83d"}', {"a": "Z\ufffd", "\ufffd": "😀 \\ud83d"}),
        ('{"city": "Bern", "days": [1, 2,],}', {"city": "Bern", "days": [1, 2]}),
        ('{"city": "Bern",}', {"city": "Bern"}),
        ('{"city": "Bern\n3000", "n": 3}', {"city": "Bern\n3000", "n": 3}),
        ('{"city": "Bern", "n": three}', {"city": "Bern"}),
        ("{'city': 1}", {}),
        ('{"n": ' + "[" * 900 + "]" * 900 + "}", {}),
    ],
    ids=range(8),
)
async def test_arguments_that_are_not_quite_json_lose_no_more_than_they_must(
    gateway: RunningGateway, arguments: str, shown: dict[str, Any]
) -> None:
    """They are an object in the answer, which no model is held to."""
    gateway.script.story = f'<tool_call>{{"name": "weather", "arguments": {arguments}}}</tool_call>'
    gateway.script.max_total_tokens = 9000
    tools = [{"name": "weather", "input_schema": {"type": "object"}}]
    response = await gateway.post("/v1/messages", {"messages": QUESTION, "max_tokens": 5000, "tools": tools})
    assert response.status_code == 200, response.text
    [call] = response.json()["content"]
    assert call["input"] == shown


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_tokens": None}, "max_tokens: Field required"),
        ({"messages": []}, "messages: List should have at least 1 item"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "'image' is not supported"),
        ({"messages": [{"role": "king", "content": "x"}]}, "messages.0.role"),
        ({"messages": [*QUESTION, {"role": "user", "content": []}]}, "messages: a turn of the user has no content"),
        ({"messages": [{"role": "user", "content": ""}]}, "messages: a turn of the user has no content"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "'web_search_20250305' is not supported"),
        (
            {
                "tools": [{"name": "y"}, {"type": "computer_20250124", "name": "c"}],
                "tool_choice": {"type": "tool", "name": "c"},
            },
            "'computer_20250124' is not supported",
        ),
        ({"mcp_servers": [{"type": "url", "url": "http://x", "name": "x"}]}, "mcp_servers is not supported"),
        ({"container": "container_01"}, "container is not supported"),
        ({"container": {"skills": [{"type": "anthropic", "skill_id": "pdf"}]}}, "container is not supported"),
        ({"thinking": {"type": "disable"}}, "thinking.type: Input should be 'enabled', 'adaptive' or 'disabled'"),
        ({"thinking": {}}, "thinking.type: Field required"),
        ({"tool_choice": {"type": "any"}}, "tool_choice needs tools"),
        ({"tool_choice": {"type": "tool", "name": "x"}, "tools": [{"name": "y"}]}, "there is no function 'x'"),
        ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema: Field required"),
        ({"temperature": 3}, "Expected a value <= 2"),
        ({"tool_choice": {"type": "tool"}, "tools": [{"name": "y"}]}, "tool_choice: Value error, should have name"),
        ({"system": [{"type": "text"}]}, "system.list[SystemPart].0: Value error, should have text"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "should have text"),
        ({"messages": [*QUESTION, {"role": "assistant", "content": [{"type": "tool_use", "id": "a"}]}]}, "have name"),
        ({"messages": [*QUESTION, {"role": "assistant", "content": [{"type": "tool_use", "name": "f"}]}]}, "have id"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]}, "should have tool_use_id"),
    ],
)
async def test_refusals(gateway: RunningGateway, changes: dict[str, Any], message: str) -> None:
    response = await gateway.post("/v1/messages", {"messages": QUESTION, "max_tokens": 9} | changes)
    assert (response.status_code, response.json()["type"]) == (400, "error")
    assert response.json()["error"]["type"] == "invalid_request_error"
    assert message in response.json()["error"]["message"]


@pytest.mark.parametrize("member", ["output_config", "output_format"])
async def test_a_structure_has_two_names(gateway: RunningGateway, member: str) -> None:
    """`output_format` is that of Anthropic's beta."""
    structure = {"type": "json_schema", "schema": {"type": "object"}}
    named = {"output_config": {"format": structure}} if member == "output_config" else {"output_format": structure}
    response = await gateway.post("/v1/messages", {"messages": QUESTION, "max_tokens": 9} | named)
    assert response.status_code == 200, response.text
    sent: Any = gateway.script.requests[-1]
    assert json.loads(sent.sampling.structure.json_schema) == {"type": "object"}


async def test_a_missing_model_in_the_words_of_either_api(gateway: RunningGateway) -> None:
    openai = await gateway.http.get("/v1/models/none")
    assert (openai.status_code, openai.json()["error"]["code"]) == (404, "model_not_found")
    answer = await gateway.http.get("/v1/models/none", headers={"anthropic-version": "2023-06-01"})
    no_route = await gateway.http.get("/v1/messages/batches")
    for missing in (answer, no_route):
        assert (missing.status_code, missing.json()["type"]) == (404, "error")
        assert missing.json()["error"]["type"] == "not_found_error"
        assert missing.headers["request-id"] == missing.headers["x-request-id"]


async def test_requests_that_are_too_long_are_refused_in_words_that_agents_know(make_mesh: Any) -> None:
    """They read them to shorten the conversation, or to ask for fewer tokens. There is no code for it."""
    mesh = await make_mesh()
    await mesh.decode()
    async with gateway_at(mesh.router.public.address) as (_, _, http):
        counted = await http.post("/v1/messages/count_tokens", json={"messages": QUESTION})
        for content, max_tokens, said in [
            (
                "weather?",
                9000,
                rf"input length and `max_tokens` exceed context limit: {counted.json()['input_tokens']} \+ 9000 > \d+,",
            ),
            ("weather? " * 300, 1, r"prompt is too long: \d+ tokens > \d+ maximum$"),
            ("weather? " * 9000, 1, r"prompt is too long: the prompt has 81\d+ characters, "),
        ]:
            body = {"messages": [{"role": "user", "content": content}], "max_tokens": max_tokens}
            for stream in (False, True):
                refused = await http.post("/v1/messages", json=body | {"stream": stream})
                assert refused.status_code == 400
                assert re.match(said, refused.json()["error"]["message"]), refused.text


async def test_stop_sequences_over_a_real_router(make_mesh: Any) -> None:
    """The text ends before the sequence, which the answer names, whole and streamed."""
    mesh = await make_mesh()
    await mesh.decode()
    body = {"messages": QUESTION, "max_tokens": 24, "temperature": 0}
    async with gateway_at(mesh.router.public.address) as (_, _, http):
        [block] = (await http.post("/v1/messages", json=body)).json()["content"]
        text = block["text"]
        sequence = text[6:9]
        stops = {"stop_sequences": ["not there", sequence]}
        answer = (await http.post("/v1/messages", json=body | stops)).json()
        response = await http.post("/v1/messages", json=body | stops | {"stream": True})
        events = [json.loads(line[6:]) for line in response.text.splitlines() if line.startswith("data: ")]
    expected = text[: text.index(sequence)]
    assert [block["text"] for block in answer["content"]] == [expected]
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("stop_sequence", sequence)
    assert "".join(event["delta"]["text"] for event in events if event["type"] == "content_block_delta") == expected
    [ending] = [event for event in events if event["type"] == "message_delta"]
    assert ending["delta"] == {"stop_reason": "stop_sequence", "stop_sequence": sequence}
    assert events[0]["message"]["usage"]["input_tokens"] == answer["usage"]["input_tokens"] > 0

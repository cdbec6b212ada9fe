"""Reasoning and the controls of chat templates, with OpenAI's own client and over a real router."""

import json
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.defects import Repaired
from tests.fakes.router_model import write_checkpoint
from tests.fakes.sdk_router import Script
from tests.service.conftest import Mesh
from tests.service.gateway.http import RunningGateway, gateway_at, running_gateway

MESSAGES: Any = [{"role": "user", "content": "2 + 3?"}]
STORY = "<think>\nTwo and three.\n</think>\n\nIt is 5."
TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% if enable_thinking is defined and not enable_thinking %}"
    "<think>\n\n</think>\n\n{% else %}<think>\n{% endif %}{% endif %}"
)


def client_of(gateway: RunningGateway) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="x", max_retries=0)


def thinking(**changes: Any) -> Script:
    return Script(**({"story": STORY, "has_reasoning": True} | changes))


async def parts(gateway: RunningGateway, **options: Any) -> tuple[Any, Any]:
    """Reasoning and content, which must be the same as a whole and as a stream."""
    async with client_of(gateway) as client:
        answer = await client.chat.completions.create(model="fake", messages=MESSAGES, **options)
        stream = await client.chat.completions.create(model="fake", messages=MESSAGES, stream=True, **options)
        deltas = [chunk.choices[0].delta async for chunk in stream]
    message = answer.choices[0].message
    whole = getattr(message, "reasoning_content", None), message.content
    streamed = "".join(getattr(each, "reasoning_content", None) or "" for each in deltas)
    assert (streamed, "".join(each.content or "" for each in deltas)) == (whole[0] or "", whole[1] or "")
    return whole


async def test_reasoning_is_separate_from_the_answer(repaired: Repaired) -> None:
    async with running_gateway(thinking()) as gateway:
        assert await parts(gateway) == ("Two and three.", "It is 5.")
        assert await parts(gateway, extra_body={"separate_reasoning": False}) == (None, STORY)
        assert await parts(gateway, max_tokens=12) == ("Two", None)
        form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}
        assert await parts(gateway, response_format=form) == (None, STORY), "held to a structure from the beginning"
    repaired("F6", "<think>...</think> comes as reasoning_content, whole and streamed")


@pytest.mark.parametrize(
    ("script", "settings", "expected"),
    [
        (thinking(has_reasoning=False), {}, (None, STORY)),
        (thinking(has_reasoning=False), {"reasoning_parser": "qwen3"}, ("Two and three.", "It is 5.")),
        (thinking(), {"reasoning_parser": "none"}, (None, STORY)),
        (thinking(story="Two.</think>5"), {}, (None, "Two.</think>5")),
        (thinking(story="Two.</think>5"), {"reasoning_parser": "deepseek_r1"}, ("Two.", "5")),
        (thinking(story="Two.</think>5", in_reasoning=True), {}, ("Two.", "5")),
        (thinking(story="[THINK]Two.[/THINK]5", tool_call_format="mistral"), {}, ("Two.", "5")),
        (thinking(story="[THINK]Two.[/THINK]5"), {"reasoning_parser": "mistral"}, ("Two.", "5")),
    ],
)
async def test_where_reasoning_begins(script: Script, settings: dict[str, str], expected: Any) -> None:
    async with running_gateway(script, **settings) as gateway:
        assert await parts(gateway) == expected
        output = gateway.script.requests[-1].output
    are_control_tokens = "[THINK]" in script.story
    assert output.HasField("skip_special_tokens") == output.HasField("include_eos") == are_control_tokens


async def test_tool_calls_follow_reasoning() -> None:
    tools = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
    story = '<think>hm</think>\n<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
    async with (
        running_gateway(thinking(story=story, tool_call_format="hermes")) as gateway,
        client_of(gateway) as client,
    ):
        answer = await client.chat.completions.create(model="fake", messages=MESSAGES, tools=tools)  # type: ignore[call-overload]
    choice = answer.choices[0]
    assert (choice.message.reasoning_content, choice.message.content) == ("hm", None)
    assert [call.function.name for call in choice.message.tool_calls] == ["add"]
    assert choice.finish_reason == "tool_calls"


HARMONY = (
    "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary<|message|>I add.<|end|>"
    '<|start|>assistant<|channel|>commentary to=functions.add <|constrain|>json<|message|>{"a": 1}'
)


async def test_channels_and_calls_of_gpt_oss_in_every_api() -> None:
    add: dict[str, Any] = {"name": "add", "parameters": {"type": "object"}}
    tools: Any = [{"type": "function", "function": add}]
    async with running_gateway(Script(story=HARMONY, tool_call_format="openai")) as gateway:
        assert await parts(gateway, tools=tools) == ("Hm.", "I add.")
        asked = gateway.script.requests[-1].output
        assert (asked.HasField("skip_special_tokens"), asked.skip_special_tokens) == (True, False)
        body = {"messages": MESSAGES, "max_tokens": 1000}
        chat = (await gateway.post("/v1/chat/completions", body | {"tools": tools})).json()["choices"][0]
        assert chat["finish_reason"] == "tool_calls"
        assert [call["function"] for call in chat["message"]["tool_calls"]] == [
            {"name": "add", "arguments": '{"a": 1}'}
        ]
        forced = body | {"tools": tools, "tool_choice": "required"}
        assert (await gateway.post("/v1/chat/completions", forced)).json()["choices"][0]["message"]["tool_calls"]
        assert "to=functions.add" in gateway.script.requests[-1].sampling.structure.grammar
        own = {"input": "2 + 3?", "tools": [{"type": "function", **add}], "reasoning": {"effort": "low"}}
        items = (await gateway.post("/v1/responses", own)).json()["output"]
        assert [item["type"] for item in items] == ["reasoning", "message", "function_call"]
        assert (items[0]["content"][0]["text"], items[2]["arguments"]) == ("Hm.", '{"a": 1}')
        kwargs = json.loads(gateway.script.requests[-1].chat.template_kwargs_json)
        assert kwargs == {"enable_thinking": True, "reasoning_effort": "low"}
        blocks = (
            await gateway.post("/v1/messages", body | {"tools": [{"name": "add", "input_schema": {"type": "object"}}]})
        ).json()["content"]
        assert [block["type"] for block in blocks] == ["thinking", "text", "tool_use"]
        assert blocks[2]["input"] == {"a": 1}


async def test_the_arguments_of_the_chat_template() -> None:
    async with running_gateway() as gateway:
        turns = [*MESSAGES, {"role": "assistant", "content": "It", "reasoning_content": "hm"}]
        options = {"chat_template_kwargs": {"enable_thinking": False}, "continue_final_message": True}
        response = await gateway.post("/v1/chat/completions", {"messages": turns, **options})
        assert response.status_code == 200
        chat = gateway.script.requests[-1].chat
    assert json.loads(chat.template_kwargs_json) == {"enable_thinking": False}
    assert chat.continue_final_message
    assert not chat.HasField("add_generation_prompt")
    assert json.loads(chat.messages[1].extra_json) == {"reasoning_content": "hm"}


async def test_over_a_real_router(tmp_path: Path, repaired: Repaired) -> None:
    """The prompt opens the reasoning, unless the request turns it off or continues a message."""
    mesh = Mesh(write_checkpoint(tmp_path / "tiny", chat_template=TEMPLATE))
    await mesh.start()
    try:
        await mesh.decode()
        async with gateway_at(mesh.router.public.address) as (_, _, http):

            async def ask(path: str, **members: Any) -> Any:
                return (await http.post(path, json={"messages": MESSAGES, "max_tokens": 4} | members)).json()

            path = "/v1/chat/completions"
            message = (await ask(path))["choices"][0]["message"]
            assert message["reasoning_content"]
            assert message["content"] is None
            off = {"chat_template_kwargs": {"enable_thinking": False}}
            message = (await ask(path, **off))["choices"][0]["message"]
            assert message["content"]
            assert "reasoning_content" not in message
            turns = [*MESSAGES, {"role": "assistant", "content": "It is "}]
            going_on = {"messages": turns, "continue_final_message": True}
            assert (await ask("/chat_tokenize", **off))["templated_text"].endswith("</think>\n\n")
            text = (await ask("/chat_tokenize", **going_on))["templated_text"]
            assert text == "[user]2 + 3?[assistant]It is "
            message = (await ask(path, **going_on))["choices"][0]["message"]
            assert message["content"]
            for members, param, complaint in (
                ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs", "messages cannot be set"),
                ({"chat_template_kwargs": 3}, "chat_template_kwargs", "should be a valid dictionary"),
                (going_on | {"add_generation_prompt": True}, "add_generation_prompt", "contradicts"),
            ):
                error = (await ask(path, **members))["error"]
                assert error["param"] == param
                assert complaint in error["message"]
    finally:
        await mesh.stop()
    repaired("F6", "enable_thinking false: content and no reasoning; continue_final_message goes on with the last turn")

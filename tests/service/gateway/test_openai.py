"""OpenAI's own Python client, unmodified."""

import asyncio
import json
import math
from collections.abc import AsyncIterator

import grpc
import openai
import pytest

from tandem.v1.cache_pb2 import KEEP_PRIORITY_HIGH, KEEP_PRIORITY_LOW, CacheHints
from tests.fakes.sdk_router import SERVING_SINCE_UNIX_S, STORY, Refusal, Script
from tests.service.gateway.http import RunningGateway, running_gateway

MESSAGES = [{"role": "user", "content": "hi"}]
REST = STORY.removeprefix("One fine day")


@pytest.fixture
async def gateway() -> AsyncIterator[RunningGateway]:
    async with running_gateway() as running:
        yield running


def client_of(gateway: RunningGateway, key: str = "x") -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key=key, max_retries=0)


async def test_chat(gateway: RunningGateway) -> None:
    async with client_of(gateway) as client:
        answer = await client.chat.completions.create(
            model="fake", messages=MESSAGES, logprobs=True, top_logprobs=2, n=2, temperature=0.5, stop=["zzz"], seed=7
        )
    assert [choice.message.content for choice in answer.choices] == [STORY, STORY]
    assert answer.system_fingerprint
    first = answer.choices[0]
    assert (first.finish_reason, first.message.role) == ("stop", "assistant")
    assert first.logprobs is not None
    assert first.logprobs.content is not None
    assert b"".join(bytes(entry.bytes or []) for entry in first.logprobs.content).decode() == STORY
    assert len(first.logprobs.content[0].top_logprobs) == 2
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert answer.usage.completion_tokens == 2 * (len(STORY.encode()) + 1)
    asked = gateway.script.requests[-1]
    assert (asked.model, asked.num_choices, asked.sampling.seed) == ("fake", 2, 7)
    assert (asked.sampling.temperature, list(asked.sampling.stop)) == (0.5, ["zzz"])
    assert not asked.sampling.HasField("max_new_tokens"), "the rest of the context"


async def test_usage_in_every_chunk_counts_the_prompt_from_the_first_token_on(gateway: RunningGateway) -> None:
    options = {"stream": True, "stream_options": {"continuous_usage_stats": True}}
    lines = await gateway.lines("/v1/completions", options | {"prompt": ["ab", "abcd"], "max_tokens": 3})
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
    asked = {choice["index"] for choice in chunks[0]["choices"]}
    assert chunks[0]["usage"]["prompt_tokens"] == {0: 2, 1: 4}[asked.pop()]
    assert [chunk["usage"]["prompt_tokens"] for chunk in chunks[-2:]] == [6, 6]
    totals = [chunk["usage"]["total_tokens"] for chunk in chunks]
    assert totals == sorted(totals)


async def test_usage_in_every_chunk_of_a_chat_counts_the_prompt_from_the_role_on(gateway: RunningGateway) -> None:
    options = {"stream": True, "stream_options": {"continuous_usage_stats": True}, "n": 2, "max_tokens": 3}
    lines = await gateway.lines("/v1/chat/completions", options | {"messages": MESSAGES, "seed": 1})
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
    usages = [chunk["usage"] for chunk in chunks]
    assert [chunk["choices"][0]["delta"] for chunk in chunks[:2]] == [{"role": "assistant", "content": ""}] * 2
    assert [usage["completion_tokens"] for usage in usages[:2]] == [0, 0]
    assert {usage["prompt_tokens"] for usage in usages} == {usages[-1]["prompt_tokens"]}
    assert usages[-1]["prompt_tokens"] > 0
    assert [usage["completion_tokens"] for usage in usages] == sorted(usage["completion_tokens"] for usage in usages)
    assert usages[-1]["completion_tokens"] == 6


async def test_chat_streams_roles_text_reasons_and_usage(gateway: RunningGateway) -> None:
    async with client_of(gateway) as client:
        stream = await client.chat.completions.create(
            model="fake",
            messages=MESSAGES,
            stream=True,
            stream_options={"include_usage": True},
            logprobs=True,
            top_logprobs=2,
        )
        chunks = [chunk async for chunk in stream]
    deltas = [chunk.choices[0] for chunk in chunks if chunk.choices]
    assert (deltas[0].delta.role, deltas[0].delta.content) == ("assistant", "")
    assert "".join(each.delta.content or "" for each in deltas) == STORY
    assert [each.finish_reason for each in deltas if each.finish_reason] == ["stop"]
    assert deltas[-1].delta.content is None
    last = chunks[-1]
    assert last.choices == []
    assert last.usage is not None
    assert last.usage.completion_tokens == len(STORY.encode()) + 1
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert {chunk.id for chunk in chunks} == {last.id}


async def test_completions_echo_with_logprobs_for_several_prompts(gateway: RunningGateway) -> None:
    async with client_of(gateway) as client:
        answer = await client.completions.create(
            model="fake", prompt=["One", "One fine"], logprobs=2, echo=True, max_tokens=4, n=2
        )
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert [choice.text for choice in answer.choices] == ["One fin", "One fin", "One fine day", "One fine day"]
    assert {choice.finish_reason for choice in answer.choices} == {"length"}
    logprobs = answer.choices[2].logprobs
    assert logprobs is not None
    assert "".join(logprobs.tokens or []) == "One fine day"
    assert logprobs.token_logprobs is not None
    assert logprobs.token_logprobs[0] is None
    assert logprobs.token_logprobs[1] == -1.0
    assert logprobs.text_offset == list(range(12))
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (3 + 8, 4 * 4)


async def test_completions_stream_interleaves_choices(gateway: RunningGateway) -> None:
    async with client_of(gateway) as client:
        stream = await client.completions.create(
            model="fake", prompt=["One fine day", "One"], n=2, stream=True, max_tokens=9, echo=True, logprobs=0
        )
        texts = dict.fromkeys(range(4), "")
        async for chunk in stream:
            texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == {0: STORY[:20], 1: STORY[:20], 2: STORY[:12], 3: STORY[:12]}


@pytest.mark.parametrize("prompt", [list(b"One fine day"), [list(b"One fine day")]])
async def test_prompts_may_be_token_ids(gateway: RunningGateway, prompt: list[int]) -> None:
    async with client_of(gateway) as client:
        answer = await client.completions.create(model="fake", prompt=prompt, max_tokens=100)
    assert answer.choices[0].text == REST


async def test_the_sum_of_chat_is_the_confidence_of_the_answer(gateway: RunningGateway) -> None:
    async with client_of(gateway) as client:
        answer = await client.chat.completions.create(model="fake", messages=MESSAGES, logprobs=True)
    assert answer.choices[0].logprobs is not None
    logprobs = [entry.logprob for entry in answer.choices[0].logprobs.content or []]
    assert math.exp(sum(logprobs) / len(logprobs)) == pytest.approx(math.exp(-0.5))


async def test_token_ids_continue_an_answer(gateway: RunningGateway) -> None:
    body = {"prompt": list(b"One"), "max_tokens": 5, "return_token_ids": True}
    first = (await gateway.post("/v1/completions", body)).json()["choices"][0]
    assert first["token_ids"] == list(b" fine")
    lines = await gateway.lines("/v1/completions", body | {"prompt": [*b"One", *first["token_ids"]], "stream": True})
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
    assert [chunk["choices"][0]["token_ids"] for chunk in chunks] == [[each] for each in b" day "]


async def test_tools_and_their_results_reach_the_template(gateway: RunningGateway) -> None:
    tools = [{"type": "function", "function": {"name": "add"}}]
    calls = [{"id": "1", "type": "function", "function": {"name": "add", "arguments": "{}"}}]
    turns = [
        *MESSAGES,
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "tool", "content": "72", "tool_call_id": "1"},
    ]
    body = {"messages": turns, "tools": tools}
    assert (await gateway.post("/v1/chat/completions", body)).status_code == 200
    chat = gateway.script.requests[-1].chat
    assert json.loads(chat.tools_json) == tools
    assert [json.loads(turn.extra_json or "{}") for turn in chat.messages] == [
        {},
        {"tool_calls": [calls[0] | {"function": {"name": "add", "arguments": {}}}]},  # as templates want them
        {"tool_call_id": "1"},
    ]
    assert (await gateway.post("/v1/chat/completions", body | {"tool_choice": "none"})).status_code == 200
    assert gateway.script.requests[-1].chat.tools_json == ""


@pytest.mark.parametrize(
    "arguments", ['{"a": NaN}', '{"a": -Infinity}', '{"a": [1e999]}', r'{"a": "\ud83d"}', '{"a":', '["a"]']
)
async def test_earlier_arguments_that_no_object_can_have_stay_text(gateway: RunningGateway, arguments: str) -> None:
    """As any model may have written them."""
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": arguments}}
    turns = [*MESSAGES, {"role": "assistant", "tool_calls": [call]}, {"role": "tool", "content": "72"}]
    response = await gateway.post("/v1/chat/completions", {"messages": turns})
    assert response.status_code == 200, response.text
    shown = json.loads(gateway.script.requests[-1].chat.messages[1].extra_json)
    assert shown["tool_calls"][0]["function"]["arguments"] == arguments


@pytest.mark.parametrize("model", ["", "tgi", "TGI", "dummy", "http://127.0.0.1:8080", "https://llm.example.com/v1"])
async def test_placeholder_names_mean_the_default_model(gateway: RunningGateway, model: str) -> None:
    assert (await gateway.post("/v1/chat/completions", {"model": model, "messages": MESSAGES})).status_code == 200
    assert gateway.script.requests[-1].model == ""


async def test_models(gateway: RunningGateway) -> None:
    async with client_of(gateway) as client:
        assert [model.id async for model in client.models.list()] == ["fake"]
        model = await client.models.retrieve("fake")
        assert (model.id, model.created) == ("fake", SERVING_SINCE_UNIX_S)
        assert model.created_at == "2023-11-14T22:13:20Z"  # type: ignore[attr-defined]  # Anthropic's member
        with pytest.raises(openai.NotFoundError) as caught:
            await client.models.retrieve("other")
    assert caught.value.code == "model_not_found"


async def test_adapters_are_models_with_a_parent(gateway: RunningGateway) -> None:
    gateway.script.adapters = ("tuned",)
    async with client_of(gateway) as client:
        listed = [(model.id, model.parent) async for model in client.models.list()]  # type: ignore[attr-defined]
        assert listed == [("fake", None), ("tuned", "fake")]
        await client.chat.completions.create(model="tuned", messages=MESSAGES)
    assert gateway.script.requests[-1].model == "tuned"


REFUSALS = [
    (grpc.StatusCode.INVALID_ARGUMENT, (), openai.BadRequestError),
    (grpc.StatusCode.NOT_FOUND, (("tandem-error", "ModelNotFound"),), openai.NotFoundError),
    (grpc.StatusCode.UNAUTHENTICATED, (), openai.AuthenticationError),
    (grpc.StatusCode.PERMISSION_DENIED, (), openai.PermissionDeniedError),
    (grpc.StatusCode.RESOURCE_EXHAUSTED, (("retry-after-ms", "2500"),), openai.RateLimitError),
    (grpc.StatusCode.UNAVAILABLE, (("tandem-error", "NoWorkers"),), openai.InternalServerError),
    (grpc.StatusCode.INTERNAL, (), openai.InternalServerError),
]


@pytest.mark.parametrize(("code", "trailing", "raised"), REFUSALS)
@pytest.mark.parametrize("stream", [False, True])
async def test_errors_before_the_first_token_have_their_status(
    code: grpc.StatusCode, trailing: tuple[tuple[str, str], ...], raised: type[Exception], stream: bool
) -> None:
    script = Script()
    script.refusals.append(Refusal(code, "because", trailing))
    async with running_gateway(script) as gateway, client_of(gateway) as client:
        with pytest.raises(raised) as caught:
            await client.chat.completions.create(model="fake", messages=MESSAGES, stream=stream)
    if isinstance(caught.value, openai.RateLimitError):
        assert caught.value.response.headers["retry-after"] == "3"
        assert caught.value.response.headers["retry-after-ms"] == "2500"


async def test_a_late_error_is_one_event_and_the_stream_ends_properly(gateway: RunningGateway) -> None:
    for _ in range(2):
        gateway.script.refusals.append(Refusal(grpc.StatusCode.INTERNAL, "10.1.2.3 fell over", after_messages=3))
    async with client_of(gateway) as client:
        stream = await client.chat.completions.create(model="fake", messages=MESSAGES, stream=True)
        seen = [await anext(stream) for _ in range(1 + 3)]
        with pytest.raises(openai.APIError) as caught:
            await anext(stream)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in seen) == STORY[:3]
    assert "10.1.2.3" not in str(caught.value)
    lines = await gateway.lines("/v1/chat/completions", {"model": "fake", "messages": MESSAGES, "stream": True})
    assert lines[-1] == "data: [DONE]"
    assert json.loads(lines[-2].removeprefix("data: "))["error"]["type"] == "server_error"
    assert sum("error" in line for line in lines) == 1


@pytest.mark.parametrize(
    ("path", "body", "named"),
    [
        ("chat/completions", {"model": "fake"}, "messages"),
        ("chat/completions", {"messages": MESSAGES, "temperature": "hot"}, "temperature"),
        ("chat/completions", {"messages": MESSAGES, "response_format": {"type": "json_schema"}}, "response_format"),
        ("chat/completions", {"messages": MESSAGES, "tools": [{}], "tool_choice": "required"}, "tools.0.function"),
        ("chat/completions", {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "image_url"),
        ("completions", {"prompt": "a", "best_of": 3, "stream": True}, "best_of"),
        ("completions", {"prompt": ["a"] * 100}, "prompt"),
        ("completions", {"prompt": "a", "suffix": "b"}, "suffix"),
        ("chat/completions", {"messages": MESSAGES, "use_beam_search": True}, "use_beam_search"),
        ("chat/completions", {"messages": [{"role": "user"}]}, "messages[0].content"),
        ("chat/completions", {"messages": [*MESSAGES, {"role": "system", "content": None}]}, "messages[1].content"),
        ("chat/completions", {"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "should have text"),
        ("chat/completions", {"messages": MESSAGES, "tools": [{}]}, "tools.0.function"),
        ("chat/completions", {"messages": MESSAGES, "tools": [{"type": "web_search"}]}, "tools.0.type"),
        ("chat/completions", {"messages": MESSAGES, "tools": [{"type": "function", "name": "f"}]}, "tools.0.function"),
        ("chat/completions", {"messages": MESSAGES, "tools": [{}], "tool_choice": "none"}, "tools.0.function"),
        (
            "chat/completions",
            {"messages": MESSAGES, "top_k": -5},
            "top_k must be an integer in [0, 4294967295], got -5",
        ),
        ("completions", {"prompt": "a", "logit_bias": {"-1": 1}}, "logit_bias.-1.[key]"),
        ("completions", {"prompt": "a", "logit_bias": {"1_2": 1}}, "should be the number of a token"),
        ("completions", {"prompt": "a", "logit_bias": {" 12": 1}}, "should be the number of a token"),
        ("completions", {"prompt": "a", "logit_bias": {"12": 1, "012": 2}}, "should be the number of a token"),
    ],
)
async def test_unsupported_parameters_are_refused_by_name(
    gateway: RunningGateway, path: str, body: dict[str, object], named: str
) -> None:
    response = await gateway.post(f"/v1/{path}", body)
    assert response.status_code == 400
    assert named in response.json()["error"]["message"]
    assert gateway.script.requests == []


async def test_every_parameter_reaches_the_router(gateway: RunningGateway) -> None:
    extensions = {
        "typical_p": 0.5,
        "min_p": 0.25,
        "top_k": -1,
        "repetition_penalty": 1.5,
        "min_tokens": 2,
        "ignore_eos": True,
        "stop_token_ids": [7],
        "include_stop_str_in_output": True,
        "bad_words": ["no"],
        "truncate_prompt_tokens": 4,
        "skip_special_tokens": False,
        "spaces_between_special_tokens": False,
    }
    async with client_of(gateway) as client:
        await client.completions.create(
            model="fake",
            prompt="One",
            logit_bias={"7": -1},
            presence_penalty=0.5,
            frequency_penalty=-0.5,
            extra_body=extensions,
        )
    sampling, output = gateway.script.requests[-1].sampling, gateway.script.requests[-1].output
    assert (sampling.typical_p, sampling.min_p, sampling.top_k, sampling.repetition_penalty) == (0.5, 0.25, 0, 1.5)
    assert (sampling.min_new_tokens, sampling.ignore_eos, list(sampling.stop_token_ids)) == (2, True, [7])
    assert (list(sampling.bad_words), sampling.truncate_prompt_tokens) == (["no"], 4)
    assert (dict(sampling.logit_bias), sampling.presence_penalty, sampling.frequency_penalty) == ({7: -1.0}, 0.5, -0.5)
    assert output.include_stop
    assert (output.skip_special_tokens, output.spaces_between_special_tokens) == (False, False)


async def test_best_of_is_checked_by_the_router(gateway: RunningGateway) -> None:
    async with client_of(gateway) as client:
        answer = await client.completions.create(model="fake", prompt=["One", "Two"], n=2, best_of=4, max_tokens=3)
        assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
        assert [(asked.num_choices, asked.best_of) for asked in gateway.script.requests] == [(2, 4)] * 2
        await client.completions.create(model="fake", prompt="One", n=2, best_of=2, max_tokens=3)
        assert not gateway.script.requests[-1].HasField("best_of"), "all are returned: they come as they come"


@pytest.mark.parametrize(
    ("path", "asked"),
    [("chat/completions", {"messages": MESSAGES}), ("completions", {"prompt": "One"}), ("responses", {"input": "One"})],
)
async def test_what_the_cache_is_told(gateway: RunningGateway, path: str, asked: dict[str, object]) -> None:
    body = {"model": "fake", **asked}
    for hints in ({"prompt_cache_key": "a", "prompt_cache_retention": "24h"}, {"keep_priority": "low"}, {}):
        assert (await gateway.post(f"/v1/{path}", body | hints)).status_code == 200
    long, low, none = (request.cache_hints for request in gateway.script.requests[-3:])
    assert (long.session_id, long.keep_priority, long.time_to_live.seconds) == ("a", KEEP_PRIORITY_HIGH, 86400)
    assert (low.session_id, low.keep_priority, low.HasField("time_to_live")) == ("", KEEP_PRIORITY_LOW, False)
    assert none == CacheHints()


@pytest.mark.parametrize("path", ["chat/completions", "completions"])
async def test_a_top_p_of_zero_leaves_the_likeliest_token(gateway: RunningGateway, path: str) -> None:
    body = {"model": "fake", "messages": MESSAGES, "prompt": "One", "top_p": 0, "top_k": 40}
    assert (await gateway.post(f"/v1/{path}", body)).status_code == 200
    asked = gateway.script.requests[-1].sampling
    assert (asked.top_k, asked.HasField("top_p")) == (1, False)
    assert (await gateway.post(f"/v1/{path}", body | {"top_p": 0.5})).status_code == 200
    asked = gateway.script.requests[-1].sampling
    assert (asked.top_k, asked.top_p) == (40, 0.5)


async def test_unknown_members_are_ignored(gateway: RunningGateway) -> None:
    body = {"model": "fake", "messages": MESSAGES, "metadata": {"a": 1}, "top_p": 1, "user": "me", "new_thing": []}
    assert (await gateway.post("/v1/chat/completions", body)).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
async def test_a_disconnect_cancels_the_request(stream: bool) -> None:
    script = Script(hold_after_messages=0)
    async with running_gateway(script) as gateway, client_of(gateway) as client:
        call = asyncio.create_task(
            client.chat.completions.create(model="fake", messages=MESSAGES, stream=stream)  # type: ignore[call-overload]
        )
        await script.holding.wait()
        call.cancel()
        await script.cancelled.wait()


async def test_a_disconnect_in_a_stream_cancels_it() -> None:
    script = Script(hold_after_messages=3)
    async with running_gateway(script) as gateway, client_of(gateway) as client:
        stream = await client.chat.completions.create(model="fake", messages=MESSAGES, stream=True)
        await script.holding.wait()
        await stream.close()
        await script.cancelled.wait()


async def test_a_silent_stream_gets_pings_and_then_its_answer() -> None:
    script = Script(hold_after_messages=0)
    async with running_gateway(script, ping_interval_s=0.01) as gateway:
        body = {"model": "fake", "messages": MESSAGES, "stream": True}
        async with gateway.http.stream("POST", "/v1/chat/completions", json=body) as response:
            lines = response.aiter_lines()
            assert await anext(lines) == ": ping"
            script.release.set()
            rest = [line async for line in lines if line.startswith("data")]
    assert rest[-1] == "data: [DONE]"
    assert json.loads(rest[0].removeprefix("data: "))["choices"][0]["delta"]["role"] == "assistant"

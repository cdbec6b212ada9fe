"""OpenAI's contract at its edges: what is accepted, what is refused, and in which words."""

import json
from collections.abc import AsyncIterator
from typing import Any

import httpx2
import openai
import pytest

from gateway.openai.foreign_members import OTHER_NAMES, REFUSED, WITHOUT_EFFECT
from tests.defects import Repaired
from tests.fakes.sdk_router import Script
from tests.service.gateway.http import RunningGateway, gateway_at, running_gateway

USER = {"role": "user", "content": "hi"}
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
BODIES: dict[str, dict[str, Any]] = {CHAT: {"messages": [USER]}, COMPLETIONS: {"prompt": "One fine day"}}
# Names of the SDK and of the protocol.
INTERNAL = ("num_choices", "max_new_tokens", "min_new_tokens", "max_total_tokens", "max_input_length", "token_ids")


@pytest.fixture
async def gateway() -> AsyncIterator[RunningGateway]:
    async with running_gateway() as running:
        yield running


@pytest.fixture
async def routed(make_mesh: Any) -> AsyncIterator[httpx2.AsyncClient]:
    """A gateway before a real router, which checks what the gateway does not."""
    mesh = await make_mesh()
    await mesh.decode()
    async with gateway_at(mesh.router.public.address) as (_, _, http):
        yield http


async def refusal(http: httpx2.AsyncClient, path: str, **members: Any) -> dict[str, Any]:
    response = await http.post(path, json=BODIES[path] | members)
    assert response.status_code == 400, response.text
    error: dict[str, Any] = response.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert not any(name in error["message"] for name in INTERNAL), error
    return error


@pytest.mark.parametrize("seed", [-1, 0, -(2**63), 2**63 - 1, 2**64 - 1])
async def test_any_seed(gateway: RunningGateway, seed: int, repaired: Repaired) -> None:
    for path, body in BODIES.items():
        assert (await gateway.post(path, body | {"seed": seed})).status_code == 200
        assert gateway.script.requests[-1].sampling.seed == seed % 2**64
    repaired("F10", "seeds from -2^63 to 2^64-1 accepted")


@pytest.mark.parametrize(
    ("members", "code", "message"),
    [
        (
            {"temperature": 9},
            "decimal_above_max_value",
            "decimal above maximum value. Expected a value <= 2, but got 9",
        ),
        ({"temperature": -0.5}, "decimal_below_min_value", "Expected a value >= 0, but got -0.5 instead."),
        ({"top_p": 1.5}, "decimal_above_max_value", "Expected a value <= 1, but got 1.5 instead."),
        ({"presence_penalty": 3}, "decimal_above_max_value", "Expected a value <= 2, but got 3 instead."),
        ({"frequency_penalty": -3}, "decimal_below_min_value", "Expected a value >= -2, but got -3 instead."),
        ({"n": 9}, "integer_above_max_value", "Expected a value <= 8, but got 9 instead."),
        ({"max_tokens": 0}, "integer_below_min_value", "Expected a value >= 1, but got 0 instead."),
        ({"seed": 2**64}, "integer_above_max_value", "Invalid 'seed'"),
    ],
    ids=str,
)
@pytest.mark.parametrize("path", BODIES)
async def test_values_out_of_range_are_refused_in_openais_words(
    gateway: RunningGateway, path: str, members: dict[str, Any], code: str, message: str, repaired: Repaired
) -> None:
    error = await refusal(gateway.http, path, **members)
    [name] = members
    assert (error["param"], error["code"]) == (name, code)
    assert error["message"].startswith(f"Invalid '{name}': ")
    assert message in error["message"]
    assert not gateway.script.requests, "the router is not asked"
    repaired("F10", "temperature 9, n 9, max_tokens 0: OpenAI's message, param and code")


@pytest.mark.parametrize(
    ("path", "members", "param", "message"),
    [
        (CHAT, {"max_completion_tokens": 0}, "max_completion_tokens", "Invalid 'max_completion_tokens'"),
        (CHAT, {"messages": []}, "messages", "empty array"),
        (CHAT, {"messages": [{"role": 3}]}, "messages[0].role", "messages.0.role"),
        (CHAT, {"messages": [{"content": "x"}]}, "messages[0].role", "Field required"),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages", "'image_url'"),
        (CHAT, {"messages": "hi"}, "messages", "messages"),
        (CHAT, {"stream_options": {"include_usage": True}}, "stream_options", "only allowed when 'stream' is enabled"),
        (COMPLETIONS, {"stream_options": {}}, "stream_options", "only allowed when 'stream' is enabled"),
        (CHAT, {"top_logprobs": 3}, "top_logprobs", "needs logprobs"),
        (CHAT, {"response_format": {"type": "json_object", "schema": 123}}, "response_format.schema", "schema"),
        (CHAT, {"response_format": {"type": "yaml"}}, "response_format.type", "json_object"),
        (CHAT, {"response_format": {}}, "response_format.type", "required"),
        (CHAT, {"response_format": {"type": "json_schema"}}, "response_format.json_schema.schema", "Missing required"),
        (
            CHAT,
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": 3}}},
            "response_format.json_schema.schema",
            "schema",
        ),
        (COMPLETIONS, {"prompt": {"a": 1}}, "prompt", "prompt"),
        (COMPLETIONS, {"n": "many"}, "n", "valid integer"),
        (COMPLETIONS, {"best_of": 9}, "best_of", "Expected a value <= 8"),
    ],
)
async def test_errors_name_the_clients_member(
    gateway: RunningGateway, path: str, members: dict[str, Any], param: str, message: str
) -> None:
    error = await refusal(gateway.http, path, **members)
    assert error["param"] == param
    assert message in error["message"]


@pytest.mark.parametrize(
    ("path", "members", "param", "code", "message"),
    [
        (CHAT, {"max_tokens": 1000}, "messages", "context_length_exceeded", "max_tokens (1000) must be <="),
        (
            CHAT,
            {"max_completion_tokens": 999},
            "messages",
            "context_length_exceeded",
            "the model's context length (",
        ),
        (CHAT, {"messages": [USER | {"content": "x " * 900}]}, "messages", "context_length_exceeded", "prompt has"),
        (COMPLETIONS, {"prompt": "x " * 900}, "prompt", "context_length_exceeded", "prompt has"),
        (COMPLETIONS, {"prompt": [9999]}, "prompt", None, "token id 9999"),
        (CHAT, {"min_tokens": 9, "max_tokens": 3}, "min_tokens", None, "min_tokens (9) must be <= max_tokens (3)"),
        (CHAT, {"messages": [{"role": "king", "content": "x"}]}, "messages[0].role", None, "must be one of"),
        (CHAT, {"logit_bias": {"1": 101}}, "logit_bias[1]", None, "must be in [-100, 100]"),
        (CHAT, {"stop": ["a"] * 17}, "stop", None, "17 entries"),
        (CHAT, {"guided_regex": "(a"}, "guided_regex", None, "guided_regex cannot be used"),
        (
            CHAT,
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "nonsense"}}}},
            "response_format",
            None,
            "response_format cannot be used",
        ),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_the_routers_errors_name_the_clients_member(
    routed: httpx2.AsyncClient,
    path: str,
    members: dict[str, Any],
    param: str,
    code: str | None,
    message: str,
    stream: bool,
    repaired: Repaired,
) -> None:
    error = await refusal(routed, path, stream=stream, **members)
    assert (error["param"], error["code"]) == (param, code)
    assert message in error["message"]
    # litellm knows such an error by these words alone
    assert ("This model's maximum context length is" in error["message"]) == (code == "context_length_exceeded")
    repaired("F10", "the router's refusals name n, max_tokens, messages, response_format, and error.param is set")


async def test_an_input_that_is_too_long_is_named(routed: httpx2.AsyncClient) -> None:
    """It has no prompt, which is a stored template there."""
    response = await routed.post("/v1/responses", json={"input": "x " * 900})
    assert response.status_code == 400
    error = response.json()["error"]
    assert (error["param"], error["code"]) == ("input", "context_length_exceeded")


async def test_parts_of_a_text_are_lines(gateway: RunningGateway, repaired: Repaired) -> None:
    parts = [{"type": "text", "text": "One"}, {"type": "text", "text": "two"}]
    await gateway.post(CHAT, {"messages": [USER | {"content": parts}]})
    assert gateway.script.requests[-1].chat.messages[0].content == "One\ntwo"
    repaired("F10", "text parts are joined with a newline")


@pytest.mark.parametrize(
    "turn", [{}, {"content": None}, {"content": ""}, {"content": []}, {"content": None, "tool_calls": []}]
)
async def test_a_turn_of_the_assistant_may_be_empty(
    gateway: RunningGateway, routed: httpx2.AsyncClient, turn: dict[str, Any]
) -> None:
    """In the middle of a conversation and at its end; the template gets an empty text."""
    for others in ([], [USER]):
        body = {"messages": [USER, {"role": "assistant", **turn}, *others], "max_tokens": 2}
        assert (await gateway.post(CHAT, body)).status_code == 200
        shown = gateway.script.requests[-1].chat.messages[1]
        assert (shown.role, shown.content, shown.extra_json) == ("assistant", "", "")
        response = await routed.post(CHAT, json=body)
        assert response.status_code == 200, response.text


async def test_a_schema_with_json_object_is_enforced(gateway: RunningGateway) -> None:
    schema = {"type": "object", "properties": {}}
    for name in ("schema", "value"):  # llama.cpp's name, and TGI's
        await gateway.post(CHAT, BODIES[CHAT] | {"response_format": {"type": "json_object", name: schema}})
        assert json.loads(gateway.script.requests.pop().sampling.structure.json_schema) == schema


async def test_openais_own_client_reads_the_error() -> None:
    async with (
        running_gateway(Script()) as gateway,
        openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="x", max_retries=0) as client,
    ):
        with pytest.raises(openai.BadRequestError) as caught:
            await client.chat.completions.create(model="fake", messages=[{"role": "user", "content": "x"}], n=100)
    assert (caught.value.param, caught.value.code) == ("n", "integer_above_max_value")


async def test_members_of_other_servers_are_refused_in_words_or_harmless(gateway: RunningGateway) -> None:
    for path, own in ((CHAT, set[str]()), (COMPLETIONS, {"echo", "best_of", "suffix"})):
        for name in REFUSED.keys() - own:
            response = await gateway.post(path, BODIES[path] | {name: "something"})
            assert response.status_code == 400, name
            error = response.json()["error"]
            assert error["param"] == name
            assert error["message"].startswith(f"{name} is not supported: ")
        off: dict[str, Any] = {name: values[0] for name, (values, _) in REFUSED.items() if values}
        harmless: dict[str, Any] = off | dict.fromkeys(WITHOUT_EFFECT, "something") | {"priority": 0}
        without_own = {name: value for name, value in harmless.items() if name not in own}
        assert (await gateway.post(path, BODIES[path] | without_own)).status_code == 200


@pytest.mark.parametrize("path", BODIES)
async def test_null_means_absent_whatever_the_member(gateway: RunningGateway, path: str) -> None:
    """Typed clients send all their members."""
    for name in (*REFUSED, *OTHER_NAMES, *OTHER_NAMES.values(), *WITHOUT_EFFECT):
        response = await gateway.post(path, BODIES[path] | {name: None})
        assert response.status_code == 200, (name, response.text)
    for theirs, ours in OTHER_NAMES.items():
        value: Any = {"max_tokens": 5, "repetition_penalty": 1.5, "include_stop_str_in_output": True}.get(ours, "a+")
        value = "{}" if ours == "guided_json" else "start: /a+/" if ours == "guided_grammar" else value
        for null, other in ((theirs, ours), (ours, theirs)):
            response = await gateway.post(path, BODIES[path] | {null: None, other: value})
            assert response.status_code == 200, (null, response.text)
    await gateway.post(path, BODIES[path] | {"max_tokens": None, "n_predict": 5})
    assert gateway.script.requests[-1].sampling.max_new_tokens == 5
    error = await refusal(gateway.http, path, functions=[1], audio=None)
    assert error["message"] == "functions is not supported: use tools"


@pytest.mark.parametrize("path", BODIES)
async def test_the_prompts_log_probs_without_alternatives_are_refused(gateway: RunningGateway, path: str) -> None:
    """0 asks vLLM for the prompt's log-probs; false asks nobody for anything."""
    error = await refusal(gateway.http, path, prompt_logprobs=0)
    assert error["message"] == "prompt_logprobs is not supported: use echo and logprobs of /v1/completions"
    for harmless in ({"prompt_logprobs": False}, {"length_penalty": 1.0}, {"mirostat": 0.0}, {"mirostat": False}):
        assert (await gateway.post(path, BODIES[path] | harmless)).status_code == 200, harmless


async def test_other_names_of_members_reach_the_router(gateway: RunningGateway) -> None:
    theirs = {"n_predict": 3, "repeat_penalty": 1.5, "no_stop_trim": True, "session_id": "s", "regex": "a+"}
    for path, body in BODIES.items():
        assert (await gateway.post(path, body | theirs)).status_code == 200
        request = gateway.script.requests[-1]
        assert (request.sampling.max_new_tokens, request.sampling.repetition_penalty) == (3, 1.5)
        assert request.sampling.structure.regex == "a+"
        error = await refusal(gateway.http, path, regex="a+", guided_regex="b+")
        assert error["message"] == "regex and guided_regex mean the same: set one of them"


async def test_llama_cpps_number_for_no_limit(gateway: RunningGateway) -> None:
    assert (await gateway.post(CHAT, BODIES[CHAT] | {"n_predict": -1})).status_code == 200
    assert not gateway.script.requests[-1].sampling.HasField("max_new_tokens")
    for path, limit in ((CHAT, -2), (COMPLETIONS, -1)):
        error = await refusal(gateway.http, path, n_predict=limit)
        assert error["param"] == "n_predict"
        assert error["message"] == f"n_predict must be at least 1, or -1 in chats for no limit, got {limit}"


async def test_the_effort_of_reasoning_is_the_templates(gateway: RunningGateway) -> None:
    off, low = {"enable_thinking": False}, {"enable_thinking": True, "reasoning_effort": "low"}
    for effort, expected in (("none", off), ("low", low)):
        await gateway.post(CHAT, BODIES[CHAT] | {"reasoning_effort": effort})
        assert json.loads(gateway.script.requests[-1].chat.template_kwargs_json) == expected


async def test_defaults_of_other_servers_are_taken(routed: httpx2.AsyncClient, repaired: Repaired) -> None:
    """The tokenizer adds special tokens to a prompt, the template to a chat."""
    for path, default in ((COMPLETIONS, True), (CHAT, False)):
        response = await routed.post(path, json=BODIES[path] | {"add_special_tokens": default, "max_tokens": 2})
        assert response.status_code == 200, response.text
    error = await refusal(routed, CHAT, add_special_tokens=True)
    assert error["param"] == "add_special_tokens"
    repaired("F18", "add_special_tokens as each route has it is taken")


@pytest.mark.parametrize("members", [{}, {"max_tokens": 100}, {"stream": True}])
async def test_a_truncation_of_minus_one_keeps_what_fits(
    routed: httpx2.AsyncClient, members: dict[str, Any], repaired: Repaired
) -> None:
    long = {COMPLETIONS: {"prompt": [65] * 5000}, CHAT: {"messages": [{"role": "user", "content": "q" * 5000}]}}
    for path, body in long.items():
        assert (await routed.post(path, json=body | members)).status_code == 400, "too long"
        response = await routed.post(path, json=body | members | {"truncate_prompt_tokens": -1})
        assert response.status_code == 200, response.text
        assert "error" not in response.text
        await refusal(routed, path, truncate_prompt_tokens=-2)
        await refusal(routed, path, truncate_prompt_tokens=0)
    repaired("F18", "truncate_prompt_tokens -1 keeps what fits")


async def test_refusals_in_a_history_are_text(gateway: RunningGateway, repaired: Repaired) -> None:
    said = {"role": "assistant", "content": [{"type": "refusal", "refusal": "I would rather not."}]}
    assert (await gateway.post(CHAT, {"messages": [USER, said, USER]})).status_code == 200
    assert gateway.script.requests[-1].chat.messages[1].content == "I would rather not."
    assert (await gateway.post("/v1/responses", {"input": [USER, said, USER]})).status_code == 200
    assert gateway.script.requests[-1].chat.messages[1].content == "I would rather not."
    repaired("F18", "a refusal in a history is shown to the template")

"""Structures as clients of OpenAI, vLLM, TGI and LMI ask for them."""

import json
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest
from pydantic import BaseModel

from tests.defects import Repaired
from tests.fakes.sdk_router import Script
from tests.service.gateway.http import RunningGateway, running_gateway

SCHEMA = {"type": "object", "properties": {"b": {"const": None}, "a": {"type": "string"}}, "required": ["a"]}
MESSAGES = [{"role": "user", "content": "hi"}]


@pytest.fixture
async def gateway() -> AsyncIterator[RunningGateway]:
    async with running_gateway(Script(story='{"a": "One fine day"}')) as running:
        yield running


def asked(gateway: RunningGateway) -> tuple[str | None, Any]:
    """The structure the router was last asked for: its kind, and what it says."""
    structure = gateway.script.requests[-1].sampling.structure
    kind = structure.WhichOneof("kind")
    if kind == "choice":
        return kind, list(structure.choice.texts)
    if kind == "json_schema":
        return kind, list(json.loads(structure.json_schema).items())  # in order
    return kind, kind and getattr(structure, kind)


SCHEMA_ASKED = ("json_schema", list(SCHEMA.items()))


@pytest.mark.parametrize(
    ("members", "expected"),
    [
        ({}, (None, None)),
        ({"response_format": {"type": "text"}}, (None, None)),
        ({"response_format": {"type": "json_object"}}, ("json_object", True)),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}}, SCHEMA_ASKED),
        ({"guided_json": SCHEMA}, SCHEMA_ASKED),
        ({"guided_json": json.dumps(SCHEMA)}, SCHEMA_ASKED),
        ({"guided_regex": "a+"}, ("regex", "a+")),
        ({"guided_choice": ["a", "b"]}, ("choice", ["a", "b"])),
        ({"guided_grammar": 'start: "a"'}, ("grammar", 'start: "a"')),
        ({"structured_outputs": {"json": SCHEMA}}, SCHEMA_ASKED),
        ({"structured_outputs": {"json_object": True}}, ("json_object", True)),
        ({"structured_outputs": {"regex": "a+"}}, ("regex", "a+")),
        ({"structured_outputs": {"choice": ["a"]}}, ("choice", ["a"])),
        ({"structured_outputs": {"grammar": 'start: "a"'}}, ("grammar", 'start: "a"')),
    ],
)
async def test_structures_reach_the_router(gateway: RunningGateway, members: dict[str, Any], expected: Any) -> None:
    for path, body in [
        ("/v1/chat/completions", {"messages": MESSAGES, **members}),
        ("/v1/completions", {"prompt": "p", **members}),
        ("/invocations", {"inputs": "p", "parameters": members}),
    ]:
        assert (await gateway.post(path, body)).status_code == 200
        assert asked(gateway) == expected


@pytest.mark.parametrize(
    ("structured_outputs", "named"),
    [
        ({"structural_tag": "x"}, "structured_outputs.structural_tag"),
        ({"jsonn": SCHEMA}, "structured_outputs.jsonn"),
        ({"regex": "a", "whitespace_pattern": " "}, "structured_outputs.whitespace_pattern"),
        ({"regex": "a", "disable_additional_properties": True}, "structured_outputs.disable_additional_properties"),
        ({}, "structured_outputs"),
        ({"json": None, "json_object": False}, "structured_outputs"),
    ],
)
async def test_structured_outputs_without_a_known_structure_are_refused(
    gateway: RunningGateway, repaired: Repaired, structured_outputs: dict[str, Any], named: str
) -> None:
    for path, body in (("/v1/chat/completions", {"messages": MESSAGES}), ("/v1/completions", {"prompt": "p"})):
        response = await gateway.post(path, body | {"structured_outputs": structured_outputs})
        error = response.json()["error"]
        assert (response.status_code, error["param"]) == (400, named)
        assert named in error["message"]
    assert not gateway.script.requests
    repaired("F17", "400 that names the member")


async def test_members_of_vllms_client_that_ask_for_nothing_are_taken(gateway: RunningGateway) -> None:
    empty = dict.fromkeys(("json", "choice", "grammar", "json_object", "whitespace_pattern", "structural_tag"))
    off = dict.fromkeys(("disable_fallback", "disable_any_whitespace", "disable_additional_properties"), False)
    body = {"messages": MESSAGES, "structured_outputs": {"regex": "a+", **empty, **off}}
    assert (await gateway.post("/v1/chat/completions", body)).status_code == 200
    assert asked(gateway) == ("regex", "a+")


@pytest.mark.parametrize(
    "members",
    [
        {"response_format": {"type": "yaml"}},
        {"response_format": {"type": "json_schema"}},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
        {"response_format": {"type": "json_object"}, "guided_regex": "a"},
        {"guided_choice": ["a"], "structured_outputs": {"regex": "a"}},
    ],
)
async def test_contradictory_structures_are_refused(gateway: RunningGateway, members: dict[str, Any]) -> None:
    assert (await gateway.post("/v1/chat/completions", {"messages": MESSAGES, **members})).status_code == 400
    assert not gateway.script.requests


async def test_a_schema_of_another_type_is_refused_in_words(gateway: RunningGateway) -> None:
    """Names of pydantic's own for what it checks tell a client nothing."""
    refused = await gateway.post("/v1/chat/completions", {"messages": MESSAGES, "guided_json": 3})
    assert refused.status_code == 400
    error = refused.json()["error"]
    assert error["message"].startswith("guided_json.dict[str,any]: Input should be a valid dictionary")
    assert error["param"] == "guided_json"


@pytest.mark.parametrize(
    ("grammar", "expected"),
    [
        ({"type": "json", "value": SCHEMA}, SCHEMA_ASKED),
        ({"type": "json", "value": json.dumps(SCHEMA)}, SCHEMA_ASKED),
        ({"type": "json_schema", "value": {"name": "x", "schema": SCHEMA}}, SCHEMA_ASKED),
        ({"type": "regex", "value": "a+"}, ("regex", "a+")),
    ],
)
async def test_tgi(gateway: RunningGateway, grammar: dict[str, Any], expected: Any) -> None:
    answer = await gateway.post("/generate", {"inputs": "p", "parameters": {"grammar": grammar}})
    assert answer.status_code == 200
    assert asked(gateway) == expected


@pytest.mark.parametrize(
    "grammar", [{}, {"type": "regex", "value": {}}, {"type": "json_schema", "value": {"name": "x"}}]
)
async def test_tgi_refuses(gateway: RunningGateway, grammar: dict[str, Any]) -> None:
    answer = await gateway.post("/generate", {"inputs": "p", "parameters": {"grammar": grammar}})
    assert (answer.status_code, answer.json()["error_type"]) == (422, "validation")


class Day(BaseModel):
    """What the client wants back."""

    a: str


async def test_the_clients_own_classes(gateway: RunningGateway) -> None:
    """openai-python makes a strict schema of a class, and an object of the answer."""
    async with openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="x", max_retries=0) as client:
        answer = await client.chat.completions.parse(model="fake", messages=MESSAGES, response_format=Day)
    assert answer.choices[0].message.parsed == Day(a="One fine day")
    kind, schema = asked(gateway)
    assert (kind, dict(schema)["required"], dict(schema)["additionalProperties"]) == ("json_schema", ["a"], False)


@pytest.mark.parametrize(
    ("member", "value"),
    [
        ("response_format", {"type": "json_object"}),
        ("structured_outputs", {"grammar": 'start: "a"'}),
        ("guided_json", SCHEMA),
        ("guided_regex", "a+"),
        ("guided_choice", ["a"]),
        ("guided_grammar", 'start: "a"'),
    ],
)
async def test_structures_of_chats_are_refused_where_others_are_known(
    gateway: RunningGateway, member: str, value: object
) -> None:
    for path, body, instead in [
        ("/v1/responses", {"input": "p"}, "use text.format, or chat completions"),
        ("/v1/messages", {"messages": MESSAGES, "max_tokens": 5}, "use output_config.format, or OpenAI's chat"),
    ]:
        assert (await gateway.post(path, body | {member: None})).status_code == 200
        answer = await gateway.post(path, body | {member: value})
        assert answer.status_code == 400
        assert f"{member} is not supported here: {instead}" in answer.json()["error"]["message"]

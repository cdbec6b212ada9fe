"""What a model's generation_config.json recommends for HTTP requests that leave it to the server."""

from collections.abc import AsyncIterator
from typing import Any

import pytest

from tandem.v1 import generation_pb2 as pb
from tests.fakes.sdk_router import Script
from tests.service.gateway.http import RunningGateway, running_gateway

RECOMMENDED = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.01, "repetition_penalty": 1.05}
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": {"prompt": "Hi", "max_tokens": 1},
    "/v1/responses": {"input": "Hi", "max_output_tokens": 1},
    "/v1/messages": CHAT,
    "/invocations": CHAT,
}


@pytest.fixture
async def gateway() -> AsyncIterator[RunningGateway]:
    async with running_gateway(Script(sampling_defaults=pb.SamplingDefaults(**RECOMMENDED))) as running:
        yield running


async def sampled(gateway: RunningGateway, path: str, body: dict[str, Any]) -> dict[str, float]:
    """The values of RECOMMENDED's members that the router receives."""
    answer = await gateway.post(path, body)
    assert answer.status_code == 200, answer.text
    sampling = gateway.script.requests[-1].sampling
    return {name: round(getattr(sampling, name), 6) for name in RECOMMENDED if sampling.HasField(name)}


@pytest.mark.parametrize("path", BODIES)
async def test_the_models_values_are_the_default(gateway: RunningGateway, path: str) -> None:
    assert await sampled(gateway, path, BODIES[path]) == RECOMMENDED
    own = {"temperature": 0.25, "top_p": 0.5}
    assert await sampled(gateway, path, BODIES[path] | own) == RECOMMENDED | own
    assert await sampled(gateway, path, BODIES[path] | {"temperature": None}) == RECOMMENDED


async def test_every_member_of_the_clients_own_goes_first(gateway: RunningGateway) -> None:
    own = {"temperature": 0.0, "top_k": -1, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}
    assert await sampled(gateway, "/v1/chat/completions", CHAT | own) == own | {"top_k": 0}


async def test_a_response_says_what_was_chosen(gateway: RunningGateway) -> None:
    body = BODIES["/v1/responses"]
    answer = (await gateway.post("/v1/responses", body)).json()
    assert (answer["temperature"], answer["top_p"]) == (0.6, 0.95)
    answer = (await gateway.post("/v1/responses", body | {"temperature": 2, "top_p": 0})).json()
    assert (answer["temperature"], answer["top_p"]) == (2, 0)


async def test_the_models_of_v1_models_have_no_more_members(gateway: RunningGateway) -> None:
    async with running_gateway() as plain:
        lists = [(await each.http.get("/v1/models")).json() for each in (gateway, plain)]
    assert lists[0] == lists[1]


@pytest.mark.parametrize("path", ["/invocations", "/generate"])
async def test_protocols_that_are_greedy_by_themselves_stay_so(gateway: RunningGateway, path: str) -> None:
    values = await sampled(gateway, path, {"inputs": "Hi", "parameters": {"max_new_tokens": 1}})
    assert values.get("temperature", 0.0) == 0.0
    assert not values.get("top_k")


@pytest.mark.parametrize("path", BODIES)
async def test_without_recommended_values_the_defaults_are_the_protocols(path: str) -> None:
    """As from routers of earlier versions."""
    async with running_gateway() as gateway:
        assert await sampled(gateway, path, BODIES[path]) == {"temperature": 1.0}


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/messages"])
async def test_models_with_stop_strings_are_asked_for_bytes(path: str) -> None:
    """By which the gateway tells the tokens of a stop string, and does not count them."""
    for stops in ((), ("###",)):
        async with running_gateway(Script(stop_strings=stops)) as gateway:
            assert (await gateway.post(path, BODIES[path])).status_code == 200
            assert gateway.script.requests[-1].output.own_bytes is bool(stops)

"""TGI's own client, unmodified, in an environment of its own."""

import json
from pathlib import Path

import grpc
import pytest

from tests.client_environment import output_of, python_with
from tests.fakes.sdk_router import Refusal
from tests.service.gateway.http import running_gateway

_PACKAGE = "text-generation==0.7.0"
_CLIENT = Path(__file__).with_name("text_generation_client.py")


@pytest.fixture(scope="session")
def python_with_client() -> str:
    return python_with(_PACKAGE, "text_generation")


@pytest.mark.timeout(360)
async def test_the_text_generation_client(python_with_client: str) -> None:
    async with running_gateway() as gateway:
        ok = Refusal(grpc.StatusCode.OK, after_messages=1000)
        overloaded = Refusal(grpc.StatusCode.RESOURCE_EXHAUSTED, trailing=(("tandem-error", "Overloaded"),))
        broken = Refusal(grpc.StatusCode.INVALID_ARGUMENT, "too many tokens", (("tandem-error", "InvalidRequest"),))
        gateway.script.refusals.extend([ok, ok, broken, overloaded])
        out = await output_of(python_with_client, _CLIENT, gateway.url)
    told = json.loads(out)
    assert told["text"] == "".join(told["tokens"]) == "".join(told["streamed"]) == told["last"]
    assert (told["finish_reason"], told["generated_tokens"], len(told["streamed"])) == ("length", 6, 6)
    assert told["prefill"] > 0
    assert told["errors"] == ["ValidationError", "OverloadedError"]

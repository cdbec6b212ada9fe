"""boto3's sagemaker-runtime, unmodified."""

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import closing
from typing import Any

import boto3
import grpc
import pytest
from botocore.config import Config
from botocore.eventstream import EventStreamBuffer
from botocore.exceptions import ClientError, EventStreamError

from gateway.lmi.sagemaker import payload_part
from tests.fakes.sdk_router import STORY, Refusal
from tests.service.gateway.http import RunningGateway, running_gateway

REST = STORY.removeprefix("One fine day")
PAYLOAD = {"inputs": "One fine day", "parameters": {"max_new_tokens": 100, "details": True}}


@pytest.fixture
async def gateway() -> AsyncIterator[RunningGateway]:
    async with running_gateway() as running:
        yield running


@pytest.fixture
def runtime(gateway: RunningGateway) -> Iterator[Any]:
    client = boto3.client(
        "sagemaker-runtime",
        region_name="us-east-1",
        endpoint_url=gateway.url,
        aws_access_key_id="tandem-key",
        aws_secret_access_key="unused",
        config=Config(retries={"max_attempts": 0}),
    )
    yield client
    client.close()


def arguments(payload: Any = PAYLOAD, name: str = "fake") -> dict[str, Any]:
    return {"EndpointName": name, "ContentType": "application/json", "Body": json.dumps(payload).encode()}


async def test_invoke_endpoint(gateway: RunningGateway, runtime: Any) -> None:
    def ask() -> Any:
        response = runtime.invoke_endpoint(**arguments())
        with closing(response["Body"]) as body:
            return response["ContentType"], json.loads(body.read())

    content_type, answer = await asyncio.to_thread(ask)
    assert content_type == "application/json"
    assert answer["generated_text"] == REST
    assert gateway.script.metadata[-1]["authorization"] == "Bearer tandem-key"


async def test_invoke_endpoint_with_response_stream(runtime: Any) -> None:
    def ask() -> tuple[str, list[bytes]]:
        response = runtime.invoke_endpoint_with_response_stream(**arguments(PAYLOAD | {"stream": True}))
        with closing(response["Body"]) as body:
            return response["ContentType"], [event["PayloadPart"]["Bytes"] for event in body]

    content_type, parts = await asyncio.to_thread(ask)
    assert content_type == "application/jsonlines"
    lines = [json.loads(line) for line in b"".join(parts).splitlines()]
    assert "".join(line["token"]["text"] for line in lines) == REST
    assert lines[-1]["generated_text"] == REST


@pytest.mark.parametrize(("output_formatter", "end"), [("auto", b"\n"), ("sse", b"\n\n")])
async def test_a_part_of_a_stream_is_one_line(output_formatter: str, end: bytes) -> None:
    """Also where several are ready at once, as the role's and the first token's of a chat are."""
    chat = {"messages": [{"role": "user", "content": "One fine day"}], "stream": True}
    async with running_gateway(output_formatter=output_formatter) as gateway:
        response = await gateway.post("/endpoints/fake/invocations-response-stream", chat)
    buffer = EventStreamBuffer()
    buffer.add_data(response.content)
    parts = [event.payload for event in buffer]
    assert all(part.endswith(end) and part.count(end) == 1 for part in parts)
    lines = [part.removeprefix(b"data: ") for part in parts if part != b"data: [DONE]\n\n"]
    choices = [choice for line in lines for choice in json.loads(line)["choices"]]
    assert choices[0]["delta"]["role"] == "assistant"
    assert "".join(choice["delta"].get("content", "") for choice in choices) == STORY


@pytest.mark.parametrize(
    "payload",
    [PAYLOAD | {"stream": False}, PAYLOAD | {"inputs": ["One fine day"]}],
    ids=["the body says so", "a list cannot be streamed"],
)
async def test_an_answer_that_is_not_a_stream_is_one_line(runtime: Any, payload: Any) -> None:
    def ask() -> bytes:
        response = runtime.invoke_endpoint_with_response_stream(**arguments(payload))
        with closing(response["Body"]) as body:
            return b"".join(event["PayloadPart"]["Bytes"] for event in body)

    content = await asyncio.to_thread(ask)
    assert content.endswith(b"\n")
    answer = json.loads(content)
    assert (answer[0] if isinstance(answer, list) else answer)["generated_text"] == REST


@pytest.mark.parametrize(
    ("payload", "text_of"),
    [
        ({"prompt": "One fine day", "max_tokens": 100}, lambda line: line["choices"][0]["text"]),
        ({"messages": [{"role": "user", "content": "One fine day"}]}, lambda line: delta_of(line).get("content", "")),
    ],
    ids=["prompt", "messages"],
)
async def test_a_body_without_stream_is_streamed(runtime: Any, payload: Any, text_of: Any) -> None:
    def ask() -> list[Any]:
        response = runtime.invoke_endpoint_with_response_stream(**arguments(payload))
        with closing(response["Body"]) as body:
            return list(map(json.loads, b"".join(event["PayloadPart"]["Bytes"] for event in body).splitlines()))

    lines = await asyncio.to_thread(ask)
    assert len(lines) > 5
    assert "".join(map(text_of, lines)) in (REST, STORY)


def delta_of(line: Any) -> Any:
    return line["choices"][0]["delta"]


async def test_errors_of_the_model_are_wrapped_in_a_model_error(gateway: RunningGateway, runtime: Any) -> None:
    gateway.script.refusals.append(Refusal(grpc.StatusCode.RESOURCE_EXHAUSTED, "full"))
    with pytest.raises(ClientError) as caught:
        await asyncio.to_thread(lambda: runtime.invoke_endpoint(**arguments()))
    assert caught.value.response["Error"]["Code"] == "ModelError"
    assert caught.value.response["OriginalStatusCode"] == 503
    assert "WlmCapacityException" in caught.value.response["OriginalMessage"]


async def test_another_endpoint_is_a_validation_error(gateway: RunningGateway, runtime: Any) -> None:
    refusal = Refusal(grpc.StatusCode.NOT_FOUND, "no such model", (("tandem-error", "ModelNotFound"),))
    gateway.script.refusals.append(refusal)
    with pytest.raises(ClientError) as caught:
        await asyncio.to_thread(lambda: runtime.invoke_endpoint(**arguments(name="other")))
    assert caught.value.response["Error"]["Code"] == "ValidationError"


async def test_a_failed_stream_raises(gateway: RunningGateway, runtime: Any) -> None:
    gateway.script.refusals.append(Refusal(grpc.StatusCode.INTERNAL, "broken", after_messages=2))

    def ask() -> None:
        response = runtime.invoke_endpoint_with_response_stream(**arguments(PAYLOAD | {"stream": True}))
        with closing(response["Body"]) as body:
            assert list(body)

    with pytest.raises(EventStreamError, match="ModelStreamError"):
        await asyncio.to_thread(ask)


def test_messages_may_be_split_anywhere() -> None:
    contents = [b"", b"x", bytes(range(256)) * 9]
    stream = b"".join(map(payload_part, contents))
    buffer = EventStreamBuffer()
    found = []
    for place in range(0, len(stream), 7):
        buffer.add_data(stream[place : place + 7])
        found += [event.payload for event in buffer]
    assert found == contents

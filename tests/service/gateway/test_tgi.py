"""Clients of Text Generation Inference: huggingface_hub's, unmodified, and the strict reader of text-generation."""

import json
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from huggingface_hub import AsyncInferenceClient
from huggingface_hub.errors import OverloadedError, ValidationError
from pydantic import BaseModel, ConfigDict

from tests.defects import Repaired
from tests.fakes.sdk_router import STORY, Refusal, Script
from tests.service.gateway.http import RunningGateway, running_gateway

REST = STORY.removeprefix("One fine day")


@pytest.fixture(autouse=True)
def online(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other tests forbid the hub's client all calls, which would be ours to the gateway, too."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)


@pytest.fixture
async def gateway() -> AsyncIterator[RunningGateway]:
    async with running_gateway() as running:
        yield running


class Strict(BaseModel):
    """As text-generation reads answers: nothing may be missing, nothing of another type."""

    model_config = ConfigDict(strict=True)


class PrefillToken(Strict):
    id: int
    text: str
    logprob: float | None


class StrictToken(Strict):
    id: int
    text: str
    logprob: float
    special: bool


class StrictDetails(Strict):
    finish_reason: str
    generated_tokens: int
    seed: int | None
    prefill: list[PrefillToken]
    tokens: list[StrictToken]
    top_tokens: list[list[StrictToken]] | None = None


class StrictAnswer(Strict):
    generated_text: str
    details: StrictDetails


async def test_hub_generates_with_details(gateway: RunningGateway) -> None:
    async with AsyncInferenceClient(gateway.url) as client:
        answer = await client.text_generation(
            "One fine day", details=True, max_new_tokens=9, decoder_input_details=True, return_full_text=False
        )
    assert answer.generated_text == STORY[12:20]
    assert answer.details is not None
    assert (answer.details.finish_reason, answer.details.generated_tokens) == ("length", 9)
    assert answer.details.seed is None
    assert "".join(token.text for token in answer.details.prefill) == "One fine day"
    assert [token.logprob for token in answer.details.prefill][:2] == [None, -1.0]
    asked = gateway.script.requests[-1]
    assert asked.sampling.temperature == 0
    assert asked.output.include_stop


async def test_hub_gets_the_prompt_in_front_by_default(gateway: RunningGateway) -> None:
    async with AsyncInferenceClient(gateway.url) as client:
        assert await client.text_generation("One fine day", max_new_tokens=100) == STORY


async def test_hub_streams(gateway: RunningGateway) -> None:
    async with AsyncInferenceClient(gateway.url) as client:
        stream = await client.text_generation(
            "One fine day", details=True, stream=True, max_new_tokens=100, seed=5, temperature=0.5, top_n_tokens=2
        )
        events = [event async for event in stream]
    assert [event.index for event in events] == list(range(1, len(events) + 1))
    assert "".join(event.token.text for event in events) == REST
    assert all(event.generated_text is None for event in events[:-1])
    last = events[-1]
    assert last.token.special
    assert last.generated_text == STORY
    assert last.details is not None
    assert (last.details.finish_reason, last.details.seed, last.details.input_length) == ("eos_token", 5, 12)
    assert events[0].top_tokens is not None
    assert len(events[0].top_tokens) == 2


async def test_hub_chats(gateway: RunningGateway) -> None:
    async with AsyncInferenceClient(gateway.url) as client:
        stream = await client.chat_completion([{"role": "user", "content": "hi"}], stream=True, max_tokens=100)
        chunks = [chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices]
    assert "".join(chunks) == STORY


async def test_hub_asks_for_info_and_health(gateway: RunningGateway, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.backend._HEALTH_FRESH_S", 0.0)
    async with AsyncInferenceClient(gateway.url, provider="hf-inference") as client:
        info = await client.get_endpoint_info()
        assert (info["model_id"], info["max_input_tokens"], info["max_total_tokens"]) == ("fake", 999, 1000)
        assert await client.health_check() is True
        await gateway.router.set_serving(False)
        assert await client.health_check() is False
    response = await gateway.http.get("/health")
    assert (response.status_code, response.json()["error_type"]) == (503, "healthcheck")


@pytest.mark.parametrize("stream", [False, True])
async def test_hub_raises_the_error(gateway: RunningGateway, stream: bool) -> None:
    async def ask(**arguments: Any) -> None:
        answer = await client.text_generation("x", stream=stream, **arguments)
        if stream:
            assert [event async for event in answer]

    async with AsyncInferenceClient(gateway.url) as client:
        with pytest.raises(ValidationError, match=r"Input validation error: parameters\.typical_p"):
            await ask(typical_p=1.5)
        gateway.script.refusals.append(Refusal(grpc.StatusCode.RESOURCE_EXHAUSTED, "full"))
        with pytest.raises(OverloadedError):
            await ask()


async def test_strict_clients_get_every_member(gateway: RunningGateway) -> None:
    parameters = {"details": True, "decoder_input_details": True, "do_sample": True, "top_n_tokens": 1}
    whole = (await gateway.post("/generate", {"inputs": "One", "parameters": parameters})).json()
    answer = StrictAnswer.model_validate(whole)
    assert answer.generated_text == STORY[3:]
    assert answer.details.seed is not None, "drawn by us, and told"
    assert gateway.script.requests[-1].sampling.seed == answer.details.seed
    compat = (await gateway.post("/", {"inputs": "One", "parameters": parameters})).json()
    assert [StrictAnswer.model_validate(each).generated_text for each in compat] == [STORY]


async def test_every_parameter_reaches_the_router(gateway: RunningGateway) -> None:
    parameters = {
        "typical_p": 0.5,
        "top_k": 3,
        "top_p": 0.75,
        "repetition_penalty": 1.5,
        "frequency_penalty": 0.5,
        "stop": ["zzz"],
        "truncate": 2,
        "seed": 7,
    }
    assert (await gateway.post("/generate", {"inputs": "One", "parameters": parameters})).status_code == 200
    asked = gateway.script.requests[-1]
    sampling = asked.sampling
    assert (sampling.typical_p, sampling.top_k, sampling.top_p, sampling.seed) == (0.5, 3, 0.75, 7)
    assert (sampling.repetition_penalty, sampling.frequency_penalty) == (1.5, 0.5)
    assert (list(sampling.stop), asked.output.include_stop, sampling.truncate_prompt_tokens) == (["zzz"], True, 2)
    assert not sampling.HasField("max_new_tokens"), "the rest of the budget"


@pytest.mark.parametrize(
    ("parameters", "temperature"),
    [(None, 1.0), ({}, 0.0), ({"do_sample": True}, 1.0), ({"top_k": 3}, 1.0), ({"temperature": 0.5}, 0.5)],
)
async def test_when_tgi_samples(gateway: RunningGateway, parameters: dict[str, Any] | None, temperature: float) -> None:
    body = {"inputs": "x"} | ({} if parameters is None else {"parameters": parameters})
    assert (await gateway.post("/generate", body)).status_code == 200
    assert gateway.script.requests[-1].sampling.temperature == temperature


@pytest.mark.parametrize(
    ("parameters", "named"),
    [
        ({"temperature": 0}, "temperature"),
        ({"top_p": 1.5}, "top_p"),
        ({"top_k": 0}, "top_k"),
        ({"grammar": {"type": "yaml", "value": {}}}, "grammar"),
        ({"best_of": 2}, "you must use sampling when `best_of` is > 1"),
        ({"best_of": 2, "do_sample": True, "seed": 3}, "`seed` must not be set when `best_of` > 1"),
        ({"best_of": 9, "do_sample": True}, "best_of"),
        ({"watermark": True}, "watermark"),
        ({"max_new_tokens": 0}, "max_new_tokens"),
        ({"seed": -1}, "seed"),
    ],
)
async def test_what_is_refused(gateway: RunningGateway, parameters: dict[str, Any], named: str) -> None:
    response = await gateway.post("/generate", {"inputs": "x", "parameters": parameters})
    assert response.status_code == 422
    assert response.json()["error_type"] == "validation"
    assert named in response.json()["error"]


async def test_an_adapter_is_passed_on(gateway: RunningGateway) -> None:
    response = await gateway.post("/generate", {"inputs": "x", "parameters": {"adapter_id": "mine"}})
    assert response.status_code == 200
    assert gateway.script.requests[-1].adapter == "mine"


async def test_best_of_is_the_best_and_all_others(gateway: RunningGateway) -> None:
    parameters = {"best_of": 3, "do_sample": True, "details": True, "max_new_tokens": 5}
    (answer,) = (await gateway.post("/", {"inputs": "One", "parameters": parameters})).json()
    asked = gateway.script.requests[-1]
    assert (asked.num_choices, asked.best_of) == (3, 3)
    assert answer["generated_text"] == STORY[:8]
    others = answer["details"]["best_of_sequences"]
    assert [(each["generated_text"], each["generated_tokens"]) for each in others] == [(STORY[:8], 5)] * 2
    assert answer["details"]["seed"] is None
    (line,) = await gateway.lines("/generate_stream", {"inputs": "One", "parameters": parameters})
    assert "`best_of` != 1 is not supported when streaming tokens" in line


TIMES = {"x-validation-time": "1", "x-queue-time": "1", "x-inference-time": "33", "x-time-per-token": "6"}


@pytest.mark.parametrize("path", ["/", "/generate"])
async def test_headers_have_the_time_of_each_phase(gateway: RunningGateway, path: str) -> None:
    """As the router measured it: 35 ms, of which it took 1 to prepare and 1 in the queue."""
    headers = (await gateway.post(path, {"inputs": "Öne", "parameters": {"max_new_tokens": 5}})).headers
    assert {name: headers[name] for name in TIMES} == TIMES
    assert (headers["x-prompt-tokens"], headers["x-generated-tokens"]) == ("4", "5")
    assert (headers["x-compute-type"], headers["x-compute-characters"]) == ("unknown", "3")
    assert int(headers["x-total-time"]) == int(float(headers["x-compute-time"]) * 1000)


async def test_headers_of_a_stream_are_those_known_before_it(gateway: RunningGateway) -> None:
    for body in ({"inputs": "One"}, {"inputs": "One", "parameters": {"watermark": True}}):
        headers = (await gateway.post("/generate_stream", body)).headers
        assert (headers["x-compute-type"], headers["x-compute-characters"]) == ("unknown", "3")
        assert headers["x-accel-buffering"] == "no"
        assert not TIMES.keys() & headers.keys()


async def test_top_p_of_one_is_accepted(gateway: RunningGateway) -> None:
    assert (await gateway.post("/generate", {"inputs": "x", "parameters": {"top_p": 1.0}})).status_code == 200


async def test_errors_of_a_stream_are_events_with_status_200(gateway: RunningGateway) -> None:
    gateway.script.refusals.append(Refusal(grpc.StatusCode.INTERNAL, "broken", after_messages=2))
    lines = await gateway.lines("/generate_stream", {"inputs": "One"})
    assert len(lines) == 3
    assert json.loads(lines[-1].removeprefix("data: "))["error_type"] == "generation"
    gateway.script.refusals.append(Refusal(grpc.StatusCode.RESOURCE_EXHAUSTED))
    (line,) = await gateway.lines("/generate_stream", {"inputs": "One"})
    assert json.loads(line.removeprefix("data: ")) == {"error": "Model is overloaded", "error_type": "overloaded"}
    (line,) = await gateway.lines("/generate_stream", {"inputs": ""})
    assert "cannot be empty" in line


async def test_the_last_token_allowed_ends_by_length_whatever_it_is() -> None:
    async with running_gateway(Script(story="ab")) as gateway:
        body = {"inputs": "a", "parameters": {"max_new_tokens": 2, "details": True}}
        assert (await gateway.post("/generate", body)).json()["details"]["finish_reason"] == "length"


async def test_truncate_leaves_the_text_that_is_shown(gateway: RunningGateway) -> None:
    body = {"inputs": "One fine day", "parameters": {"truncate": 3, "return_full_text": True, "max_new_tokens": 1}}
    assert (await gateway.post("/generate", body)).json()["generated_text"].startswith("One fine day")
    assert gateway.script.requests[-1].sampling.truncate_prompt_tokens == 3


async def test_tokenize(gateway: RunningGateway) -> None:
    tokens = (await gateway.post("/tokenize", {"inputs": "day"})).json()
    assert tokens[1] == {"id": ord("a"), "text": "a", "start": 1, "stop": 2}
    chat = (await gateway.post("/chat_tokenize", {"messages": [{"role": "user", "content": "hi"}]})).json()
    assert chat["templated_text"] == "user: hi\n"
    assert len(chat["tokenize_response"]) == len("user: hi\n")


async def test_another_content_type_is_refused(gateway: RunningGateway) -> None:
    response = await gateway.http.post("/generate", content=b'{"inputs":"x"}', headers={"content-type": "text/plain"})
    assert response.status_code == 415


async def test_tokenize_as_vllm(gateway: RunningGateway, repaired: Repaired) -> None:
    ids = list(b"day")
    told = (await gateway.post("/tokenize", {"model": "fake", "prompt": "day", "return_token_strs": True})).json()
    assert told == {"count": 3, "max_model_len": 1000, "tokens": ids, "token_strs": ["d", "a", "y"]}
    chat = (await gateway.post("/tokenize", {"messages": [{"role": "user", "content": "hi"}]})).json()
    assert (chat["count"], chat["token_strs"]) == (len("user: hi\n"), None)
    assert (await gateway.post("/detokenize", {"model": "fake", "tokens": ids})).json() == {"prompt": "day"}
    assert (await gateway.post("/detokenize", {"tokens": []})).json() == {"prompt": ""}
    refused = await gateway.post("/detokenize", {"tokens": [10**6]})
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "tokens"
    assert refused.json()["error"]["message"].startswith("tokens: token id 1000000 is not in the vocabulary")
    refused = await gateway.post("/detokenize", {"tokens": [5] * 5000})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "tokens")
    words = "This model's maximum context length is exceeded: the prompt has 5000 tokens"
    assert refused.json()["error"]["message"].startswith(words)
    repaired("D38", "401: no key is that long; all of the history; 400, naming tokens")

"""LMI's formats, as its clients read them."""

import json
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from tests.defects import Repaired
from tests.fakes.sdk_router import STORY, Refusal
from tests.service.gateway.http import RunningGateway, running_gateway

REST = STORY.removeprefix("One fine day")
LONG = {"max_new_tokens": 100}


@pytest.fixture
async def gateway() -> AsyncIterator[RunningGateway]:
    async with running_gateway() as running:
        yield running


def invocation(inputs: Any = "One fine day", *, stream: bool = False, **parameters: Any) -> dict[str, Any]:
    return {"inputs": inputs, "parameters": LONG | parameters, "stream": stream}


async def test_whole_answer(gateway: RunningGateway) -> None:
    assert (await gateway.post("/invocations", invocation())).json() == {"generated_text": REST}
    asked = gateway.script.requests[-1]
    assert (asked.sampling.temperature, asked.sampling.max_new_tokens) == (0.0, 100)
    body = invocation(details=True, decoder_input_details=True, return_full_text=True, max_new_tokens=2)
    answer = (await gateway.post("/predictions/fake", body)).json()
    assert answer["generated_text"] == "One fine day a"
    details = answer["details"]
    assert (details["finish_reason"], details["generated_tokens"], details["inputs"]) == ("length", 2, "One fine day")
    assert details["tokens"] == [{"id": ord(char), "text": char, "log_prob": -0.5} for char in " a"]
    assert [token["log_prob"] for token in details["prefill"]][:2] == [None, -1.0]


async def test_json_lines(gateway: RunningGateway) -> None:
    async with gateway.http.stream("POST", "/invocations", json=invocation(stream=True, details=True)) as response:
        assert response.headers["content-type"] == "application/jsonlines"
        assert response.headers["x-request-id"]
        lines = [json.loads(line) async for line in response.aiter_lines()]
    assert lines[0] == {"token": {"id": ord(" "), "text": " ", "log_prob": -0.5}}
    assert "".join(line["token"]["text"] for line in lines) == REST
    assert lines[-1]["token"]["special_token"] is True
    assert lines[-1]["generated_text"] == REST
    assert lines[-1]["details"] == {"finish_reason": "eos_token", "generated_tokens": 22, "inputs": "One fine day"}


async def test_the_format_of_026(gateway: RunningGateway) -> None:
    async with running_gateway(lmi_schema="0.26", output_formatter="jsonlines") as old:
        lines = [json.loads(line) for line in await old.lines("/invocations", {"inputs": "One fine day"})]
    assert lines[-1] == {"token": {"id": 256, "log_prob": -0.5, "special_token": True}, "generated_text": REST}


async def test_the_async_format() -> None:
    async with running_gateway(lmi_schema="async") as newest:
        body = invocation(stream=True, details=True, seed=3)
        lines = [json.loads(line) for line in await newest.lines("/invocations", body)]
        assert newest.script.requests[-1].sampling.temperature == 1.0
    token = {"id": ord(" "), "text": " ", "logprob": -0.5, "log_prob": -0.5}
    assert lines[0] == {"index": 0, "token": token, "generated_text": None, "details": None}
    assert lines[-1]["details"] == {"finish_reason": "stop", "generated_tokens": 22, "seed": 3, "input_length": 12}


async def test_tgi_compat_is_an_array_and_events() -> None:
    async with running_gateway(tgi_compat=True) as compat:
        (answer,) = (await compat.post("/invocations", invocation(return_full_text=False))).json()
        lines = await compat.lines("/invocations", invocation(stream=True))
    assert answer["generated_text"] == REST
    assert answer["details"]["tokens"][0] == {"id": ord(" "), "text": " ", "logprob": -0.5, "special": False}
    assert json.loads(lines[-1].removeprefix("data: "))["generated_text"] == STORY


async def test_the_members_select_chat_or_completions(gateway: RunningGateway) -> None:
    chat = {"messages": [{"role": "user", "content": "hi"}]}
    assert (await gateway.post("/invocations", chat)).json()["choices"][0]["message"]["content"] == STORY
    lines = [json.loads(line) for line in await gateway.lines("/invocations", chat | {"stream": True})]
    assert "".join(line["choices"][0]["delta"].get("content", "") for line in lines) == STORY
    completion = {"prompt": "One fine day", "max_tokens": 100}
    assert (await gateway.post("/invocations", completion)).json()["choices"][0]["text"] == REST


async def test_many_inputs_keep_their_order(gateway: RunningGateway) -> None:
    inputs = ["One fine", "One", "nothing of it"]
    answers = (await gateway.post("/invocations", invocation(inputs, n=2))).json()
    assert [answer["generated_text"] for answer in answers] == [STORY[8:], STORY[3:], STORY]
    assert [len(answer["details"]["best_of_sequences"]) for answer in answers] == [1, 1, 1]
    gateway.script.refusals.append(Refusal(grpc.StatusCode.INTERNAL))
    assert (await gateway.post("/invocations", invocation(inputs))).status_code == 424, "all or nothing"


async def test_other_content_types(gateway: RunningGateway) -> None:
    table = 'inputs,note\n"One fine day",x\n'
    with_mark = f"\ufeff{table}"  # as spreadsheets write UTF-8
    for content, kind in (("One fine day", "text/plain"), (table, "text/csv"), (with_mark, "text/csv")):
        headers = {"content-type": kind}
        answer = (await gateway.http.post("/invocations", content=content.encode(), headers=headers)).json()
        first = answer[0] if isinstance(answer, list) else answer
        assert first["generated_text"] == REST


@pytest.mark.parametrize(
    ("parameters", "temperature"),
    [
        ({}, 0.0),
        ({"do_sample": True}, 1.0),
        ({"do_sample": False, "temperature": 0.7}, 0.0),
        ({"temperature": 0.5}, 0.5),
        ({"do_sample": True, "temperature": 0.5, "top_k": -1, "top_p": 0}, 0.5),
    ],
)
async def test_when_lmi_samples(gateway: RunningGateway, parameters: dict[str, Any], temperature: float) -> None:
    assert (await gateway.post("/invocations", invocation(**parameters))).status_code == 200
    asked = gateway.script.requests[-1].sampling
    assert asked.temperature == temperature
    assert asked.top_k == 0
    assert not asked.HasField("top_p")


async def test_stop_has_two_names_and_unknown_parameters_are_dropped(gateway: RunningGateway) -> None:
    body = invocation(stop_sequences=["x"], include_stop_str_in_output=True, ignore_eos_token=True, what_is_this=1)
    assert (await gateway.post("/invocations", body)).status_code == 200
    asked = gateway.script.requests[-1]
    assert (list(asked.sampling.stop), asked.output.include_stop, asked.sampling.ignore_eos) == (["x"], True, True)
    assert (await gateway.post("/invocations", invocation(stop=["y"]))).status_code == 200
    assert list(gateway.script.requests[-1].sampling.stop) == ["y"]


async def test_every_parameter_reaches_the_router(gateway: RunningGateway) -> None:
    parameters = {
        "typical_p": 0.5,
        "min_length": 2,
        "bad_sequences": ["no"],
        "logit_bias": {"7": -1.0},
        "truncate": 4,
        "skip_special_tokens": False,
        "spaces_between_special_tokens": False,
        "logprobs": 2,
        "prompt_logprobs": 1,
    }
    answer = (await gateway.post("/invocations", invocation(**parameters))).json()
    asked = gateway.script.requests[-1]
    sampling, output = asked.sampling, asked.output
    assert (sampling.typical_p, sampling.min_new_tokens, sampling.truncate_prompt_tokens) == (0.5, 2, 4)
    assert (list(sampling.bad_words), dict(sampling.logit_bias)) == (["no"], {7: -1.0})
    assert (output.skip_special_tokens, output.spaces_between_special_tokens) == (False, False)
    assert (output.top_logprobs, output.prompt_logprobs) == (2, True)
    assert len(answer["details"]["top_tokens"][0]) == 2
    assert answer["details"]["prefill"][0]["log_prob"] is None
    await gateway.post("/invocations", invocation(typical_p=0, logprobs=1))
    asked = gateway.script.requests[-1]
    assert not asked.sampling.HasField("typical_p"), "0 is off"
    assert (asked.output.top_logprobs, asked.output.prompt_logprobs) == (0, False)


@pytest.mark.parametrize(
    ("parameters", "asked", "num_others"),
    [
        ({"best_of": 3}, (3, 3), 2),
        ({"n": 2, "best_of": 3}, (2, 3), 1),
        ({"n": 2}, (2, 0), 1),
        ({"best_of": 1}, (1, 0), 0),
    ],
)
async def test_n_and_best_of(
    gateway: RunningGateway, parameters: dict[str, Any], asked: tuple[int, int], num_others: int
) -> None:
    answer = (await gateway.post("/invocations", invocation(**parameters))).json()
    request = gateway.script.requests[-1]
    assert (request.num_choices, request.best_of) == asked
    assert len(answer.get("details", {}).get("best_of_sequences", ())) == num_others
    response = await gateway.post("/invocations", invocation(stream=True, **parameters))
    assert response.status_code == (424 if num_others else 200)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"{", "JSON"),
        (b"[1]", "JSON object"),
        (b"{}", "inputs"),
        (b'{"inputs": 3}', "inputs"),
        (b'{"inputs": ["a"], "stream": true}', "streaming"),
        (b'{"inputs": "a", "parameters": {"num_beams": 4}}', "num_beams"),
        (b'{"inputs": "a", "parameters": {"top_k": -5}}', "top_k must be an integer in"),
        (b'{"inputs": "a", "parameters": {"bad_sequences": [["b"]]}}', "bad_sequences"),
        (b'{"inputs": "a", "adapters": 3}', "adapters"),
        (b'{"inputs": ["a", "b"], "adapters": ["c"]}', "adapters must have one name for each input: got 1 for 2"),
        (b'{"prompt": "a", "adapters": ["b", "c"]}', "adapters must be the name of one adapter"),
        (b'{"inputs": "a", "parameters": {"temperature": "hot"}}', "temperature"),
    ],
)
async def test_unparsable_bodies_are_424(gateway: RunningGateway, body: bytes, said: str) -> None:
    response = await gateway.http.post("/invocations", content=body, headers={"content-type": "application/json"})
    assert response.status_code == 424
    assert response.json()["code"] == 424
    assert said in response.json()["error"]


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ({"inputs": "a", "adapters": "mine"}, ["mine"]),
        ({"inputs": ["a", "b", "c"], "adapters": ["mine", "", "other"]}, ["mine", "", "other"]),
        ({"inputs": ["a", "b"], "adapters": "mine"}, ["mine", "mine"]),
        ({"inputs": ["a", "b"]}, ["", ""]),
    ],
)
async def test_inputs_have_adapters(gateway: RunningGateway, body: dict[str, Any], named: list[str]) -> None:
    assert (await gateway.http.post("/invocations", json=body)).status_code == 200
    prompts = [body["inputs"]] if isinstance(body["inputs"], str) else body["inputs"]
    asked = {request.prompt: request.adapter for request in gateway.script.requests}
    assert [asked[prompt] for prompt in prompts] == named


@pytest.mark.parametrize("body", [{"inputs": "a"}, {"prompt": "a"}, {"messages": [{"role": "user", "content": "a"}]}])
async def test_sagemakers_header_names_an_adapter(gateway: RunningGateway, body: dict[str, Any]) -> None:
    header = {"x-amzn-sagemaker-adapter-identifier": "mine"}
    assert (await gateway.http.post("/invocations", json=body, headers=header)).status_code == 200
    request = gateway.script.requests[-1]
    assert "mine" in (request.adapter, request.model)


async def test_error_bodies_are_those_of_lmi(gateway: RunningGateway) -> None:
    full = Refusal(grpc.StatusCode.RESOURCE_EXHAUSTED, "full", (("retry-after-ms", "100"),))
    gateway.script.refusals.extend([full, full, Refusal(grpc.StatusCode.INTERNAL)])
    for stream in (False, True):
        response = await gateway.post("/invocations", invocation(stream=stream))
        assert response.status_code == 503
        assert response.json() == {"code": 503, "type": "WlmCapacityException", "message": "full"}
        assert response.headers["retry-after"] == "1"
    assert (await gateway.post("/invocations", invocation())).status_code == 424
    response = await gateway.post("/nothing/here", {})
    assert (response.status_code, response.json()["code"]) == (404, 404)
    assert (await gateway.http.get("/invocations")).status_code == 405
    assert (await gateway.http.options("/invocations")).json() == {}


async def test_a_failed_stream_ends_with_an_error_line(gateway: RunningGateway) -> None:
    gateway.script.refusals.append(Refusal(grpc.StatusCode.INTERNAL, "broken", after_messages=2))
    lines = [json.loads(line) for line in await gateway.lines("/invocations", invocation(stream=True))]
    assert len(lines) == 3
    assert lines[-1]["token"]["id"] == -1
    assert lines[-1]["details"]["finish_reason"] == "error"


async def test_max_seq_len_bounds_prompt_and_answer(gateway: RunningGateway, repaired: Repaired) -> None:
    """As FasterTransformer's handler had it. The fake's prompts have a token for each byte."""

    async def asked(**parameters: Any) -> int:
        body = {"inputs": "One fine day", "parameters": parameters}
        assert (await gateway.post("/invocations", body)).status_code == 200
        most: int = gateway.script.requests[-1].sampling.max_new_tokens
        return most

    assert await asked(max_seq_len=50) == 50 - 12
    assert await asked(max_seq_len=500) == 500 - 12
    assert await asked(max_seq_len=50, max_new_tokens=5) == 5
    assert await asked(max_seq_len=14, max_new_tokens=5) == 2
    assert await asked(max_seq_len=14, truncate=8) == 6
    body = {"inputs": ["One fine day", "One"], "parameters": {"max_seq_len": 20}}
    assert len((await gateway.post("/invocations", body)).json()) == 2
    assert {each.sampling.max_new_tokens for each in gateway.script.requests[-2:]} == {8, 17}
    refused = await gateway.post("/invocations", {"inputs": "One fine day", "parameters": {"max_seq_len": 12}})
    assert refused.status_code == 424
    assert "max_seq_len (12) must be greater than the prompt's tokens (12)" in refused.json()["error"]
    repaired("F12", "max_seq_len 50 with a prompt of 12 tokens: 38 new tokens at most")
    repaired("M13", "max_seq_len bounds prompt and new tokens together")


async def test_parameters_without_effect_are_named_with_the_reason(
    gateway: RunningGateway, capsys: pytest.CaptureFixture[str], repaired: Repaired
) -> None:
    await gateway.post("/invocations", invocation(length_penalty=2.0, early_stopping=True, watermark=True))
    [line] = [line for line in capsys.readouterr().out.splitlines() if "have no effect" in line]
    for name in ("length_penalty", "early_stopping"):
        assert f"'{name}': 'there is no beam search'" in line
    assert "'watermark': 'unknown'" in line
    repaired("M13", "length_penalty, early_stopping: one line of the log names them and why they have no effect")

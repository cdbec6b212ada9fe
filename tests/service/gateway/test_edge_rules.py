"""Rules for the edges of each dialect, over a real router and fake workers whose texts are asked for by logit bias.

Others of these rules have their tests where the rest of their subject is: texts that come in any pieces
(unit/router/test_text_stream.py, test_choice.py), log-probs of the raw distribution
(component/sampling/test_sampler.py), the first token's from the prefill worker (e2e/test_parity.py), statuses before
the first byte, [DONE], pings, refusals and whole lists of inputs (test_openai.py, test_lmi.py, test_tgi.py,
test_streams.py), JSON lines in chunks and in silence (test_json_lines.py), clients that leave (router/test_cancel.py,
test_life.py), readiness (test_access.py), n and best_of (router/test_choices.py).
"""

import json
from collections.abc import AsyncIterator
from typing import Any

import httpx2
import pytest

from tests.fakes.router_model import EOS_ID
from tests.fakes.router_workers import PrefillScript
from tests.fakes.sdk_router import STORY, Script
from tests.service.gateway.http import gateway_at, running_gateway
from tests.service.router.test_generate import TOKENIZER, says

Json = dict[str, Any]
PROMPT = "q" * 6  # of as many tokens
TOKENS = list(STORY.encode())


@pytest.fixture
async def http(make_mesh: Any) -> AsyncIterator[httpx2.AsyncClient]:
    """A gateway in front of a router with workers that say "abcabc..." if asked to by the bias of `abc`."""
    mesh = await make_mesh()
    prefill = await mesh.prefill()
    await mesh.decode()
    prefill.scripts = [PrefillScript(cached_tokens=4)]
    assert len(TOKENIZER.encode(PROMPT, add_special_tokens=False)) % 3 == 0
    async with gateway_at(mesh.router.public.address) as (_, _, client):
        yield client


def abc() -> dict[str, float]:
    return {str(token): bias for token, bias in says("abc", at=0).items()}


async def events(http: httpx2.AsyncClient, path: str, body: Json) -> list[Json]:
    """Of a stream, whatever its framing; every line is an event or empty."""
    response = await http.post(path, json=body)
    assert response.status_code == 200
    assert response.content[:1].strip(), "the first chunk is an event, for it decides the status"
    lines = [line.removeprefix("data: ") for line in response.text.split("\n") if line]
    return [json.loads(line) for line in lines if line != "[DONE]"]


async def test_a_stop_string_over_several_tokens_in_json_lines(http: httpx2.AsyncClient) -> None:
    """One event for each token, with its id and log-prob, also while its text is held back."""
    for wanted, texts in ((False, ["a", "b", "", ""]), (True, ["a", "b", "", "ca"])):
        parameters = {"logit_bias": abc(), "stop": ["ca"], "include_stop_str_in_output": wanted, "max_new_tokens": 9}
        body = {"inputs": PROMPT, "parameters": parameters | {"details": True}, "stream": True}
        lines = await events(http, "/invocations", body)
        assert [line["token"]["text"] for line in lines] == texts
        assert all(isinstance(line["token"]["log_prob"], float) and line["token"]["id"] for line in lines)
        assert lines[-1]["generated_text"] == "".join(texts)
        assert lines[-1]["details"]["finish_reason"] == "stop_sequence"
        assert lines[-1]["details"]["generated_tokens"] == 4


@pytest.mark.parametrize("stream", [False, True])
async def test_a_stop_string_is_no_part_of_an_openai_answer(http: httpx2.AsyncClient, stream: bool) -> None:
    """Neither of the text nor of the log-probs nor of the counts; nothing is sent for what is held back."""
    body = {"prompt": PROMPT, "logit_bias": abc(), "stop": ["ca"], "logprobs": 0, "max_tokens": 9, "stream": stream}
    if not stream:
        answer = (await http.post("/v1/completions", json=body)).json()
        choices, usage = answer["choices"], answer["usage"]
    else:
        chunks = await events(http, "/v1/completions", body | {"stream_options": {"include_usage": True}})
        choices, usage = [chunk["choices"][0] for chunk in chunks[:-1]], chunks[-1]["usage"]
        assert [(choice["text"], choice["finish_reason"]) for choice in choices] == [
            ("a", None),
            ("b", None),
            ("", "stop"),
        ]
    assert "".join(choice["text"] for choice in choices) == "ab"
    assert [token for choice in choices for token in choice["logprobs"]["tokens"]] == ["a", "b"]
    assert choices[-1]["finish_reason"] == "stop"
    assert (usage["completion_tokens"], usage["total_tokens"]) == (2, 8)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("stop", [["ax", "b"], ["abx", "bca"]])
async def test_text_that_comes_with_a_later_token_of_the_stop_string(
    http: httpx2.AsyncClient, stop: list[str], stream: bool
) -> None:
    """The text "a" is held back, and released by a token of which nothing is shown. That token is not counted."""
    body = {"messages": [{"role": "user", "content": "q"}], "logit_bias": abc(), "stop": stop, "max_tokens": 9}
    counts = []
    for logprobs in (True, False):
        wanted = body | {"logprobs": logprobs, "stream": stream}
        if stream:
            chunks = await events(http, "/v1/chat/completions", wanted | {"stream_options": {"include_usage": True}})
            counts.append(chunks[-1]["usage"]["completion_tokens"])
            choices = [chunk["choices"][0] for chunk in chunks[:-1]]
            texts = [choice["delta"].get("content", "") for choice in choices]
        else:
            answer = (await http.post("/v1/chat/completions", json=wanted)).json()
            counts.append(answer["usage"]["completion_tokens"])
            choices = answer["choices"]
            texts = [choices[0]["message"]["content"]]
        text = "".join(texts)
        if logprobs:
            tokens = [
                entry["token"] for choice in choices if choice["logprobs"] for entry in choice["logprobs"]["content"]
            ]
            assert "".join(tokens) == text
        assert counts[-1] == len(text)
    assert counts[0] == counts[1]


async def test_held_back_text_is_released_with_its_log_probs(http: httpx2.AsyncClient) -> None:
    body = {"messages": [{"role": "user", "content": "q"}], "logit_bias": abc(), "stop": ["bcx"], "max_tokens": 6}
    chunks = await events(http, "/v1/chat/completions", body | {"logprobs": True, "stream": True})
    shown = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["logprobs"]]
    assert sum(len(choice["logprobs"]["content"]) for choice in shown) == 6
    assert all(choice["delta"]["content"] for choice in shown), "nothing for a token whose text waits"
    assert "".join(choice["delta"]["content"] for choice in shown) in ("abcabc", "bcabca", "cabcab")
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"


async def test_the_end_of_sequence_is_a_token_without_text(http: httpx2.AsyncClient) -> None:
    bias = abc() | {str(EOS_ID): 1.0}  # in turn: eos, a, b, c
    parameters = {"logit_bias": bias, "details": True, "max_new_tokens": 9}
    answer = (await http.post("/invocations", json={"inputs": "q" * 5, "parameters": parameters})).json()
    assert answer["generated_text"] == "abc"
    assert answer["details"]["generated_tokens"] == 4
    assert answer["details"]["finish_reason"] == "eos_token"
    assert answer["details"]["tokens"][-1]["special_token"] is True
    body = {"prompt": "q" * 5, "logit_bias": bias, "logprobs": 0}
    choice = (await http.post("/v1/completions", json=body)).json()["choices"][0]
    assert (choice["text"], choice["finish_reason"], choice["logprobs"]["tokens"]) == ("abc", "stop", ["a", "b", "c"])


async def test_an_end_of_sequence_at_the_token_limit(http: httpx2.AsyncClient) -> None:
    """The end, in all dialects but TGI (see test_tgi.py)."""
    bias = abc() | {str(EOS_ID): 1.0}
    parameters = {"logit_bias": bias, "details": True, "max_new_tokens": 4}
    answer = (await http.post("/invocations", json={"inputs": "q" * 5, "parameters": parameters})).json()
    assert answer["details"]["finish_reason"] == "eos_token"


async def test_cached_tokens_of_a_prompt_are_reported(http: httpx2.AsyncClient) -> None:
    answer = (await http.post("/v1/completions", json={"prompt": PROMPT, "max_tokens": 2, "n": 2})).json()
    assert answer["usage"]["prompt_tokens_details"] == {"cached_tokens": 4}
    assert (answer["usage"]["prompt_tokens"], answer["usage"]["completion_tokens"]) == (6, 4)


@pytest.mark.parametrize("tokens_per_message", [1, 3])
async def test_one_event_for_each_token(tokens_per_message: int) -> None:
    """Several tokens of one step are several events, in order; parts of a character have no text."""
    async with running_gateway(Script(tokens_per_message=tokens_per_message)) as gateway:
        body = {"inputs": "One", "parameters": {"details": True}}
        tgi = await events(gateway.http, "/generate_stream", body)
        lmi = await events(gateway.http, "/invocations", body | {"stream": True, "parameters": {"max_new_tokens": 99}})
        chunks = await events(gateway.http, "/v1/completions", {"prompt": "One", "max_tokens": 99, "stream": True})
    ids = [*TOKENS[3:], 256]
    assert [event["token"]["id"] for event in tgi] == [line["token"]["id"] for line in lmi] == ids
    assert [event["index"] for event in tgi] == list(range(1, len(ids) + 1))
    texts = [event["token"]["text"] for event in tgi]
    assert texts == [line["token"]["text"] for line in lmi]
    assert "".join(texts) == tgi[-1]["generated_text"] == STORY[3:]
    assert texts[TOKENS[3:].index("ä".encode()[0])] == ""
    assert all(chunk["choices"][0]["text"] or chunk["choices"][0]["finish_reason"] for chunk in chunks)
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == STORY[3:]


@pytest.mark.parametrize("num_tokens", [1, 5])
async def test_a_stream_that_ends_exactly_at_its_limit_says_so(num_tokens: int) -> None:
    async with running_gateway() as gateway:
        limit = {"max_new_tokens": num_tokens, "details": True}
        tgi = await events(gateway.http, "/generate_stream", {"inputs": "One", "parameters": limit})
        lmi = await events(gateway.http, "/invocations", {"inputs": "One", "parameters": limit, "stream": True})
        body = {"prompt": "One", "max_tokens": num_tokens, "stream": True}
        chunks = await events(gateway.http, "/v1/completions", body)
    for lines in (tgi, lmi):
        assert len(lines) == num_tokens
        assert lines[-1]["generated_text"] == STORY[3 : 3 + num_tokens]
        assert lines[-1]["details"]["finish_reason"] == "length"
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None] * (num_tokens - 1) + ["length"]


@pytest.mark.parametrize(
    ("parameters", "has_seed"), [({}, False), ({"do_sample": True}, True), ({"temperature": 0.5, "seed": 3}, True)]
)
async def test_tgi_reports_the_seed_if_and_only_if_it_samples(parameters: Json, has_seed: bool) -> None:
    async with running_gateway() as gateway:
        body = {"inputs": "One", "parameters": {"details": True, "max_new_tokens": 3} | parameters}
        details = (await gateway.http.post("/generate", json=body)).json()["details"]
    assert (details["seed"] is not None) is has_seed
    assert [token["special"] for token in details["tokens"]] == [False] * 3

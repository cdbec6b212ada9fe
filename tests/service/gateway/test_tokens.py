"""vLLM's routes by which clients use the model's tokenizer from afar, before a real router whose tokenizer adds BOS."""

from collections.abc import AsyncIterator
from typing import Any

import httpx2
import pytest

import tandem
from tests.fakes.router_model import BOS, BOS_ID, CHAT_TEMPLATE, EOS, EOS_ID
from tests.fakes.sdk_router import Script
from tests.service.gateway.http import gateway_at, running_gateway

COMPLETION = {"model": "tiny", "prompt": "day", "max_tokens": 2}


@pytest.fixture
async def http(make_mesh: Any) -> AsyncIterator[httpx2.AsyncClient]:
    mesh = await make_mesh(adds_bos=True)
    await mesh.decode()
    async with gateway_at(mesh.router.public.address) as (_, _, client):
        yield client


async def post(http: httpx2.AsyncClient, path: str, **body: object) -> dict[str, Any]:
    response = await http.post(path, json=body)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


async def test_a_text_has_the_tokenizers_special_tokens_or_not(http: httpx2.AsyncClient) -> None:
    whole = await post(http, "/tokenize", prompt="day", return_token_strs=True)
    bare = await post(http, "/tokenize", prompt="day", return_token_strs=True, add_special_tokens=False)
    assert whole["tokens"] == [BOS_ID, *bare["tokens"]]
    assert whole["token_strs"] == [BOS, *bare["token_strs"]]
    assert "".join(bare["token_strs"]) == "day"
    end = await post(http, "/tokenize", prompt=EOS, add_special_tokens=False)
    assert end["tokens"] == [EOS_ID], "by which clients find the number of a special token"


async def test_an_empty_text_has_the_special_tokens_alone(http: httpx2.AsyncClient) -> None:
    assert (await post(http, "/tokenize", prompt=""))["tokens"] == [BOS_ID]
    assert (await post(http, "/tokenize", prompt="", add_special_tokens=False))["count"] == 0
    refused = await http.post("/v1/completions", json=COMPLETION | {"prompt": ""})
    assert refused.status_code == 400
    assert "the prompt is empty" in refused.json()["error"]["message"]


async def test_token_ids_become_the_text_that_they_came_from(http: httpx2.AsyncClient) -> None:
    tokens = (await post(http, "/tokenize", messages=[{"role": "user", "content": "hi 😀"}]))["tokens"]
    text = f"{BOS}[user] hi 😀\n[assistant] "
    assert (await post(http, "/detokenize", tokens=tokens))["prompt"] == text
    assert (await post(http, "/tokenize", prompt=text, add_special_tokens=False))["tokens"] == tokens


async def test_a_completion_begins_without_special_tokens_if_it_should(http: httpx2.AsyncClient) -> None:
    counts = [
        (await post(http, "/v1/completions", **COMPLETION, **members))["usage"]["prompt_tokens"]
        for members in ({}, {"add_special_tokens": True}, {"add_special_tokens": False})
    ]
    assert counts == [counts[2] + 1, counts[2] + 1, counts[2]]


async def test_an_answer_of_several_requests_begins_without_special_tokens_too(make_mesh: Any) -> None:
    mesh = await make_mesh(adds_bos=True)
    decode = await mesh.decode()
    async with tandem.AsyncClient(mesh.router.public.address) as client:
        bare = [token.id for token in await client.tokenize(prompt="day", add_special_tokens=False)]
        for adds, prompt in ((True, [BOS_ID, *bare]), (False, bare)):
            num_before = len(decode.started.items)
            await client.generate_until_done(prompt="day", add_special_tokens=adds, max_new_tokens=2, max_total=4)
            first = decode.started.items[num_before].sequence
            assert list(first.token_ids)[: first.num_prompt_tokens] == prompt


async def test_the_tokenizer_is_described(http: httpx2.AsyncClient) -> None:
    told = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": BOS, "eos_token": EOS}
    for query in ({}, {"model": "tiny"}):
        response = await http.get("/tokenizer_info", params=query)
        assert response.json() == told | {"chat_template": CHAT_TEMPLATE}
    assert (await http.get("/tokenizer_info", params={"model": "other"})).status_code == 404


async def test_version_and_load() -> None:
    async with running_gateway(Script(hold_after_messages=1)) as gateway:
        assert (await gateway.http.get("/version")).json() == {"version": tandem.__version__}
        assert (await gateway.http.get("/load")).json() == {"server_load": 0}
        async with gateway.http.stream("POST", "/v1/completions", json=COMPLETION | {"n": 2, "stream": True}):
            await gateway.script.holding.wait()
            assert (await gateway.http.get("/load")).json() == {"server_load": 2}


async def test_vllms_check_of_health_may_be_posted(http: httpx2.AsyncClient) -> None:
    assert (await http.post("/ping")).json() == (await http.get("/ping")).json() == {"status": "Healthy"}

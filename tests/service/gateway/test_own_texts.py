"""Log-probs and details show each token, whatever became of its text: held back for a stop string or the rest of a
character, or left out.

A real router; its fake workers say the characters of a logit bias in turn.
"""

import json
from collections.abc import AsyncIterator
from typing import Any

import httpx2
import openai
import pytest

from gateway.tgi.endpoints import StreamEvents, build_shape
from gateway.tgi.requests import GenerateBody
from tandem import FinishReason, Token, TokenEvent, Usage
from tests.defects import Repaired
from tests.fakes.router_model import EOS_ID
from tests.service.gateway.http import gateway_at
from tests.service.router.test_generate import TOKENIZER, says

Json = dict[str, Any]
ABC = {str(token): bias for token, bias in says("abc", at=0).items()}
ABC_AND_END = ABC | {str(EOS_ID): 1.0}  # in turn: end of sequence, a, b, c
SECOND, FIRST = sorted(
    TOKENIZER.encode("ñ", add_special_tokens=False)
)  # halves of the character: the second has the lower id
HALVES = {str(FIRST): 1.0, str(SECOND): 1.0}
THREE, FIVE = "qqq", "qqqqq"  # prompts of as many tokens, by whose count the workers begin


@pytest.fixture
async def http(make_mesh: Any) -> AsyncIterator[httpx2.AsyncClient]:
    mesh = await make_mesh()
    await mesh.decode()
    async with gateway_at(mesh.router.public.address) as (_, _, client):
        yield client


async def post(http: httpx2.AsyncClient, path: str, body: Json) -> Json:
    response = await http.post(path, json=body)
    assert response.status_code == 200, response.text
    return response.json()


async def events(http: httpx2.AsyncClient, path: str, body: Json) -> list[Json]:
    response = await http.post(path, json=body | {"stream": True})
    assert response.status_code == 200
    lines = [line.removeprefix("data: ") for line in response.text.split("\n") if line]
    return [json.loads(line) for line in lines if line != "[DONE]"]


@pytest.mark.parametrize("max_tokens", [4, 5])
async def test_completions_show_tokens_whose_text_may_begin_a_stop_string(
    http: httpx2.AsyncClient, repaired: Repaired, max_tokens: int
) -> None:
    body = {"prompt": THREE, "logit_bias": ABC, "logprobs": 1, "stop": ["ca@"], "max_tokens": max_tokens}
    choice = (await post(http, "/v1/completions", body))["choices"][0]
    assert (choice["text"], choice["logprobs"]["tokens"]) == ("abcab"[:max_tokens], [*"abcab"[:max_tokens]])
    assert choice["logprobs"]["text_offset"] == list(range(max_tokens))
    assert all(
        {token} <= top.keys()
        for token, top in zip(choice["logprobs"]["tokens"], choice["logprobs"]["top_logprobs"], strict=True)
    )
    chunks = [chunk["choices"][0] for chunk in await events(http, "/v1/completions", body)]
    assert "".join(chunk["text"] for chunk in chunks) == choice["text"]
    assert [token for chunk in chunks for token in chunk["logprobs"]["tokens"]] == choice["logprobs"]["tokens"]
    repaired("F15", "completions name each token, and its alternatives have no name of several tokens")


async def test_chats_show_the_tokens_before_an_end_of_sequence(http: httpx2.AsyncClient, repaired: Repaired) -> None:
    body = {"logit_bias": ABC_AND_END, "logprobs": True, "stop": ["c@"]}
    answers = []
    for length in range(4):  # one of them begins with a
        messages = [{"role": "user", "content": "q" * (length + 1)}]
        choice = (await post(http, "/v1/chat/completions", body | {"messages": messages}))["choices"][0]
        content = choice["message"]["content"]
        assert "".join(entry["token"] for entry in choice["logprobs"]["content"]) == content
        answers.append(content)
    assert sorted(answers) == ["", "abc", "bc", "c"]
    repaired("F15", "log-probs of a chat are those of its content")


def test_tgis_loop_over_a_stream_loses_nothing(repaired: Repaired) -> None:
    """Clients leave out special tokens, as TGI documents it. No token waits for another's text."""
    tokens = [
        Token(7, "", own_bytes=b"m"),
        Token(8, "", own_bytes=b"\xc3"),
        Token(9, "", own_bytes=b"\xb1"),
        Token(EOS_ID, "mñ", special=True, own_bytes=b""),
    ]
    renderer = StreamEvents(build_shape(GenerateBody(inputs="x"), {}, full_text=False))
    rendered = [
        event
        for token in tokens
        for event in renderer.event(
            TokenEvent(0, token, "r", FinishReason.EOS_TOKEN, Usage(1, 4))
            if token.special
            else TokenEvent(0, token, "r")
        )
    ]
    assert [event["token"]["text"] for event in rendered] == ["m", "", "ñ", ""]
    looped = "".join(event["token"]["text"] for event in rendered if not event["token"]["special"])
    assert looped == rendered[-1]["generated_text"] == "mñ"
    repaired("F15", "streams of TGI lose no text at the end-of-sequence token")


async def test_tgi_asks_for_the_texts_of_tokens(http: httpx2.AsyncClient, repaired: Repaired) -> None:
    parameters = {"max_new_tokens": 6, "details": True}
    body = {"inputs": THREE, "parameters": parameters}
    plain = await post(http, "/generate", body)
    texts = [token["text"] for token in plain["details"]["tokens"]]
    assert all(texts)
    body = {"inputs": THREE, "parameters": parameters | {"stop": [f"{texts[-2]}{texts[-1]}@"]}}
    held = await post(http, "/generate", body)
    assert [token["text"] for token in held["details"]["tokens"]] == texts
    assert [event["token"]["text"] for event in await events(http, "/generate_stream", body)] == texts
    repaired("F15", "details of TGI have the text of each token")


async def test_details_of_lmi(http: httpx2.AsyncClient, repaired: Repaired) -> None:
    parameters = {"stop": ["c@"], "max_new_tokens": 9, "details": True, "logit_bias": ABC_AND_END}
    answer = await post(http, "/invocations", {"inputs": FIVE, "parameters": parameters})
    assert answer["generated_text"] == "abc"
    assert [token["text"] for token in answer["details"]["tokens"]] == ["a", "b", "c", ""]
    repaired("F15", "details of LMI have the text of each token")


async def test_halves_of_characters(http: httpx2.AsyncClient, repaired: Repaired) -> None:
    body = {"prompt": THREE, "logit_bias": HALVES, "logprobs": 1, "max_tokens": 5}
    for choices in ([await post(http, "/v1/completions", body)], await events(http, "/v1/completions", body)):
        lists = [answer["choices"][0]["logprobs"] for answer in choices]
        names = [name for each in lists for name in each["tokens"]]
        assert names == [r"bytes:\xc3", r"bytes:\xb1", r"bytes:\xc3", r"bytes:\xb1", r"bytes:\xc3"]
        assert [offset for each in lists for offset in each["text_offset"]] == [0, 0, 1, 1, 2]
        assert [name in top for each in lists for name, top in zip(each["tokens"], each["top_logprobs"], strict=True)]
    chat = {"logit_bias": HALVES, "logprobs": True, "top_logprobs": 1, "max_tokens": 4}
    for content in ("q", "qq"):
        messages = [{"role": "user", "content": content}]
        choice = (await post(http, "/v1/chat/completions", chat | {"messages": messages}))["choices"][0]
        entries = choice["logprobs"]["content"]
        shown = bytes(byte for entry in entries for byte in entry["bytes"]).decode(errors="replace")
        assert shown == choice["message"]["content"]
        assert [entry["bytes"] for entry in entries] in ([[0xC3], [0xB1]] * 2, [[0xB1], [0xC3]] * 2)
        assert {entry["token"] for entry in entries} == {r"\xc3", r"\xb1"}
        assert [entry["top_logprobs"][0]["bytes"] for entry in entries] == [entry["bytes"] for entry in entries]
    lmi = {"inputs": THREE, "parameters": {"logit_bias": HALVES, "max_new_tokens": 4, "details": True}}
    tokens = (await post(http, "/invocations", lmi))["details"]["tokens"]
    assert [token["text"] for token in tokens] == ["", "ñ", "", "ñ"]
    repaired("F15", "halves of characters have their bytes, as with OpenAI")


async def test_halves_of_characters_in_an_echoed_prompt(http: httpx2.AsyncClient, repaired: Repaired) -> None:
    body = {"prompt": [FIRST, SECOND, FIRST], "logprobs": 1, "echo": True, "max_tokens": 0}
    tokens = (await post(http, "/v1/completions", body))["choices"][0]["logprobs"]["tokens"]
    assert tokens == [r"bytes:\xc3", r"bytes:\xb1", r"bytes:\xc3"]
    repaired("F15", "so have those of an echoed prompt")


async def test_a_special_token_that_is_shown_has_its_logprob(http: httpx2.AsyncClient, repaired: Repaired) -> None:
    body = {"prompt": FIVE, "logit_bias": ABC_AND_END, "ignore_eos": True, "max_tokens": 4, "logprobs": 0}
    for shown, text in ((False, "abc"), (True, "abc</s>")):
        answer = await post(http, "/v1/completions", body | {"skip_special_tokens": not shown})
        choice = answer["choices"][0]
        assert (choice["text"], choice["finish_reason"]) == (text, "length")
        assert "".join(choice["logprobs"]["tokens"]) == text
        assert len(choice["logprobs"]["tokens"]) == answer["usage"]["completion_tokens"] == 4
        streamed = await events(http, "/v1/completions", body | {"skip_special_tokens": not shown})
        logprobs = [event["choices"][0]["logprobs"] for event in streamed]
        assert sum(len(each["tokens"]) for each in logprobs if each is not None) == 4
    ended = body | {"ignore_eos": False, "skip_special_tokens": False}
    for included, text in ((False, "abc"), (True, "abc</s>")):
        choice = (await post(http, "/v1/completions", ended | {"include_stop_str_in_output": included}))["choices"][0]
        assert (choice["text"], choice["finish_reason"]) == (text, "stop")
        assert "".join(choice["logprobs"]["tokens"]) == text
    repaired("F16", "the log-prob is there, with length and with an end that is shown")


async def test_special_tokens_before_a_stop_token_count(http: httpx2.AsyncClient, repaired: Repaired) -> None:
    """The end of sequence, which is ignored and left out of the text, then a."""
    (stop,) = TOKENIZER.encode("a", add_special_tokens=False)
    body = {"prompt": "qqqq", "logit_bias": ABC_AND_END, "ignore_eos": True, "stop_token_ids": [stop]}
    answer = await post(http, "/v1/completions", body)
    assert (answer["choices"][0]["text"], answer["usage"]["completion_tokens"]) == ("", 1)
    options = {"stream_options": {"include_usage": True}}
    assert (await events(http, "/v1/completions", body | options))[-1]["usage"]["completion_tokens"] == 1
    repaired("F16", "usage counts skipped special tokens in front of a stop token")


async def test_a_stop_token_has_no_entry_where_text_was_held_back_until_it(
    http: httpx2.AsyncClient, repaired: Repaired
) -> None:
    (stop,) = TOKENIZER.encode("a", add_special_tokens=False)
    body = {"prompt": "qqqq", "logit_bias": ABC, "stop": ["c@"], "stop_token_ids": [stop], "logprobs": 0}
    choice = (await post(http, "/v1/completions", body))["choices"][0]
    assert (choice["text"], choice["logprobs"]["tokens"]) == ("bc", ["b", "c"])
    repaired("F15", "a stop token has no entry, whatever text waited for it")


async def test_openais_client_reads_them(http: httpx2.AsyncClient) -> None:
    async with openai.AsyncOpenAI(base_url=str(http.base_url.join("/v1")), api_key="x", max_retries=0) as client:
        answer = await client.completions.create(
            model="tiny", prompt=THREE, logit_bias=HALVES, logprobs=1, max_tokens=2, temperature=0
        )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert (answer.choices[0].text, logprobs.tokens) == ("ñ", [r"bytes:\xc3", r"bytes:\xb1"])

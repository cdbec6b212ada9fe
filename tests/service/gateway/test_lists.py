"""Lists of prompts that are longer than what the router takes at a time."""

import asyncio
import json
from typing import Any

import httpx2
import pytest

from tests.defects import Repaired
from tests.fakes.router_workers import expected_tokens
from tests.service.conftest import Mesh
from tests.service.gateway.http import gateway_at

PROMPT = [65, 66, 67]
MAX_TOKENS = 3


def openai_list(count: int) -> dict[str, Any]:
    prompts = [[*PROMPT, number] for number in range(count)]
    return {"prompt": prompts, "max_tokens": MAX_TOKENS, "temperature": 0, "return_token_ids": True}


def expected(count: int) -> list[list[int]]:
    return [expected_tokens([*PROMPT, number], MAX_TOKENS) for number in range(count)]


async def small_mesh(make_mesh: Any, **settings: Any) -> Mesh:
    mesh: Mesh = await make_mesh(**settings)
    await mesh.decode(max_num_seqs=2)
    return mesh


@pytest.mark.parametrize("cap", [1, 3])
async def test_a_list_longer_than_the_cap(make_mesh: Any, cap: int, repaired: Repaired) -> None:
    mesh = await small_mesh(make_mesh, max_concurrent_requests=cap)
    async with gateway_at(mesh.router.public.address) as (_, _, http):
        answer = (await http.post("/v1/completions", json=openai_list(8))).json()
        assert [choice["token_ids"] for choice in answer["choices"]] == expected(8)
        inputs = [f"prompt {number}" for number in range(4)]
        body = {"inputs": inputs, "parameters": {"max_new_tokens": MAX_TOKENS}}
        whole = (await http.post("/invocations", json=body)).json()
        alone = [await http.post("/invocations", json=body | {"inputs": each}) for each in inputs]
        assert whole == [each.json() for each in alone]
        table = "inputs\n" + "\n".join(inputs)
        answers = await http.post("/invocations", content=table.encode(), headers={"content-type": "text/csv"})
        assert len(answers.json()) == 4
    mesh.assert_at_rest()
    repaired("M4", f"{cap} at a time: lists of 8 token prompts, 4 inputs, 4 CSV rows all answered, in order")


async def test_a_list_longer_than_the_queue(make_mesh: Any, repaired: Repaired) -> None:
    mesh = await small_mesh(make_mesh, max_queued_requests=2)
    async with gateway_at(mesh.router.public.address) as (_, _, http):
        answer = (await http.post("/v1/completions", json=openai_list(12) | {"n": 2})).json()
    assert [choice["token_ids"] for choice in answer["choices"]] == [ids for ids in expected(12) for _ in range(2)]
    mesh.assert_at_rest()
    repaired("M4", "2 places and a queue of 2: a list of 12 prompts with n = 2 answered")


async def test_a_streamed_list(make_mesh: Any) -> None:
    mesh = await small_mesh(make_mesh, max_concurrent_requests=2)
    found: dict[int, list[int]] = {}
    async with (
        gateway_at(mesh.router.public.address) as (_, _, http),
        http.stream("POST", "/v1/completions", json=openai_list(6) | {"stream": True}) as response,
    ):
        assert response.status_code == 200
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                for choice in json.loads(line.removeprefix("data: "))["choices"]:
                    found.setdefault(choice["index"], []).extend(choice["token_ids"])
    assert [ids for _, ids in sorted(found.items())] == expected(6)
    mesh.assert_at_rest()


async def test_other_clients_are_served_while_a_long_list_runs(make_mesh: Any, repaired: Repaired) -> None:
    """A list takes all places; from when it is known to be too long, half of them are for others."""
    mesh = await make_mesh(max_concurrent_requests=4)
    decode = await mesh.decode(max_num_seqs=4)
    decode.gate.close()
    async with gateway_at(mesh.router.public.address) as (_, _, http):
        long_list = asyncio.create_task(http.post("/v1/completions", json=openai_list(32)))
        await decode.started.wait_len(4)
        other = asyncio.create_task(persistently(http))
        decode.gate.allow(4 * MAX_TOKENS)  # the first four end
        while not other.done():
            decode.gate.allow(1)
            await asyncio.sleep(0.01)
        assert other.result() == expected_tokens(PROMPT, MAX_TOKENS)
        assert not long_list.done()
        num_started = len(decode.started.items)
        decode.gate.open()
        answer = (await long_list).json()
    assert [choice["token_ids"] for choice in answer["choices"]] == expected(32)
    assert num_started < 33
    mesh.assert_at_rest()
    repaired("M4", f"another client was served after {num_started} of 33 prompts, beside a list of 32 on 4 places")


async def persistently(http: httpx2.AsyncClient) -> list[int]:
    """A client that comes back when it is told to."""
    body = {"prompt": PROMPT, "max_tokens": MAX_TOKENS, "temperature": 0, "return_token_ids": True}
    while True:
        response = await http.post("/v1/completions", json=body)
        if response.status_code == 200:
            ids: list[int] = response.json()["choices"][0]["token_ids"]
            return ids
        assert response.status_code == 429
        await asyncio.sleep(int(response.headers["retry-after-ms"]) / 1000)

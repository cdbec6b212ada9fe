"""A router that has just been started, as after its death, knows nothing of its workers until they are back."""

import asyncio
from typing import Any

import grpc
import pytest

from mesh.domain.worker import Adapter
from router import service
from tandem.v1 import generation_pb2
from tests.fakes.router_workers import expected_tokens
from tests.service.conftest import Mesh

PROMPT = [65, 66, 67, 68]
MINE = Adapter("mine", "digest-of-mine")


@pytest.mark.parametrize("request_fields", [{"adapter": "mine"}, {"model": "mine"}])
async def test_adapters_wait_for_workers_that_have_them(make_mesh: Any, request_fields: dict[str, str]) -> None:
    mesh: Mesh = await make_mesh(just_started=True)
    asked = asyncio.create_task(mesh.generate(token_ids=PROMPT, max_new_tokens=3, **request_fields))
    await mesh.prefill()
    await asyncio.wait([asked], timeout=0.2)
    await mesh.decode(adapters=(MINE,))
    assert (await asked).ids() == expected_tokens(PROMPT, 3)
    mesh.assert_at_rest()


async def test_a_deadline_holds_while_no_worker_has_said_the_adapters(make_mesh: Any) -> None:
    mesh: Mesh = await make_mesh(just_started=True)
    call = mesh.stub.Generate(generation_pb2.GenerateRequest(model="mine", prompt="x"), timeout=0.2)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call.read()
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    mesh.assert_at_rest()


@pytest.mark.parametrize("num_prompt_tokens", [4, 60], ids=["long answer", "long prompt"])
async def test_requests_for_large_workers_wait_for_them_beside_small_ones(
    make_mesh: Any, num_prompt_tokens: int
) -> None:
    mesh: Mesh = await make_mesh(just_started=True)
    await mesh.decode("small", max_model_len=48)
    prompt = PROMPT * (num_prompt_tokens // 4)
    asked = asyncio.create_task(mesh.generate(token_ids=prompt, max_new_tokens=64))
    await asyncio.wait([asked], timeout=0.2)
    await mesh.decode("large")
    assert (await asked).ids() == expected_tokens(prompt, 64)
    mesh.assert_at_rest()


@pytest.mark.parametrize("num_new_tokens", [64, 600], ids=["workers' limit", "model's limit"])
async def test_requests_that_are_too_long_are_refused_all_the_same(
    make_mesh: Any, monkeypatch: pytest.MonkeyPatch, num_new_tokens: int
) -> None:
    monkeypatch.setattr(service, "_WORKERS_RETURN_S", 0.3)
    mesh: Mesh = await make_mesh(just_started=True)
    await mesh.decode("small", max_model_len=48)
    for _ in range(2):
        with pytest.raises(grpc.aio.AioRpcError, match="must be <= max_total_tokens") as refused:
            await mesh.generate(token_ids=PROMPT, max_new_tokens=num_new_tokens)
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    mesh.assert_at_rest()

"""Who goes first, who is refused early, and that neither Tokenize nor a tenant can keep others waiting."""

import asyncio
import threading
from pathlib import Path
from typing import Any

import grpc
import pytest

import tandem
from router.service import _MAX_TOKENIZING
from tandem.v1 import generation_pb2
from tests.fakes.router_workers import expected_tokens
from tests.service.conftest import Mesh, Result, make_request
from tests.service.security.keys import KEYS, bearer, write_keys

PROMPT = [65, 66, 67, 68, 69]
BATCH, STANDARD, INTERACTIVE = (number for number in generation_pb2.Priority.values() if number)


async def refusal(mesh: Mesh, code: grpc.StatusCode, tenant: str | None = None, **request: Any) -> grpc.aio.Call:
    """A request that must be refused."""
    call = mesh.stub.Generate(
        make_request(token_ids=PROMPT, **request), timeout=10, metadata=bearer(tenant) if tenant else None
    )
    assert await call.code() is code
    return call


async def test_higher_priorities_are_taken_first(make_mesh: Any) -> None:
    mesh = await make_mesh()
    decode = await mesh.decode(max_num_seqs=1)
    decode.gate.close()
    priorities = [0, BATCH, STANDARD, INTERACTIVE, BATCH, 0, INTERACTIVE]
    calls = []
    for number, priority in enumerate(priorities):
        request = {"token_ids": [*PROMPT, number], "max_new_tokens": 2, "priority": priority}
        calls.append(asyncio.create_task(mesh.generate(**request)))
        await mesh.until(lambda number=number: mesh.model.queue.num_queued == number and decode.started.items)
    decode.gate.open()
    await asyncio.gather(*calls)
    order = [start.sequence.token_ids[len(PROMPT)] for start in decode.started.items]
    assert order == [0, 3, 6, 2, 5, 1, 4]
    mesh.assert_at_rest()


async def test_a_tenant_cannot_ask_for_more_than_its_own(make_mesh: Any, tmp_path: Path) -> None:
    mesh = await make_mesh(api_keys_file=write_keys(tmp_path))
    await mesh.decode()
    call = await refusal(mesh, grpc.StatusCode.INVALID_ARGUMENT, "alice", priority=INTERACTIVE)
    assert "at most standard" in await call.details()
    async with tandem.AsyncClient(mesh.router.public.address, api_key=KEYS["alice"]) as client:
        result = await client.generate(token_ids=PROMPT, max_new_tokens=2, priority=tandem.Priority.BATCH)
    assert [token.id for token in result.tokens] == expected_tokens(PROMPT, 2)
    mesh.assert_at_rest()


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [({"priority": 7}, "number 7"), ({"ttft_target": {"seconds": -1}}, "ttft_target"), ({"ttft_target": {}}, "> 0")],
)
async def test_what_makes_no_sense(make_mesh: Any, fields: dict[str, Any], complaint: str) -> None:
    mesh = await make_mesh()
    assert complaint in await (await refusal(mesh, grpc.StatusCode.INVALID_ARGUMENT, **fields)).details()


async def test_a_target_that_passes_in_the_queue_ends_the_wait(make_mesh: Any) -> None:
    mesh = await make_mesh()
    decode = await mesh.decode(max_num_seqs=1)
    decode.gate.close()
    running = asyncio.create_task(mesh.generate(token_ids=PROMPT, max_new_tokens=3))
    await decode.started.wait_len(1)
    call = await refusal(mesh, grpc.StatusCode.RESOURCE_EXHAUSTED, ttft_target={"nanos": 50_000_000})
    assert "ttft_target" in await call.details()
    assert int(dict(await call.trailing_metadata())["retry-after-ms"]) > 0
    decode.gate.open()
    assert (await running).ids() == expected_tokens(PROMPT, 3)
    assert len(decode.started.items) == 1
    mesh.assert_at_rest()


async def test_once_the_pace_is_known_what_comes_too_late_is_refused_at_once(make_mesh: Any) -> None:
    mesh = await make_mesh()
    decode = await mesh.decode(max_num_seqs=1)
    decode.pace_s = 0.05
    calls = [asyncio.create_task(mesh.generate(token_ids=[*PROMPT, n], max_new_tokens=4)) for n in range(8)]
    await decode.started.wait_len(4)  # about 0.2 s each; four more are to come
    decode.gate.close()
    async with tandem.AsyncClient(mesh.router.public.address, max_retries=0) as client:
        with pytest.raises(tandem.Overloaded, match="is expected in") as refused:
            await client.generate(token_ids=PROMPT, max_new_tokens=4, ttft_target=0.05)
        assert refused.value.retry_after_s
        with pytest.raises(tandem.Overloaded, match="is expected in"):
            await client.generate(token_ids=PROMPT, max_new_tokens=4, timeout=0.3)
        decode.gate.open()
        result = await client.generate(token_ids=PROMPT, max_new_tokens=4, ttft_target=60)
    assert [token.id for token in result.tokens] == expected_tokens(PROMPT, 4)
    await asyncio.gather(*calls)
    assert len(decode.started.items) == 9
    mesh.assert_at_rest()


async def test_a_refusal_at_the_cap_says_when_the_next_one_will_be_done(make_mesh: Any) -> None:
    mesh = await make_mesh(max_concurrent_requests=1)
    decode = await mesh.decode()
    decode.pace_s = 0.3
    await mesh.generate(token_ids=PROMPT, max_new_tokens=5)
    running = asyncio.create_task(mesh.generate(token_ids=PROMPT, max_new_tokens=5))
    await decode.started.wait_len(2)
    call = await refusal(mesh, grpc.StatusCode.RESOURCE_EXHAUSTED)
    assert int(dict(await call.trailing_metadata())["retry-after-ms"]) > 1200  # 1.5 s each
    running.cancel()


async def test_batch_work_leaves_permits_and_places_in_the_queue(make_mesh: Any) -> None:
    mesh = await make_mesh(max_concurrent_requests=8, max_queued_requests=4)
    decode = await mesh.decode(max_num_seqs=1)
    decode.gate.close()
    batch = {"token_ids": PROMPT, "max_new_tokens": 2, "priority": BATCH}
    calls = [asyncio.create_task(mesh.generate(**batch)) for _ in range(4)]
    await mesh.until(lambda: mesh.model.queue.num_queued == 3)
    call = await refusal(mesh, grpc.StatusCode.RESOURCE_EXHAUSTED, priority=BATCH)
    assert "waiting already" in await call.details()
    calls.append(asyncio.create_task(mesh.generate(token_ids=PROMPT, max_new_tokens=2)))
    await mesh.until(lambda: mesh.model.queue.num_queued == 4)
    call = await refusal(mesh, grpc.StatusCode.RESOURCE_EXHAUSTED, priority=BATCH, num_choices=2)
    assert "5 of 6" in await call.details()
    call = await refusal(mesh, grpc.StatusCode.INVALID_ARGUMENT, priority=BATCH, num_choices=7)
    assert "[1, 6]" in await call.details()
    decode.gate.open()
    await asyncio.gather(*calls)
    mesh.assert_at_rest()


async def test_the_router_has_a_target_for_requests_without_one(make_mesh: Any) -> None:
    mesh = await make_mesh(ttft_target_s=0.05)
    decode = await mesh.decode(max_num_seqs=1)
    decode.gate.close()
    running = asyncio.create_task(mesh.generate(token_ids=PROMPT, max_new_tokens=3))
    await decode.started.wait_len(1)
    assert "ttft_target" in await (await refusal(mesh, grpc.StatusCode.RESOURCE_EXHAUSTED)).details()
    decode.gate.open()
    await running


async def test_tokenize_is_bounded_and_keeps_nobody_waiting(make_mesh: Any) -> None:
    mesh = await make_mesh()
    await mesh.decode(max_model_len=512, num_blocks=128)
    blocked = threading.Event()
    tokenizing = mesh.model._inputs.tokenize_encoder
    tokenizing._short._pool.submit(blocked.wait)
    text = "hello world, the quick brown fox " * 50  # long enough for a thread
    request = generation_pb2.TokenizeRequest(prompt=text)
    waiting = [asyncio.ensure_future(mesh.stub.Tokenize(request)) for _ in range(_MAX_TOKENIZING)]
    try:
        await mesh.until(lambda: mesh.model.service._num_tokenizing == _MAX_TOKENIZING)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await mesh.stub.Tokenize(request)
        assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert (await mesh.generate(prompt=text, max_new_tokens=2)).finish()
        waiting.pop().cancel()
        await mesh.until(lambda: mesh.model.service._num_tokenizing == _MAX_TOKENIZING - 1)
    finally:
        blocked.set()
    for response in await asyncio.gather(*waiting):
        assert "".join(token.text for token in response.tokens) == text
    assert mesh.model.service._num_tokenizing == 0


async def test_tokenize_takes_no_more_than_generate(make_mesh: Any) -> None:
    mesh = await make_mesh(max_input_length=5)
    assert len((await mesh.stub.Tokenize(generation_pb2.TokenizeRequest(prompt="@@@@@"))).tokens) == 5
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await mesh.stub.Tokenize(generation_pb2.TokenizeRequest(prompt="@@@@@@"))
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "the prompt has 6 tokens" in refused.value.details()


async def test_a_revoked_key_is_refused_and_its_stream_goes_on(make_mesh: Any, tmp_path: Path) -> None:
    mesh = await make_mesh(api_keys_file=write_keys(tmp_path))
    decode = await mesh.decode()
    decode.gate.close()
    decode.gate.allow(1)
    result = Result()
    request = make_request(token_ids=PROMPT, max_new_tokens=4)
    running = asyncio.create_task(result.read(mesh.stub.Generate(request, timeout=20, metadata=bearer("alice"))))
    await mesh.until(lambda: result.messages)
    file = tmp_path / "keys.toml"
    file.write_text("\n".join(line for line in file.read_text().splitlines() if "alice" not in line))
    async with asyncio.timeout(60):
        while await models_as(mesh, "alice") is not grpc.StatusCode.UNAUTHENTICATED:  # noqa: ASYNC110
            await asyncio.sleep(0.1)
    assert await models_as(mesh, "ops") is grpc.StatusCode.OK
    decode.gate.open()
    await running
    assert result.ids() == expected_tokens(PROMPT, 4)
    mesh.assert_at_rest()


async def models_as(mesh: Mesh, tenant: str) -> grpc.StatusCode:
    """How a small call of this tenant ends."""
    call = mesh.stub.ListModels(generation_pb2.ListModelsRequest(), metadata=bearer(tenant))
    return await call.code()

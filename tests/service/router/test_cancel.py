"""Clients that leave, at any moment: both workers hear of it within a second, and nothing stays behind."""

import asyncio
import random
from typing import Any

import grpc
import pytest

from mesh.rpc.status import ERROR_KEY
from tandem.v1 import generation_pb2_grpc
from tests.defects import Repaired
from tests.exposition import scrape
from tests.fakes.router_workers import PrefillScript, expected_tokens
from tests.service.conftest import Mesh, make_request
from tests.waiting import LIMIT_S
from tests.zero_window import zero_window_call

PROMPT = [65, 66, 67, 68, 69]
# Megabytes of answer.
BIG = make_request(token_ids=PROMPT, max_new_tokens=20_000, output={"top_logprobs": 20}, logit_bias={70: 1.0})
GENERATE = "/tandem.v1.Generation/Generate"


def is_open() -> bool:
    """A handler of Generate runs."""
    return any(GENERATE in task.get_name() for task in asyncio.all_tasks())


async def read_all(call: Any) -> None:
    while await call.read():
        pass


async def assert_all_gone(mesh: Mesh) -> None:
    await mesh.until(lambda: mesh.model.limiter.num_held == 0, timeout_s=1)
    await mesh.until(lambda: not any(worker.num_running for worker in mesh.workers), timeout_s=1)
    mesh.assert_at_rest()


async def test_while_queued(make_mesh: Any) -> None:
    mesh = await make_mesh()
    call = mesh.stub.Generate(make_request(token_ids=PROMPT), timeout=10)
    await mesh.until(lambda: mesh.model.queue.num_queued == 1)
    call.cancel()
    await assert_all_gone(mesh)


async def test_during_prefill(make_mesh: Any) -> None:
    mesh = await make_mesh()
    prefill, decode = await mesh.prefill(), await mesh.decode()
    prefill.scripts = [PrefillScript(hold=asyncio.Event())]
    call = mesh.stub.Generate(make_request(token_ids=PROMPT), timeout=10)
    await prefill.calls.wait_len(1)
    call.cancel()
    await prefill.cancelled.wait_len(1, timeout_s=1)
    await decode.aborted.wait_len(1, timeout_s=1)
    await assert_all_gone(mesh)


async def test_while_decoding(make_mesh: Any) -> None:
    mesh = await make_mesh()
    await mesh.prefill()
    decode = await mesh.decode()
    decode.gate.close()
    decode.gate.allow(3)
    call = mesh.stub.Generate(make_request(token_ids=PROMPT), timeout=10)
    await decode.sent.wait_len(3)
    call.cancel()
    await decode.aborted.wait_len(1, timeout_s=1)
    await assert_all_gone(mesh)


async def test_all_choices_are_aborted(make_mesh: Any) -> None:
    mesh = await make_mesh()
    decode = await mesh.decode()
    decode.gate.close()
    call = mesh.stub.Generate(make_request(token_ids=PROMPT, num_choices=4), timeout=10)
    await decode.forked.wait_len(3)
    call.cancel()
    await decode.aborted.wait_len(4, timeout_s=1)
    await assert_all_gone(mesh)


async def test_when_the_connection_breaks(make_mesh: Any) -> None:
    mesh = await make_mesh()
    decode = await mesh.decode()
    decode.gate.close()
    channel = grpc.aio.insecure_channel(mesh.router.public.address, options=[("grpc.use_local_subchannel_pool", 1)])
    call = generation_pb2_grpc.GenerationStub(channel).Generate(make_request(token_ids=PROMPT), timeout=10)
    await decode.started.wait_len(1)
    await channel.close()
    assert call.done()
    await decode.aborted.wait_len(1, timeout_s=1)
    await assert_all_gone(mesh)


@pytest.mark.parametrize("separated", [True, False])
async def test_when_the_deadline_passes(make_mesh: Any, separated: bool) -> None:
    mesh = await make_mesh()
    if separated:
        await mesh.prefill()
    decode = await mesh.decode()
    decode.gate.close()
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await read_all(mesh.stub.Generate(make_request(token_ids=PROMPT), timeout=0.2))
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    time_left_s = decode.started.items[0].sequence.time_left.ToMilliseconds() / 1000
    assert 0 < time_left_s <= 0.2
    await decode.aborted.wait_len(1, timeout_s=1)
    await assert_all_gone(mesh)


@pytest.mark.parametrize("last_read_s", [LIMIT_S, 0.2], ids=["its handler runs", "its handler has been ended"])
async def test_a_client_that_never_reads_is_cut_off(
    make_mesh: Any, last_read_s: float, monkeypatch: pytest.MonkeyPatch, repaired: Repaired
) -> None:
    """Its answer does not fit the connection's window, so the router's write blocks. When it reads on, it learns why it
    was cut off.
    """
    monkeypatch.setattr("router.answer_stream._LAST_READ_S", last_read_s)
    mesh = await make_mesh(slow_reader_s=1.5, model_positions=100_000)
    decode = await mesh.decode(max_model_len=100_000, num_blocks=100_000)
    channel = grpc.aio.insecure_channel(
        mesh.router.public.address,
        options=[("grpc.use_local_subchannel_pool", 1), ("grpc.http2.bdp_probe", 0)],
    )
    call = generation_pb2_grpc.GenerationStub(channel).Generate(BIG, timeout=20)
    neighbour = await mesh.generate(token_ids=PROMPT, max_new_tokens=50)
    assert neighbour.ids() == expected_tokens(PROMPT, 50)
    await decode.started.wait_len(2)
    await mesh.until(lambda: mesh.model.limiter.num_held == 0)  # it is given slow_reader_s
    await assert_all_gone(mesh)
    await mesh.until(lambda: is_open() == (last_read_s == LIMIT_S))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await read_all(call)
    assert caught.value.code() is grpc.StatusCode.ABORTED
    assert dict(caught.value.trailing_metadata() or ())[ERROR_KEY] == "SlowReader"
    await channel.close()
    samples = await scrape(mesh.router.metrics.registry)
    assert samples["tandem_request_failure_total", frozenset({("error", "SlowReader")})] == 1
    assert samples["tandem_request_cancelled_total", frozenset()] == 0
    repaired("D27", "slow readers are failures, SlowReader")


async def test_a_client_that_takes_no_data_at_all_loses_its_call(
    make_mesh: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It answers pings, so that nothing else finds it dead."""
    monkeypatch.setattr("router.answer_stream._LAST_READ_S", 0.2)
    mesh = await make_mesh(slow_reader_s=0.2)
    await mesh.decode()
    request = make_request(token_ids=PROMPT, max_new_tokens=5).SerializeToString()
    async with zero_window_call(mesh.router.public.address, GENERATE, request):
        await mesh.until(is_open)
        await mesh.until(lambda: not is_open())
        await assert_all_gone(mesh)


async def test_a_client_that_leaves_while_a_write_is_blocked(make_mesh: Any) -> None:
    mesh = await make_mesh(model_positions=100_000)
    await mesh.decode(max_model_len=100_000, num_blocks=100_000)
    call = mesh.stub.Generate(BIG, timeout=20)
    await call.read()
    call.cancel()
    await assert_all_gone(mesh)


async def test_cancel_storm(make_mesh: Any) -> None:
    mesh = await make_mesh(max_concurrent_requests=64)
    await mesh.prefill()
    await mesh.decode()
    rng = random.Random(7)

    async def one(number: int) -> None:
        call = mesh.stub.Generate(make_request(token_ids=[*PROMPT, number], max_new_tokens=20), timeout=LIMIT_S)
        for _ in range(rng.randrange(12)):
            await asyncio.sleep(0)
        for _ in range(rng.randrange(4)):
            await call.read()
        call.cancel()

    for _ in range(3):
        await asyncio.gather(*(one(number) for number in range(40)))
        await assert_all_gone(mesh)
    for number in range(3):
        result = await mesh.generate(token_ids=[*PROMPT, number], max_new_tokens=5)
        assert result.ids() == expected_tokens([*PROMPT, number], 5)

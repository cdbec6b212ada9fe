"""Caps: refused fast, exact, and without harm to those in service."""

import asyncio
import statistics
import time
from typing import Any

import grpc
import pytest

from mesh.domain.worker import WorkerState
from router.validation import MAX_CHAT_MESSAGES
from tests.defects import Repaired
from tests.evidence import Evidence
from tests.exposition import scrape
from tests.fakes.router_workers import PrefillScript, expected_tokens
from tests.service.conftest import Result, make_request
from tests.waiting import LIMIT_S

PROMPT = [65, 66, 67, 68, 69]


async def refused_in_s(mesh: Any, **request: Any) -> float:
    """Seconds until a request is refused as overloaded."""
    begin_s = time.monotonic()
    call = mesh.stub.Generate(make_request(token_ids=PROMPT, **request), timeout=5)
    assert await call.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert int(dict(await call.trailing_metadata())["retry-after-ms"]) > 0
    return time.monotonic() - begin_s


async def test_past_the_cap_requests_are_refused_at_once(make_mesh: Any, evidence: Evidence) -> None:
    mesh = await make_mesh(max_concurrent_requests=4)
    await mesh.prefill()
    decode = await mesh.decode()
    decode.gate.close()
    calls = [mesh.stub.Generate(make_request(token_ids=[*PROMPT, n], max_new_tokens=8), timeout=10) for n in range(4)]
    results = [Result() for _ in calls]
    readers = [asyncio.create_task(result.read(call)) for result, call in zip(results, calls, strict=True)]
    await decode.started.wait_len(4)
    delays_s = [await refused_in_s(mesh) for _ in range(50)]
    p99_ms = 1000 * sorted(delays_s)[-1]
    evidence(
        "R11", "slowest of 50 refusals", f"{p99_ms:.1f} ms", target="<= 50 ms", ok=p99_ms <= 50, is_reported_only=True
    )
    assert statistics.median(delays_s) < 0.5
    assert mesh.model.limiter.num_held == 4
    decode.gate.open()
    await asyncio.gather(*readers)
    for n, result in enumerate(results):
        assert result.ids() == expected_tokens([*PROMPT, n], 8)
    assert (await mesh.generate(token_ids=PROMPT, max_new_tokens=2)).ids() == expected_tokens(PROMPT, 2)
    mesh.assert_at_rest()


async def test_every_choice_counts(make_mesh: Any) -> None:
    mesh = await make_mesh(max_concurrent_requests=4)
    decode = await mesh.decode()
    decode.gate.close()
    call = mesh.stub.Generate(make_request(token_ids=PROMPT, num_choices=3), timeout=10)
    await decode.forked.wait_len(2)
    assert mesh.model.limiter.num_held == 3
    await refused_in_s(mesh, num_choices=2)
    assert mesh.model.limiter.num_held == 3
    call.cancel()
    await mesh.until(lambda: mesh.model.limiter.num_held == 0)


async def test_invalid_requests_hold_no_permit(make_mesh: Any) -> None:
    mesh = await make_mesh(max_concurrent_requests=1)
    await mesh.decode()
    for _ in range(3):
        call = mesh.stub.Generate(make_request(token_ids=[9999]), timeout=5)
        assert await call.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert mesh.model.limiter.num_held == 0


async def test_requests_that_break_a_rule_of_the_protocol_count_as_refused(make_mesh: Any, repaired: Repaired) -> None:
    mesh = await make_mesh()
    chat = [("user", "x")] * (MAX_CHAT_MESSAGES + 1)
    for request in (make_request(token_ids=[1], priority=99), make_request(chat=chat)):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await mesh.stub.Generate(request, timeout=LIMIT_S).read()
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    samples = await scrape(mesh.router.metrics.registry)
    assert samples["tandem_request_refused_total", frozenset({("error", "InvalidRequest")})] == 2
    repaired("D27", "all refusals are counted")


async def test_a_full_queue_refuses(make_mesh: Any) -> None:
    mesh = await make_mesh(max_queued_requests=2)
    decode = await mesh.decode(max_num_seqs=1)
    decode.gate.close()
    calls = [asyncio.create_task(mesh.generate(token_ids=[*PROMPT, n], max_new_tokens=3)) for n in range(3)]
    await mesh.until(lambda: mesh.model.queue.num_queued == 2)
    await refused_in_s(mesh)
    decode.gate.open()
    for n, result in enumerate(await asyncio.gather(*calls)):
        assert result.ids() == expected_tokens([*PROMPT, n], 3)


async def test_decode_slots_and_blocks_are_never_passed(make_mesh: Any) -> None:
    mesh = await make_mesh()
    await mesh.prefill()
    decode = await mesh.decode(max_num_seqs=3, num_blocks=12)
    most = 0

    def watch() -> bool:
        nonlocal most
        most = max(most, decode.num_running)
        return False

    watcher = asyncio.create_task(mesh.until(watch, timeout_s=30))
    results = await asyncio.gather(*(mesh.generate(token_ids=[*PROMPT, n], max_new_tokens=6) for n in range(20)))
    watcher.cancel()
    assert all(result.ids() == expected_tokens([*PROMPT, n], 6) for n, result in enumerate(results))
    assert 1 <= most <= 3
    mesh.assert_at_rest()


async def test_prefill_work_waits_in_the_router(make_mesh: Any) -> None:
    mesh = await make_mesh(prefill_overflow=0)
    prefill, _ = await mesh.prefill(max_batch_tokens=5), await mesh.decode()
    hold = asyncio.Event()
    prefill.scripts = [PrefillScript(hold=hold)] * 4
    calls = [asyncio.create_task(mesh.generate(token_ids=[*PROMPT[:4], n], max_new_tokens=2)) for n in range(4)]
    await prefill.calls.wait_len(2)
    assert mesh.model.queue.num_queued == 2
    assert prefill.num_running == 2  # two passes of five tokens
    hold.set()
    await asyncio.gather(*calls)
    assert len(prefill.calls.items) == 4


async def test_draining_workers_get_nothing_new(make_mesh: Any) -> None:
    mesh = await make_mesh()
    first, second = await mesh.decode("decode-0"), await mesh.decode("decode-1")
    first.gate.close()
    running = asyncio.create_task(mesh.generate(token_ids=PROMPT, max_new_tokens=4))
    await first.started.wait_len(1)
    first.beat(WorkerState.DRAINING)
    await mesh.until(lambda: mesh.router.membership.find("decode-0").state is WorkerState.DRAINING)
    await mesh.generate(token_ids=PROMPT, max_new_tokens=4)
    assert len(second.started.items) == 1
    first.gate.open()
    assert (await running).ids() == expected_tokens(PROMPT, 4)
    assert len(first.started.items) == 1

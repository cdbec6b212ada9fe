"""Everything that can go wrong with workers: the stream goes on, token for token, or ends with one clear status."""

import asyncio
import time
from typing import Any

import grpc
import pytest

from mesh.domain import errors
from mesh.domain.tokens import SequenceFailure
from router.journal import IncidentKind
from tandem.v1 import sampling_pb2
from tests.fakes.router_workers import DecodeScript, PrefillScript, expected_tokens
from tests.service.conftest import Mesh, Result

PROMPT = [65, 66, 67, 68, 69]
COUNT = 10


async def assert_exact(mesh: Mesh, *, num_attempts: int | None = None) -> Result:
    """One request gives the tokens it must, and leaves nothing behind."""
    result = await mesh.generate(token_ids=PROMPT, max_new_tokens=COUNT, seed=3)
    assert result.ids() == expected_tokens(PROMPT, COUNT)
    assert result.finish() == sampling_pb2.FINISH_REASON_LENGTH
    mesh.assert_at_rest()
    starts = [start for worker in mesh.workers if hasattr(worker, "started") for start in worker.started.items]
    assert {start.sequence.sampling.seed for start in starts} == {3}
    assert {start.sequence.num_prompt_tokens for start in starts} == {len(PROMPT)}
    if num_attempts is not None:
        assert sorted(start.sequence.attempt for start in starts) == list(range(num_attempts))
    return result


@pytest.mark.parametrize(
    "script",
    [
        DecodeScript(refuse=SequenceFailure.NO_CAPACITY),
        DecodeScript(refuse=SequenceFailure.DRAINING),
        DecodeScript(refuse=SequenceFailure.INTERNAL),
        DecodeScript(fail_after=(0, SequenceFailure.KV_REFUSED)),
        DecodeScript(fail_after=(3, SequenceFailure.PREEMPTED)),
        DecodeScript(fail_after=(COUNT - 2, SequenceFailure.PREEMPTED)),
    ],
)
@pytest.mark.parametrize("separated", [True, False])
async def test_a_sequence_that_fails_on_decode_is_replayed(
    make_mesh: Any, script: DecodeScript, separated: bool
) -> None:
    mesh = await make_mesh()
    if separated:
        await mesh.prefill()
    decode = await mesh.decode()
    decode.scripts = [script]
    await assert_exact(mesh, num_attempts=2)


@pytest.mark.parametrize(
    "script",
    [
        PrefillScript(refuse=errors.WorkerBusy("full")),
        PrefillScript(refuse=errors.WorkerDraining("draining")),
        PrefillScript(refuse=errors.LayoutMismatch("other layout")),
        PrefillScript(refuse=errors.Unauthenticated("no key")),
        PrefillScript(fail_before_first=errors.TransferFailed("cut")),
        PrefillScript(fail_after_first=errors.TransferCorrupt("flipped")),
        PrefillScript(fail_after_first=errors.LeaseExpired("too late")),
    ],
)
async def test_a_prefill_that_fails_is_replayed(make_mesh: Any, script: PrefillScript) -> None:
    mesh = await make_mesh()
    prefill, decode = await mesh.prefill(), await mesh.decode()
    prefill.scripts = [script]
    await assert_exact(mesh, num_attempts=2)
    assert [attempt for _, attempt in decode.aborted.items] == [0]
    assert decode.num_running == 0


@pytest.mark.parametrize(
    ("error", "suspect"),
    [
        (errors.WorkerLost("rank 1 is lost"), "prefill-0"),
        (RuntimeError("a bug"), "prefill-0"),
        (errors.ReceiverLost("the receiver is stopping"), "decode-0"),
    ],
)
async def test_the_end_that_a_prefill_worker_means_is_suspected_alone(
    make_mesh: Any, error: Exception, suspect: str
) -> None:
    """And a prefill worker that has said so is not lost."""
    mesh = await make_mesh(trip_after=1)
    prefill = await mesh.prefill()
    await mesh.decode()
    prefill.scripts = [PrefillScript(fail_before_first=error)]
    await assert_exact(mesh, num_attempts=2)
    incidents = mesh.router.journal.incidents
    assert [each.worker_id for each in incidents if each.kind is IncidentKind.TRIPPED] == [suspect]
    assert [each.worker_id for each in incidents if each.kind is IncidentKind.REPLAYED] == [suspect]
    await mesh.until(lambda: mesh.is_settled(prefill))
    await mesh.generate(token_ids=PROMPT, max_new_tokens=COUNT, seed=3)
    assert len(prefill.calls.items) >= 2, "it serves the next request"


async def test_a_prefill_that_breaks_after_the_handover_does_no_harm(make_mesh: Any) -> None:
    mesh = await make_mesh()
    prefill = await mesh.prefill()
    await mesh.decode()
    prefill.scripts = [PrefillScript(first_token_after=3, fail_after_commit=errors.WorkerLost("gone"))]
    await assert_exact(mesh, num_attempts=1)


async def test_prefill_workers_that_keep_failing_are_left_out(make_mesh: Any) -> None:
    mesh = await make_mesh()
    prefill, decode = await mesh.prefill(), await mesh.decode()
    prefill.scripts = [PrefillScript(fail_before_first=errors.TransferFailed("cut"))] * 10
    await assert_exact(mesh, num_attempts=2)
    assert decode.started.items[-1].transfer_id == ""


async def test_another_worker_takes_over(make_mesh: Any) -> None:
    mesh = await make_mesh()
    first, second = await mesh.prefill("prefill-0"), await mesh.prefill("prefill-1")
    decodes = [await mesh.decode("decode-0"), await mesh.decode("decode-1")]
    first.scripts = [PrefillScript(fail_before_first=errors.TransferFailed("cut"))]
    decodes[0].scripts = [DecodeScript(), DecodeScript(fail_after=(2, SequenceFailure.PREEMPTED))]
    await assert_exact(mesh, num_attempts=3)
    assert len(second.calls.items) >= 1
    assert len(decodes[1].started.items) == 1


@pytest.mark.parametrize("num_tokens", [0, 1, 5])
async def test_a_broken_link_moves_its_sequences(make_mesh: Any, num_tokens: int) -> None:
    mesh = await make_mesh()
    await mesh.prefill()
    first, second = await mesh.decode("decode-0"), await mesh.decode("decode-1")
    first.scripts = [DecodeScript(break_link_after=num_tokens)]
    await assert_exact(mesh, num_attempts=2)
    assert len(second.started.items) == 1


async def test_killed_decode_worker_with_a_spare(make_mesh: Any) -> None:
    mesh = await make_mesh()
    await mesh.prefill()
    first, second = await mesh.decode("decode-0"), await mesh.decode("decode-1")
    first.gate.close()
    second.gate.close()
    requests = [asyncio.create_task(mesh.generate(token_ids=[*PROMPT, n], max_new_tokens=COUNT)) for n in range(8)]
    await mesh.until(lambda: first.num_running + second.num_running == 8)
    assert first.num_running == 4
    first.gate.allow(12)
    await first.sent.wait_len(12)
    await first.kill()
    second.gate.open()
    for n, result in enumerate(await asyncio.gather(*requests)):
        assert result.ids() == expected_tokens([*PROMPT, n], COUNT)
        assert result.finish() == sampling_pb2.FINISH_REASON_LENGTH
    mesh.assert_at_rest()


async def test_a_restarted_decode_worker_is_waited_for(make_mesh: Any) -> None:
    mesh = await make_mesh()
    await mesh.prefill()
    first = await mesh.decode()
    first.gate.close()
    request = asyncio.create_task(mesh.generate(token_ids=PROMPT, max_new_tokens=COUNT))
    await first.started.wait_len(1)
    await first.kill()
    await mesh.until(lambda: mesh.model.queue.num_queued == 1)
    await mesh.decode(incarnation="decode-0-2")
    assert (await request).ids() == expected_tokens(PROMPT, COUNT)
    mesh.assert_at_rest()


async def test_a_worker_that_rejoins_replaces_its_former_self(make_mesh: Any) -> None:
    mesh = await make_mesh()
    first = await mesh.decode()
    first.gate.close()
    request = asyncio.create_task(mesh.generate(token_ids=PROMPT, max_new_tokens=COUNT))
    await first.started.wait_len(1)
    await mesh.decode(incarnation="decode-0-2")  # the old one has not been noticed as dead
    assert (await request).ids() == expected_tokens(PROMPT, COUNT)


@pytest.mark.parametrize("first_token_sent", [False, True])
async def test_killed_prefill_worker(make_mesh: Any, first_token_sent: bool) -> None:
    mesh = await make_mesh()
    prefill, decode = await mesh.prefill(), await mesh.decode()
    prefill.scripts = [PrefillScript(hold=asyncio.Event())]
    request = asyncio.create_task(mesh.generate(token_ids=PROMPT, max_new_tokens=COUNT))
    await prefill.calls.wait_len(1)
    await prefill.kill()
    assert (await request).ids() == expected_tokens(PROMPT, COUNT)
    assert decode.started.items[-1].transfer_id == ""
    mesh.assert_at_rest()


async def test_workers_that_leave_the_registry_are_left(make_mesh: Any) -> None:
    mesh = await make_mesh()
    prefill, decode = await mesh.prefill(), await mesh.decode()
    prefill.scripts = [PrefillScript(hold=asyncio.Event())]
    request = asyncio.create_task(mesh.generate(token_ids=PROMPT, max_new_tokens=COUNT))
    await prefill.calls.wait_len(1)
    await prefill.leave()
    assert (await request).ids() == expected_tokens(PROMPT, COUNT)
    await mesh.until(lambda: prefill.num_running == 0)
    assert [attempt for _, attempt in decode.aborted.items] == [0]


async def test_too_large_is_the_clients_error(make_mesh: Any) -> None:
    mesh = await make_mesh()
    await mesh.prefill()
    decode = await mesh.decode()
    decode.scripts = [DecodeScript(refuse=SequenceFailure.TOO_LARGE)]
    await assert_refused(mesh, grpc.StatusCode.INVALID_ARGUMENT, "scripted")


async def assert_refused(mesh: Mesh, code: grpc.StatusCode, words: str, **request: Any) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await mesh.generate(**({"token_ids": PROMPT, "max_new_tokens": COUNT} | request))
    assert caught.value.code() is code
    assert words in (caught.value.details() or "")
    mesh.assert_at_rest()
    return caught.value


async def test_what_never_works_ends(make_mesh: Any) -> None:
    mesh = await make_mesh(max_attempts=3)
    decode = await mesh.decode()
    decode.scripts = [DecodeScript(refuse=SequenceFailure.KV_REFUSED)] * 3
    await assert_refused(mesh, grpc.StatusCode.INTERNAL, "3 times in a row")


async def test_no_room_for_ever_is_overload(make_mesh: Any) -> None:
    mesh = await make_mesh(max_attempts=2)
    decode = await mesh.decode()
    decode.scripts = [DecodeScript(refuse=SequenceFailure.NO_CAPACITY)] * 2
    error = await assert_refused(mesh, grpc.StatusCode.RESOURCE_EXHAUSTED, "no worker had capacity")
    assert dict(error.trailing_metadata() or ())["retry-after-ms"]


@pytest.mark.parametrize("has_prefill", [False, True])
async def test_a_request_that_kills_workers_is_not_handed_round(make_mesh: Any, has_prefill: bool) -> None:
    """Not even if its prefill workers bring a new first token each time."""
    mesh = await make_mesh(max_worker_losses=2)
    if has_prefill:
        await mesh.prefill()
    workers = [await mesh.decode(f"decode-{n}") for n in range(4)]
    for worker in workers:
        worker.scripts = [DecodeScript(break_link_after=0)]
    await assert_refused(mesh, grpc.StatusCode.INTERNAL, "in a row")
    assert sum(len(worker.started.items) for worker in workers) == 2


async def test_no_decode_worker(make_mesh: Any) -> None:
    mesh = await make_mesh(no_worker_timeout_s=0.05)
    await mesh.prefill()
    await assert_refused(mesh, grpc.StatusCode.UNAVAILABLE, "no decode worker")


@pytest.mark.parametrize(("num_tokens", "settings"), [(0, {"prefill_timeout_s": 0.2}), (2, {"stall_timeout_s": 0.2})])
async def test_silent_workers_are_given_up(make_mesh: Any, num_tokens: int, settings: Any) -> None:
    mesh = await make_mesh(**{"stall_timeout_s": 0.4, **settings})
    stuck = await mesh.decode("decode-0")
    await mesh.decode("decode-1")
    stuck.gate.close()
    stuck.gate.allow(num_tokens)
    await assert_exact(mesh, num_attempts=2)
    assert [attempt for _, attempt in stuck.aborted.items] == [0]


async def test_time_in_which_the_router_stood_still_counts_against_no_worker(make_mesh: Any) -> None:
    """As when its process was stopped, or on a machine that swaps: the tokens of that time have yet to be read."""
    mesh = await make_mesh(stall_timeout_s=2.0)
    worker = await mesh.decode("decode-0")
    await mesh.decode("decode-1")
    worker.gate.close()
    worker.gate.allow(2)
    asked = asyncio.create_task(assert_exact(mesh, num_attempts=1))
    await mesh.until(lambda: [running.completion_tokens for running in mesh.router.journal.running] == [2])
    time.sleep(2.5)  # noqa: ASYNC251 - the event loop is to stand still
    for _ in range(10):
        await asyncio.sleep(0)  # timers that are due run first
    worker.gate.open()
    await asked


async def test_a_prefill_that_takes_too_long_is_replayed(make_mesh: Any) -> None:
    mesh = await make_mesh(prefill_timeout_s=0.2)
    prefill = await mesh.prefill()
    await mesh.decode()
    prefill.scripts = [PrefillScript(hold=asyncio.Event())]
    await assert_exact(mesh, num_attempts=2)


@pytest.mark.parametrize("change", [{"tokenizer_fingerprint": "another"}, {"model": "another"}])
async def test_worker_of_another_tokenizer_or_model_is_refused(make_mesh: Any, change: dict[str, str]) -> None:
    mesh = await make_mesh(no_worker_timeout_s=0.05)
    with pytest.raises(grpc.aio.AioRpcError, match="another") as refused:
        await mesh.decode(**change)
    assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    await assert_refused(mesh, grpc.StatusCode.UNAVAILABLE, "no decode worker")


async def test_storm_of_faults(make_mesh: Any) -> None:
    """Many requests, each failing in its own ways: every stream exact, one end each, nothing left."""
    mesh = await make_mesh()
    prefills = [await mesh.prefill(f"prefill-{n}") for n in range(2)]
    decodes = [await mesh.decode(f"decode-{n}") for n in range(2)]
    for prefill in prefills:
        prefill.scripts = [
            PrefillScript(),
            PrefillScript(fail_before_first=errors.TransferFailed("cut")),
            PrefillScript(first_token_after=2),
            PrefillScript(fail_after_first=errors.TransferCorrupt("flipped")),
            PrefillScript(refuse=errors.WorkerBusy("full")),
        ] * 3
    for decode in decodes:
        decode.scripts = [
            DecodeScript(),
            DecodeScript(fail_after=(4, SequenceFailure.PREEMPTED)),
            DecodeScript(refuse=SequenceFailure.NO_CAPACITY),
            DecodeScript(fail_after=(0, SequenceFailure.KV_REFUSED)),
            DecodeScript(fail_after=(1, SequenceFailure.INTERNAL)),
        ] * 3
    prompts = [[60 + n, 61, 62 + n] for n in range(24)]
    results = await asyncio.gather(*(mesh.generate(token_ids=ids, max_new_tokens=COUNT) for ids in prompts))
    for ids, result in zip(prompts, results, strict=True):
        assert result.ids() == expected_tokens(ids, COUNT)
        assert result.finish() == sampling_pb2.FINISH_REASON_LENGTH
    mesh.assert_at_rest()
    await mesh.until(lambda: not any(worker.num_running for worker in mesh.workers))

"""Prefill and decode workers over real gRPC with fake models: tokens that depend on the KV that was shipped."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from concurrent.futures import Future
from dataclasses import replace

import grpc
import pytest
from structlog.testing import capture_logs

from decode_worker.session import MAX_UNSENT_EVENTS, Event, Session, Step
from kvtransfer import TransferSettings
from mesh.domain.request import Fork, SequenceSpec
from mesh.rpc.channel import open_channel
from mesh.v1 import decode_pb2, decode_pb2_grpc
from tandem.v1 import sampling_pb2
from tests.defects import Repaired
from tests.fakes.requests import make_request
from tests.fakes.runner import fake_continuation, fake_token
from tests.service.fake_router import fake_router
from tests.service.worker_rig import INCARNATION, MESH_KEY, EngineRig, until, worker_rig


@pytest.mark.parametrize("transport", ["grpc", "shm"])
@pytest.mark.parametrize("length", [1, 3, 4, 5, 16, 17, 50])
async def test_tokens_through_both_workers(transport: str, length: int) -> None:
    async with worker_rig(settings=TransferSettings(transports=(transport,))) as rig, fake_router(rig) as router:
        prompt = list(range(3, 3 + length))
        request = make_request("a", prompt, max_new_tokens=12)
        assert await router.run(request) == fake_continuation(prompt, 12)
        await rig.wait_whole()


@pytest.mark.parametrize(("state_blocks", "windows"), [(0, ()), (2, ()), (0, (0, 6)), (0, (0, 0, 5, 11))])
async def test_many_at_once_with_shared_prefixes_and_pools_whole_afterwards(
    state_blocks: int, windows: tuple[int, ...]
) -> None:
    """With recurrent states, too: the state comes whole, even if the KV is here in part. And with sliding windows."""
    workers = {
        role: EngineRig.make(state_blocks=state_blocks, windows=windows, num_blocks=400)
        for role in ("prefill", "decode")
    }
    async with worker_rig(**workers, settings=TransferSettings()) as rig, fake_router(rig) as router:
        prompts = [[5] * (i % 11) + list(range(i, i + 9)) for i in range(1, 13)]
        requests = [make_request(f"r{i}", prompt, max_new_tokens=7 + i) for i, prompt in enumerate(prompts)]
        results = await asyncio.gather(*(router.run(request) for request in requests))
        for i, (prompt, result) in enumerate(zip(prompts, results, strict=True)):
            assert result == fake_continuation(prompt, 7 + i)
        num_computed = rig.prefill.scheduler.load().computed_tokens
        again = await router.run(make_request("again", prompts[9], max_new_tokens=5))
        assert again == fake_continuation(prompts[9], 5)
        num_computed = rig.prefill.scheduler.load().computed_tokens - num_computed
        assert num_computed == (19 - 8 if state_blocks else 19 - 16)  # behind the snapshot; behind full blocks
        await rig.wait_whole()


async def test_decode_worker_prefills_itself_when_no_transfer_is_named() -> None:
    async with worker_rig() as rig, fake_router(rig) as router:
        prompt = list(range(1, 30))
        request = make_request("a", prompt, max_new_tokens=6, prompt_logprobs=True)
        await router.start(request)
        first = (await router.box("a").get()).step.outputs[0]
        assert first.first_index == 0
        assert len(first.prompt_logprobs) == len(prompt)
        assert not first.prompt_logprobs[0].HasField("logprob")
        assert [first.tokens[0].id, *await router.collect(request)] == fake_continuation(prompt, 6)
        await rig.wait_whole()


async def test_replayed_attempt_goes_on_where_the_first_stopped() -> None:
    async with worker_rig() as rig, fake_router(rig) as router:
        prompt = [9, 8, 7, 6, 5]
        expected = fake_continuation(prompt, 10)
        replay = make_request("a", prompt + expected[:4], attempt=1, num_prompt_tokens=5, max_new_tokens=10)
        assert await router.run(replay) == expected[4:]


async def test_first_token_that_ends_the_answer_needs_no_decoding() -> None:
    async with worker_rig() as rig, fake_router(rig) as router:
        prompt = [1, 2, 3]
        request = make_request("a", prompt, eos_token_ids=frozenset({fake_token(prompt)}))
        assert await router.run(request) == [fake_token(prompt)]
        await rig.wait_whole()


async def test_a_prefill_worker_says_how_long_ago_it_began_and_how_long_its_kv_took() -> None:
    async with worker_rig() as rig, fake_router(rig) as router:
        rig.prefill.runner.step_s = 0.05
        request = make_request("a", range(1, 9), max_new_tokens=2)
        await router.start(request, "t")
        await router.box("a").get()
        started, _, finished = [message async for message in router.prefill(request, "t", 0)]
        assert started.started.elapsed_ms >= 50  # the pass began with the wait, before any layer was there
        assert finished.finished.duration_ms > 0
        await router.collect(request)


async def test_cancelled_prefill_frees_both_sides_and_late_abort_is_harmless() -> None:
    async with worker_rig() as rig, fake_router(rig) as router:
        rig.prefill.runner.gate.clear()
        request = make_request("a", range(1, 60))
        await router.start(request, "t")
        await router.box("a").get()
        call = router.prefill(request, "t", 0)
        reading = asyncio.create_task(call.read())
        await until(lambda: rig.prefill_service.num_prompts == 1)
        call.cancel()
        await asyncio.wait([reading])
        await router.abort(request)
        await router.abort(request)
        rig.prefill.runner.gate.set()
        await rig.wait_whole()
        assert await router.run(make_request("b", [4, 4], max_new_tokens=3)) == fake_continuation([4, 4], 3)


async def test_lost_router_takes_its_sequences_with_it() -> None:
    async with worker_rig() as rig:
        async with fake_router(rig) as router:
            await router.start(make_request("running", [1, 2], max_new_tokens=190))
            await router.start(make_request("reserved", range(1, 20)), "t")
            await router.box("running").get()
            await router.box("reserved").get()
        await rig.wait_whole()
        assert rig.decode_service.num_sequences == 0


async def test_no_room_is_said_at_once_and_too_large_differs() -> None:
    async with worker_rig(decode=EngineRig.make(num_blocks=8)) as rig, fake_router(rig) as router:
        await router.start(make_request("a", range(1, 25)), "t1")
        assert (await router.box("a").get()).HasField("reserved")
        await router.start(make_request("b", range(1, 25)), "t2")
        assert (await router.box("b").get()).failed.reason == decode_pb2.SEQUENCE_FAILURE_NO_CAPACITY
        await router.start(make_request("c", range(1, 60)), "t3")
        assert (await router.box("c").get()).failed.reason == decode_pb2.SEQUENCE_FAILURE_TOO_LARGE


@pytest.mark.parametrize("transfer_id", ["", "t"])
async def test_only_sequences_that_never_fit_are_too_large(transfer_id: str) -> None:
    async with worker_rig(decode=EngineRig.make(num_blocks=8)) as rig, fake_router(rig) as router:
        await router.start(make_request("a", range(1, 9), adapter="unknown"), transfer_id)
        failed = (await router.box("a").get()).failed
        assert failed.reason == decode_pb2.SEQUENCE_FAILURE_REFUSED
        assert failed.detail == "this worker has no adapter unknown"
        await router.start(make_request("b", range(1, 60), adapter="unknown"), transfer_id)
        assert (await router.box("b").get()).failed.reason == decode_pb2.SEQUENCE_FAILURE_TOO_LARGE


async def test_preemption_is_reported_for_replay() -> None:
    async with worker_rig(decode=EngineRig.make(num_blocks=8)) as rig, fake_router(rig) as router:
        rig.begin_together(2)
        await router.start(make_request("old", range(1, 8), max_new_tokens=24))
        await router.start(make_request("young", range(30, 41), max_new_tokens=20))
        assert (await router.failure("young")).reason == decode_pb2.SEQUENCE_FAILURE_PREEMPTED
        count = rig.decode_metrics.registry.get_sample_value("tandem_engine_preemptions_total", {"role": "decode"})
        assert count == 1
        await router.collect(make_request("old", [1]))
        await rig.wait_whole()


async def test_draining_workers_refuse_new_work_and_finish_the_old() -> None:
    async with worker_rig() as rig, fake_router(rig) as router:
        running = make_request("a", [1, 2, 3], max_new_tokens=40)
        await router.start(running)
        await router.box("a").get()
        rig.draining.set()
        await router.start(make_request("b", [1, 2, 3]))
        assert (await router.box("b").get()).failed.reason == decode_pb2.SEQUENCE_FAILURE_DRAINING
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await router.prefill(make_request("c", [1]), "t", 0).read()
        assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
        await router.collect(running)
        await asyncio.wait_for(rig.decode_service.drained(), 60)


async def test_a_drained_worker_has_sent_its_last_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else it ends before the router has them. Where every worker ends at that time, nobody can replay the request."""
    has_tokens, may_send, events = asyncio.Event(), asyncio.Event(), Session.events

    async def held_back(session: Session) -> AsyncIterator[Event]:
        async for event in events(session):
            if isinstance(event, Step):
                has_tokens.set()
                await may_send.wait()
            yield event

    monkeypatch.setattr(Session, "events", held_back)
    async with worker_rig() as rig, fake_router(rig) as router:
        request = make_request("a", [1, 2, 3], max_new_tokens=6)
        await router.start(request)
        await asyncio.wait_for(has_tokens.wait(), 60)
        rig.draining.set()
        drained = asyncio.create_task(rig.decode_service.drained())
        await until(lambda: rig.decode_service.num_sequences == 0)
        assert not (await asyncio.wait([drained], timeout=0.2))[0]
        may_send.set()
        await asyncio.wait_for(drained, 60)
        assert await router.collect(request) == fake_continuation([1, 2, 3], 6)


async def test_a_drained_worker_does_not_wait_for_ever_for_a_router_to_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("decode_worker.service._LAST_READ_S", 0.3)
    async with worker_rig() as rig, fake_router(rig) as router:
        router.ends_commands = False
        await router.start(request := make_request("a", [1, 2, 3], max_new_tokens=2))
        await router.collect(request)
        drained = asyncio.create_task(rig.decode_service.drained())
        assert not (await asyncio.wait([drained], timeout=0.1))[0]
        await asyncio.wait_for(drained, 60)


async def test_strangers_and_former_selves_are_refused() -> None:
    async with worker_rig() as rig, open_channel(rig.decode_address) as channel:
        stub = decode_pb2_grpc.DecodeStub(channel)
        for metadata, code in (
            ((), grpc.StatusCode.UNAUTHENTICATED),
            ((("authorization", "Bearer wrong-wrong-wrong-wrong"),), grpc.StatusCode.UNAUTHENTICATED),
            (MESH_KEY.metadata(), grpc.StatusCode.UNAVAILABLE),
        ):
            call = stub.Attach(metadata=metadata)
            if code is grpc.StatusCode.UNAVAILABLE:  # others are refused unheard: after that a write says INTERNAL
                hello = decode_pb2.AttachHello(router_id="r", worker_incarnation="another-life")
                await call.write(decode_pb2.AttachRequest(hello=hello))
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await call.read()
            assert refused.value.code() is code


async def test_a_stream_that_a_bad_command_breaks_has_no_end_in_order() -> None:
    """At such an end a router takes the worker for one that drains, and logs nothing."""
    hello = decode_pb2.AttachHello(router_id="r", worker_incarnation=INCARNATION)
    async with worker_rig() as rig, open_channel(rig.decode_address) as channel:
        attach = channel.stream_stream("/mesh.v1.Decode/Attach", None, decode_pb2.AttachResponse.FromString)
        call = attach(metadata=MESH_KEY.metadata())
        await call.write(decode_pb2.AttachRequest(hello=hello).SerializeToString())
        events = [(await call.read()).WhichOneof("event")]
        await call.write(b"no command")
        with contextlib.suppress(grpc.aio.AioRpcError):
            while (event := await call.read()) is not grpc.aio.EOF:
                events.append(event.WhichOneof("event"))
        assert await call.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert events == ["welcome"]


async def test_dead_engine_is_reported() -> None:
    async with worker_rig() as rig, fake_router(rig) as router:
        rig.decode.runner.fail_with = RuntimeError("out of luck")
        await router.start(make_request("a", [1, 2, 3]))
        await asyncio.wait_for(rig.decode.died.wait(), 60)


async def test_stop_token_ends_the_sequence() -> None:
    async with worker_rig() as rig, fake_router(rig) as router:
        expected = fake_continuation([1, 2], 5)
        request = make_request("a", [1, 2], max_new_tokens=20, sampling={"stop_token_ids": (expected[4],)})
        await router.start(request, "t")
        await router.box("a").get()
        async for _ in router.prefill(request, "t", 0):
            pass
        last = None
        while last is None or not last.finish_reason:
            last = (await router.box("a").get()).step.outputs[0]
        assert last.finish_reason == sampling_pb2.FINISH_REASON_STOP_SEQUENCE
        assert last.tokens[-1].id == expected[4]


def forking(prompt: list[int], *, num_forks: int = 2, **changes: object) -> SequenceSpec:
    forks = tuple(Fork(f"f{place}", 0, place) for place in range(num_forks))
    return make_request("a", prompt, forks=forks, **changes)


@pytest.mark.parametrize("transport", ["grpc", "shm"])
@pytest.mark.parametrize("length", [1, 4, 5, 7, 16])
async def test_forks_share_kv_that_was_sent_once(transport: str, length: int) -> None:
    async with worker_rig(settings=TransferSettings(transports=(transport,))) as rig, fake_router(rig) as router:
        request = forking(list(range(3, 3 + length)), max_new_tokens=6)
        assert await router.run(request) == fake_continuation(request.token_ids, 6)
        for fork in request.forked():
            assert await router.collect(fork) == fake_continuation(request.token_ids, 6)
        assert rig.prefill.scheduler.load().generated_tokens == 1
        assert rig.decode.scheduler.load().computed_tokens == 0, "one token a step, also for a fork's first"
        await rig.wait_whole()


async def test_forks_of_a_prompt_that_the_decode_worker_computes() -> None:
    async with worker_rig() as rig, fake_router(rig) as router:
        request = forking(list(range(3, 43)), max_new_tokens=6)
        await router.start(request)
        for each in (request, *request.forked()):
            assert await router.collect(each) == fake_continuation(request.token_ids, 6)
        assert rig.decode.scheduler.load().computed_tokens == len(request.token_ids)


async def test_kv_is_sent_for_forks_even_if_the_first_token_is_the_last() -> None:
    async with worker_rig() as rig, fake_router(rig) as router:
        prompt = [1, 2, 3, 4, 5]
        request = forking(prompt, max_new_tokens=4, eos_token_ids=frozenset({fake_token(prompt)}))
        await router.start(request, "t")
        await router.box("a").get()
        messages = [message async for message in router.prefill(request, "t", 0)]
        assert messages[1].first_token.finish_reason == sampling_pb2.FINISH_REASON_EOS_TOKEN
        assert messages[2].HasField("finished")
        for fork in request.forked():  # whose first token is the same here
            assert await router.collect(fork) == [fake_token(prompt)]
        await router.abort(request)
        await rig.wait_whole()


@pytest.mark.parametrize("how", ["aborted", "too large", "out of time", "newer attempt"])
async def test_forks_of_a_prompt_that_never_comes_are_given_back(how: str) -> None:
    async with worker_rig(decode=EngineRig.make(num_blocks=8)) as rig, fake_router(rig) as router:
        length = 90 if how == "too large" else 9
        request = forking(list(range(length)), time_left_s=0.05 if how == "out of time" else None)
        await router.start(request, "t")
        if how == "aborted":
            await router.abort(request)
        if how == "newer attempt":
            await router.start(replace(request, attempt=1, forks=()), "t2")
        reasons = {(await router.failure(fork.request_id)).reason for fork in request.forked()}
        expected = {decode_pb2.SEQUENCE_FAILURE_NO_CAPACITY}
        assert reasons <= expected | ({decode_pb2.SEQUENCE_FAILURE_DEADLINE} if how == "out of time" else set())
        if how == "newer attempt":
            await router.abort(replace(request, attempt=1))
        await rig.wait_whole()


@pytest.mark.parametrize("refused", ["a", "f1"])
async def test_a_choice_whose_grammar_is_refused_takes_the_others_with_it(refused: str) -> None:
    async with worker_rig() as rig, fake_router(rig) as router:
        rig.decode.runner.refused = {refused: "early"}
        await router.start(forking([1, 2, 3]))
        for name in ("a", "f0", "f1"):
            event = await asyncio.wait_for(router.box(name).get(), 60)
            assert (event.failed.reason, event.failed.detail) == (decode_pb2.SEQUENCE_FAILURE_REFUSED, "early")
        assert rig.decode_service.num_sequences == 0


async def test_a_request_that_ends_while_it_is_prepared_needs_nothing_more(repaired: Repaired) -> None:
    """Such as an adapter that others would have to make room for."""
    async with worker_rig() as rig, fake_router(rig) as router:
        asked: list[list[Future[None]]] = []
        for runner in (rig.decode.runner, rig.prefill.runner):
            runner.prepare = lambda _: asked.append([Future(), Future()]) or asked[-1]  # type: ignore[method-assign]
        request = forking(list(range(9)))
        await router.start(request)
        await until(lambda: len(asked) == 1)
        await router.abort(request)
        call = router.prefill(make_request("b", [1, 2, 3]), "t", 0)
        reading = asyncio.create_task(anext(aiter(call)))
        await until(lambda: len(asked) == 2)
        reading.cancel()
        await until(lambda: all(future.cancelled() for futures in asked for future in futures))
        await asyncio.wait_for(rig.decode_service.drained(), 60)
        await rig.wait_whole()
    repaired("D42", "both workers give up what they prepare as soon as the request ends")


async def test_forks_without_a_slot_fail_for_capacity_and_are_no_preemption() -> None:
    async with worker_rig(decode=EngineRig.make(max_num_seqs=2)) as rig, fake_router(rig) as router:
        request = forking(list(range(9)), max_new_tokens=6)
        first, second = request.forked()
        await router.start(request)
        assert (await router.box(second.request_id).get()).failed.reason == decode_pb2.SEQUENCE_FAILURE_NO_CAPACITY
        for each in (request, first):
            assert await router.collect(each) == fake_continuation(request.token_ids, 6)
        value = rig.decode_metrics.registry.get_sample_value
        assert value("tandem_engine_preemptions_total", {"role": "decode"}) == 0
        failures = {"role": "decode", "reason": "no_capacity"}
        assert value("tandem_engine_sequence_failures_total", failures) == 1


async def test_forks_that_wait_end_with_their_router() -> None:
    async with worker_rig() as rig:
        with capture_logs() as logs:
            async with fake_router(rig) as router:
                await router.start(forking(list(range(9))), "t")
                await router.box("a").get()  # its blocks are reserved
            await rig.wait_whole()
        assert [line for line in logs if line["log_level"] == "error"] == []


async def test_many_forks_that_wait_end_with_a_router_that_reads_nothing() -> None:
    async with worker_rig() as rig:
        session = Session()
        for number in range(MAX_UNSENT_EVENTS + 400):
            request = make_request(f"r{number}", [7, 8], forks=(Fork(f"f{number}", 0, 0),))
            rig.decode_service.start(session, request, "")
        assert rig.decode_service.num_sequences == 2 * (MAX_UNSENT_EVENTS + 400)
        rig.decode_service.end_session(session)  # each fork's Failed event is one more that nobody has read
        assert rig.decode_service.num_sequences == 0


async def test_a_fork_ends_alone() -> None:
    async with worker_rig() as rig, fake_router(rig) as router:
        request = forking(list(range(9)), max_new_tokens=40)
        first, second = request.forked()
        await router.start(request)
        await router.abort(first)
        await router.box("f1").get()
        await router.abort(request)
        assert len(await router.collect(second)) >= 38
        await rig.wait_whole()


async def test_a_replay_of_a_fork_goes_on_alone() -> None:
    async with worker_rig() as rig, fake_router(rig) as router:
        request = forking(list(range(9)), max_new_tokens=20)
        await router.start(request)
        known = fake_continuation(request.token_ids, 5)
        again = replace(
            request.forked()[0], attempt=1, token_ids=(*request.token_ids, *known), cache_namespace="elsewhere"
        )
        await router.start(again)
        ids: dict[int, list[int]] = {0: [], 1: []}
        while len(ids[1]) < 15:
            output = (await router.box("f0").get()).step.outputs[0]
            ids[output.attempt] += [token.id for token in output.tokens]
        assert ids[1] == fake_continuation(request.token_ids, 20)[5:]
        for each in (request, request.forked()[1]):
            assert await router.collect(each) == fake_continuation(request.token_ids, 20)

"""Whatever comes too late, for somebody else, or spoilt is refused by workers, and changes nothing that is current."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import grpc
import pytest

from kvtransfer.messages import Commit, SenderMessage, TransferChunk, TransferOpen
from kvtransfer.transports.base import Payload
from mesh.domain.request import mint_id
from mesh.v1 import decode_pb2
from tests.evidence import Evidence
from tests.fakes.requests import make_request
from tests.fakes.runner import fake_continuation
from tests.service.fake_router import FakeRouter, fake_router
from tests.service.raw_sender import honest_messages, raw_sender
from tests.service.worker_rig import MESH_KEY, WorkerRig, until, worker_rig

KV_FAILURES = (decode_pb2.SEQUENCE_FAILURE_KV_REFUSED, decode_pb2.SEQUENCE_FAILURE_KV_MISSING)

PROMPT = list(range(3, 40))
NUM_TOKENS = 6
Spoil = Callable[[list[SenderMessage]], Sequence[SenderMessage]]


@dataclass(frozen=True)
class Fault:
    """How a transfer is spoilt. A fault that is `fenced` never gets at the reservation; others end it."""

    name: str
    spoil: Spoil
    status: grpc.StatusCode
    fenced: bool = False


def opened_with(**changes: object) -> Spoil:
    def spoil(messages: list[SenderMessage]) -> list[SenderMessage]:
        opening, *rest = messages
        assert isinstance(opening, TransferOpen)
        return [replace(opening, **changes), *rest]  # type: ignore[arg-type]

    return spoil


def opened_with_layout(**changes: object) -> Spoil:
    def spoil(messages: list[SenderMessage]) -> list[SenderMessage]:
        opening, *rest = messages
        assert isinstance(opening, TransferOpen)
        return [replace(opening, layout=replace(opening.layout, **changes)), *rest]  # type: ignore[arg-type]

    return spoil


def with_payload(change: Callable[[bytes], bytes]) -> Spoil:
    """The third message, a chunk, with another payload."""

    def spoil(messages: list[SenderMessage]) -> list[SenderMessage]:
        chunk = messages[2]
        assert isinstance(chunk, TransferChunk)
        messages[2] = replace(chunk, payload=Payload(change(chunk.payload.inline)))
        return messages

    return spoil


def with_chunk_of(transfer_id: str | None, attempt: int) -> Spoil:
    """The third message taken from another honest transfer of the same prompt: same bytes, same place."""

    def spoil(messages: list[SenderMessage]) -> list[SenderMessage]:
        assert isinstance(messages[0], TransferOpen)
        other = honest_messages(PROMPT, transfer_id or messages[0].transfer_id, attempt)
        messages[2] = other[2]
        return messages

    return spoil


def with_commit(**changes: object) -> Spoil:
    def spoil(messages: list[SenderMessage]) -> list[SenderMessage]:
        commit = messages[-1]
        assert isinstance(commit, Commit)
        return [*messages[:-1], replace(commit, **changes)]  # type: ignore[arg-type]

    return spoil


LOSS, REFUSED, LAYOUT = (
    grpc.StatusCode.DATA_LOSS,
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.FAILED_PRECONDITION,
)
FAULTS = [
    Fault("first byte flipped", with_payload(lambda data: bytes([data[0] ^ 1]) + data[1:]), LOSS),
    Fault("last byte flipped", with_payload(lambda data: data[:-1] + bytes([data[-1] ^ 128])), LOSS),
    Fault("all zeros", with_payload(lambda data: bytes(len(data))), LOSS),
    Fault("truncated payload", with_payload(lambda data: data[:-4]), LOSS),
    Fault("empty payload", with_payload(lambda data: b""), LOSS),
    Fault("longer payload", with_payload(lambda data: data + b"\0"), LOSS),
    Fault("chunk of an older attempt", with_chunk_of(None, 0), LOSS),
    Fault("chunk of a newer attempt", with_chunk_of(None, 2), LOSS),
    Fault("chunk of another request", with_chunk_of("another", 1), LOSS),
    Fault("chunks reordered", lambda m: [m[0], m[2], m[1], *m[3:]], LOSS),
    Fault("chunk repeated", lambda m: [*m[:2], m[1], *m[2:]], LOSS),
    Fault("chunk missing", lambda m: [*m[:2], *m[3:]], LOSS),
    Fault("transfer cut off", lambda m: m[:-2], REFUSED),
    Fault("nothing but the opening", lambda m: m[:1], REFUSED),
    Fault("committed with a chunk missing", lambda m: [*m[:-2], m[-1]], REFUSED),
    Fault("committed with another digest", with_commit(digest=1), LOSS),
    Fault("committed with fewer tokens", with_commit(num_tokens=len(PROMPT) - 1), REFUSED),
    Fault("another dtype", opened_with_layout(dtype="float16"), LAYOUT),
    Fault("another block size", opened_with_layout(block_size=8), LAYOUT),
    Fault("other heads", opened_with_layout(num_kv_heads=2), LAYOUT),
    Fault("another model", opened_with_layout(model_fingerprint="other"), LAYOUT),
    Fault("other blocks", opened_with(first_block=1), REFUSED),
    Fault("older attempt", opened_with(attempt=0), REFUSED, fenced=True),
    Fault("newer attempt", opened_with(attempt=2), REFUSED, fenced=True),
    Fault("former incarnation", opened_with(receiver_incarnation="former-life"), REFUSED, fenced=True),
    Fault("unknown transfer", opened_with(transfer_id="unknown"), REFUSED, fenced=True),
]


async def one_fault(rig: WorkerRig, router: FakeRouter, fault: Fault) -> tuple[bool, bool]:
    """Whether it was refused, and whether the request's tokens came out right after all."""
    request = make_request(fault.name, PROMPT, attempt=1, max_new_tokens=NUM_TOKENS)
    transfer_id = mint_id()
    await router.start(request, transfer_id)
    assert (await router.box(fault.name).get()).reserved.ready_tokens == 0
    async with raw_sender(rig.decode_address, MESH_KEY) as sender:
        status = await sender.say_all(fault.spoil(honest_messages(PROMPT, transfer_id, 1)))
    refused = status is fault.status
    if fault.fenced:
        async with raw_sender(rig.decode_address, MESH_KEY) as sender:
            honest = await sender.say_all(honest_messages(PROMPT, transfer_id, 1))
        ids = [fake_continuation(PROMPT, 1)[0], *await router.collect(request)]
        refused = refused and honest is grpc.StatusCode.OK
    else:
        message = await router.box(fault.name).get()
        refused = refused and message.failed.reason in KV_FAILURES
        ids = await router.run(replace(request, attempt=2))
    return refused, ids == fake_continuation(PROMPT, NUM_TOKENS)


async def test_injected_kv_faults_are_refused_and_replays_are_right(evidence: Evidence) -> None:
    refused, right = [], []
    for fault in FAULTS:
        async with worker_rig() as rig, fake_router(rig) as router:  # a fresh one: nothing cached
            async with asyncio.timeout(60):
                was_refused, was_right = await one_fault(rig, router, fault)
        refused += [fault.name] * was_refused
        right += [fault.name] * was_right
    everything = [fault.name for fault in FAULTS]
    evidence(
        "R3",
        "injected faults refused",
        f"{len(refused)} of {len(FAULTS)}",
        target="100 %",
        ok=refused == everything,
    )
    evidence(
        "R3",
        "wrong tokens after injected faults",
        len(FAULTS) - len(right),
        target="0",
        ok=right == everything,
    )
    assert (refused, right) == (everything, everything)


async def test_a_next_attempt_ends_the_older_ones_first() -> None:
    async with worker_rig() as rig, fake_router(rig) as router:
        # 60 tokens take 16 of 64 blocks: there is no room for five at a time.
        prompt = list(range(1, 61))
        for attempt in range(5):
            await router.start(make_request("a", prompt, attempt=attempt, max_new_tokens=4), f"t{attempt}")
            reserved = (await router.box("a").get()).reserved
            assert reserved.attempt == attempt
            assert rig.decode_service.num_sequences == 1
        async with raw_sender(rig.decode_address, MESH_KEY) as late:
            assert await late.say_all(honest_messages(prompt, "t3", 3)) is grpc.StatusCode.UNAVAILABLE
        async with raw_sender(rig.decode_address, MESH_KEY) as sender:
            assert await sender.say_all(honest_messages(prompt, "t4", 4)) is grpc.StatusCode.OK
        assert await router.collect(make_request("a", prompt)) == fake_continuation(prompt, 4)[1:]


async def test_a_next_attempt_ends_one_that_runs_and_one_that_is_being_written() -> None:
    async with worker_rig() as rig, fake_router(rig) as router, raw_sender(rig.decode_address, MESH_KEY) as sender:
        prompt = list(range(1, 30))
        await router.start(make_request("runs", [1, 2], max_new_tokens=190))
        await router.box("runs").get()
        await router.start(make_request("comes", prompt), "t")
        await router.box("comes").get()
        opening, chunk, *_ = honest_messages(prompt, "t")
        assert [await sender.say(opening), await sender.say(chunk)] == ["granted", "ack"]
        for name in ("runs", "comes"):
            await router.start(make_request(name, prompt, attempt=1, max_new_tokens=4), f"{name}-1")
            message = await router.box(name).get()
            while not message.HasField("reserved"):
                message = await router.box(name).get()
            assert message.reserved.attempt == 1
        assert await sender.refused() is grpc.StatusCode.UNAVAILABLE
        assert rig.decode_service.num_sequences == 2


async def test_older_attempts_and_their_aborts_do_not_touch_the_current_one() -> None:
    async with worker_rig() as rig, fake_router(rig) as router:
        prompt = list(range(1, 30))
        current = make_request("a", prompt, attempt=2, max_new_tokens=6)
        await router.start(current, "t2")
        await router.box("a").get()
        for attempt in (1, 2):
            await router.start(replace(current, attempt=attempt), f"again-{attempt}")
            failed = (await router.box("a").get()).failed
            assert (failed.attempt, failed.reason) == (attempt, decode_pb2.SEQUENCE_FAILURE_INTERNAL)
        await router.abort(replace(current, attempt=1))
        async with raw_sender(rig.decode_address, MESH_KEY) as sender:
            assert await sender.say_all(honest_messages(prompt, "t2", 2)) is grpc.StatusCode.OK
        assert await router.collect(current) == fake_continuation(prompt, 6)[1:]


async def test_a_transfer_id_in_use_is_refused_and_leaves_its_owner_alone() -> None:
    async with worker_rig() as rig, fake_router(rig) as router:
        prompt = list(range(1, 30))
        await router.start(make_request("a", prompt, max_new_tokens=4), "t")
        await router.box("a").get()
        await router.start(make_request("b", prompt), "t")
        assert (await router.box("b").get()).failed.reason == decode_pb2.SEQUENCE_FAILURE_INTERNAL
        async with raw_sender(rig.decode_address, MESH_KEY) as sender:
            assert await sender.say_all(honest_messages(prompt, "t")) is grpc.StatusCode.OK
        assert await router.collect(make_request("a", prompt)) == fake_continuation(prompt, 4)[1:]


async def test_one_router_cannot_end_another_ones_sequences() -> None:
    async with worker_rig() as rig, fake_router(rig) as owner, fake_router(rig) as other:
        request = make_request("a", [1, 2, 3], max_new_tokens=20)
        rig.decode.runner.gate.clear()
        await owner.start(request)
        await until(lambda: rig.decode_service.num_sequences == 1)
        await other.abort(request)
        await other.start(make_request("b", [1]), "t")  # what comes after the abort on the same stream
        await until(lambda: rig.decode_service.num_sequences == 2)
        rig.decode.runner.gate.set()
        assert await owner.collect(request) == fake_continuation([1, 2, 3], 20)


async def test_a_prefill_for_a_former_life_or_an_older_attempt_of_the_decode_worker_ends_in_nothing() -> None:
    async with worker_rig() as rig, fake_router(rig) as router:
        prompt = list(range(1, 30))
        request = make_request("a", prompt, attempt=1, max_new_tokens=4)
        await router.start(request, "t")
        await router.box("a").get()
        former, current = "former-life", router.incarnation
        for incarnation, attempt in ((former, 1), (current, 0)):
            router.incarnation = incarnation
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                async for _ in router.prefill(replace(request, attempt=attempt), "t", 0):
                    pass
            assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
        router.incarnation = current
        async for _ in router.prefill(request, "t", 0):
            pass
        assert await router.collect(request) == fake_continuation(prompt, 4)[1:]
